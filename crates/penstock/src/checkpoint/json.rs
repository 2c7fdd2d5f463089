//! The JSON of a safetensors header, read straight into borrowed structs.
//!
//! `serde_json::Value` would allocate several times per tensor and, as every map of `serde` does, keep the last of two
//! equal keys without a word: a header that names a tensor twice shows different tensors to different readers. So the
//! maps are visited here by hand, and a second equal key is refused.
//!
//! Apart from that, this accepts what the `safetensors` crate accepts, to the letter (a differential test and a fuzz
//! target hold it to that): unknown fields of a tensor are skipped but must be JSON that could be read, a tensor may be
//! written as an array of its three fields, `__metadata__` may be null. Nothing here knows what the numbers mean.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::Dtype;
use crate::error::{Code, Error, ErrorKind, Result};

/// A header as written.
pub(super) struct RawHeader<'a> {
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) tensors: Vec<(Cow<'a, str>, RawTensor)>,
}

/// A tensor as written: well-formed, not yet checked.
pub(super) struct RawTensor {
    pub(super) dtype: RawDtype,
    pub(super) shape: Vec<u64>,
    pub(super) offsets: (u64, u64),
}

/// A type as written.
pub(super) enum RawDtype {
    Known(Dtype),
    Unknown(String),
}

/// Reads the text of a header.
pub(super) fn read(text: &str) -> Result<RawHeader<'_>> {
    let mut tensor = None;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    deserializer
        .deserialize_map(HeaderVisitor { tensor: &mut tensor })
        .and_then(|header| deserializer.end().map(|()| header))
        .map_err(|error| {
            let made = Error::new(ErrorKind::Format, format!("the header is malformed: {error}"))
                .code(Code::BadHeader);
            match tensor {
                Some(name) => made.tensor(name),
                None => made,
            }
        })
}

struct HeaderVisitor<'n> {
    /// The tensor at which reading failed.
    tensor: &'n mut Option<String>,
}

impl<'de> Visitor<'de> for HeaderVisitor<'_> {
    type Value = RawHeader<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut header = RawHeader { metadata: BTreeMap::new(), tensors: Vec::new() };
        let mut seen = HashSet::new();
        while let Some(name) = map.next_key_seed(Text)? {
            if !seen.insert(name.clone()) {
                if name == "__metadata__" {
                    return Err(A::Error::custom("`__metadata__` appears twice"));
                }
                *self.tensor = Some(name.into_owned());
                return Err(A::Error::custom("the header names this tensor twice"));
            }
            if name == "__metadata__" {
                header.metadata = map.next_value_seed(UniqueStrings {
                    expected: "`__metadata__` to be an object of strings",
                    repeated: "`__metadata__` has the key",
                })?;
            } else {
                match map.next_value_seed(TensorSeed) {
                    Ok(tensor) => header.tensors.push((name, tensor)),
                    Err(error) => {
                        *self.tensor = Some(name.into_owned());
                        return Err(error);
                    }
                }
            }
        }
        Ok(header)
    }
}

/// A string, borrowed where it has no escapes.
#[derive(Clone, Copy)]
pub(super) struct Text;

impl<'de> DeserializeSeed<'de> for Text {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Text {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(text))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(text.to_owned()))
    }
}

/// Strings by unique keys, or null for none.
pub(super) struct UniqueStrings {
    pub(super) expected: &'static str,
    /// What errors say before a key that appears twice.
    pub(super) repeated: &'static str,
}

impl<'de> DeserializeSeed<'de> for UniqueStrings {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UniqueStrings {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(BTreeMap::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut strings = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            if strings.contains_key(&key) {
                return Err(A::Error::custom(format_args!("{} {key:?} twice", self.repeated)));
            }
            let value = map.next_value::<String>()?;
            strings.insert(key, value);
        }
        Ok(strings)
    }
}

struct TensorSeed;

impl<'de> DeserializeSeed<'de> for TensorSeed {
    type Value = RawTensor;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TensorSeed {
    type Value = RawTensor;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tensor: an object of `dtype`, `shape` and `data_offsets`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(field) = map.next_key_seed(Text)? {
            match &*field {
                "dtype" if dtype.is_none() => dtype = Some(map.next_value_seed(DtypeSeed)?),
                "shape" if shape.is_none() => shape = Some(map.next_value::<Vec<u64>>()?),
                "data_offsets" if offsets.is_none() => offsets = Some(map.next_value::<(u64, u64)>()?),
                "dtype" | "shape" | "data_offsets" => {
                    return Err(A::Error::custom(format_args!("the field `{field}` appears twice")));
                }
                _ => map.next_value_seed(Skipped)?,
            }
        }
        Ok(RawTensor {
            dtype: dtype.ok_or_else(|| A::Error::missing_field("dtype"))?,
            shape: shape.ok_or_else(|| A::Error::missing_field("shape"))?,
            offsets: offsets.ok_or_else(|| A::Error::missing_field("data_offsets"))?,
        })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        let missing = |count| A::Error::invalid_length(count, &"the three fields of a tensor");
        let dtype = fields.next_element_seed(DtypeSeed)?.ok_or_else(|| missing(0))?;
        let shape = fields.next_element()?.ok_or_else(|| missing(1))?;
        let offsets = fields.next_element()?.ok_or_else(|| missing(2))?;
        if fields.next_element::<IgnoredAny>()?.is_some() {
            return Err(missing(4));
        }
        Ok(RawTensor { dtype, shape, offsets })
    }
}

/// A type: its name or, as `serde` also writes an enum, an object of the name and null.
struct DtypeSeed;

impl<'de> DeserializeSeed<'de> for DtypeSeed {
    type Value = RawDtype;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for DtypeSeed {
    type Value = RawDtype;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a dtype")
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok(Dtype::from_name(name).map_or_else(|| RawDtype::Unknown(name.to_owned()), RawDtype::Known))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let single = || A::Error::custom("a dtype written as an object must have one key");
        let name = map.next_key_seed(Text)?.ok_or_else(single)?;
        map.next_value::<()>()?;
        if map.next_key_seed(Text)?.is_some() {
            return Err(single());
        }
        self.visit_str(&name)
    }
}

/// A value of no interest that must still be readable: serde's `IgnoredAny` lets pass numbers out of range, lone
/// surrogates and any depth of nesting, on which other readers of the same file fail.
#[derive(Clone, Copy)]
struct Skipped;

impl<'de> DeserializeSeed<'de> for Skipped {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

#[rustfmt::skip] // one line each
impl<'de> Visitor<'de> for Skipped {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str("any value") }
    fn visit_unit<E>(self) -> Result<(), E> { Ok(()) }
    fn visit_bool<E>(self, _: bool) -> Result<(), E> { Ok(()) }
    fn visit_u64<E>(self, _: u64) -> Result<(), E> { Ok(()) }
    fn visit_i64<E>(self, _: i64) -> Result<(), E> { Ok(()) }
    fn visit_f64<E>(self, _: f64) -> Result<(), E> { Ok(()) }
    fn visit_str<E>(self, _: &str) -> Result<(), E> { Ok(()) }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(Self)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_key_seed(Text)?.is_some() {
            map.next_value_seed(Self)?;
        }
        Ok(())
    }
}
