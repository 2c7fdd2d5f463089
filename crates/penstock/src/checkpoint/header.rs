//! One object's header: eight bytes of length, then JSON, then data.
//!
//! Accepted is what the `safetensors` crate accepts, less duplicate names, which JSON parsers drop silently; a test
//! compares the two on valid and mutated headers. Every error names the tensor and the value that is wrong, and files
//! that are recognisably something else say what they are: that is what people face at night.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};

use super::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Window;
use crate::store::{Lane, Object};

/// The longest header that is read, as in the `safetensors` crate.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes of the first read: enough for the headers of most checkpoints, so that opening takes one round trip.
const FIRST_READ: u64 = 256 << 10;
/// Bytes of the length before the header.
const PREFIX: u64 = 8;

/// One tensor of a header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedTensor {
    /// Its name.
    pub name: Arc<str>,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Elements along each dimension.
    pub shape: Vec<u64>,
    /// Its bytes, from the beginning of the object.
    pub range: Range<u64>,
}

/// A header that was found to be valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The `__metadata__`, if there is any.
    pub metadata: Option<BTreeMap<String, String>>,
    /// The tensors, in the order of their bytes.
    pub tensors: Vec<ParsedTensor>,
    /// Where the data begins.
    pub data_start: u64,
}

impl Header {
    /// Reads and checks the header of `object`.
    ///
    /// # Errors
    /// `Format`, naming the object, where it is malformed; otherwise what reading may fail with.
    pub fn read(object: &dyn Object, lane: &mut Lane) -> Result<Self> {
        let bytes = object.bytes();
        let mut prefix = vec![0; to_usize(bytes.min(FIRST_READ))?];
        object.read_into(0, Window::from_slice(&mut prefix), lane)?;
        let header_end = header_end(&prefix, bytes).map_err(|error| error.object(object.location()))?;
        let read = prefix.len() as u64;
        if header_end > read {
            prefix.resize(to_usize(header_end)?, 0);
            object.read_into(read, Window::from_slice(&mut prefix[to_usize(read)?..]), lane)?;
        }
        Self::parse(&prefix[..to_usize(header_end)?], bytes).map_err(|error| error.object(object.location()))
    }

    /// Checks a header: `prefix` is the object's beginning, up to the header's end or beyond, and `object_bytes` the
    /// size of all of it.
    ///
    /// # Errors
    /// `Format`, naming the tensor and the offending value where there is one.
    pub fn parse(prefix: &[u8], object_bytes: u64) -> Result<Self> {
        let data_start = header_end(prefix, object_bytes)?;
        let json =
            prefix.get(8..to_usize(data_start)?).ok_or_else(|| malformed("the header was not read whole"))?;
        let text = std::str::from_utf8(json).map_err(|error| {
            let at = PREFIX + error.valid_up_to() as u64;
            recognised(prefix, malformed("the header is not UTF-8").range(at..at + 1))
        })?;
        let parsed: Json = serde_json::from_str(text).map_err(|error| {
            let error = malformed(format!("the header is not a valid safetensors header: {error}"));
            recognised(prefix, error.range(PREFIX..data_start))
        })?;
        let tensors = check(parsed.tensors, data_start, object_bytes)?;
        Ok(Self { metadata: parsed.metadata, tensors, data_start })
    }
}

/// Where the header ends and the data begins.
fn header_end(prefix: &[u8], object_bytes: u64) -> Result<u64> {
    let incomplete = "The download may be incomplete: fetch the file again";
    if object_bytes == 0 {
        return Err(malformed("the file is empty").remedy(incomplete));
    }
    let Some(length) = prefix.first_chunk::<8>().filter(|_| object_bytes >= PREFIX) else {
        let cause = format!("the file has {object_bytes} bytes, too few for a header's length");
        return Err(recognised(prefix, malformed(cause).remedy(incomplete)));
    };
    let length = u64::from_le_bytes(*length);
    let wrong = |cause: String| Err(recognised(prefix, malformed(cause).range(0..PREFIX)));
    if length == 0 {
        return wrong("the header's length is 0".into());
    }
    if length > MAX_HEADER_BYTES {
        return wrong(format!(
            "the header's length is {length}, above the format's limit of {MAX_HEADER_BYTES}"
        ));
    }
    if length > object_bytes - PREFIX {
        let cause = format!("the header's length is {length}, but the file has only {object_bytes} bytes");
        return Err(recognised(prefix, malformed(cause).range(0..PREFIX)).remedy(incomplete));
    }
    Ok(PREFIX + length)
}

/// Checks offsets against shapes, each other and the object's size; returns the tensors in the order of their bytes.
fn check(mut entries: Vec<(String, Entry)>, data_start: u64, object_bytes: u64) -> Result<Vec<ParsedTensor>> {
    entries.sort_by(|(a, x), (b, y)| (x.data_offsets, a).cmp(&(y.data_offsets, b)));
    let mut tensors = Vec::with_capacity(entries.len());
    let mut expected = 0u64;
    for (name, entry) in entries {
        let [start, end] = entry.data_offsets;
        let wrong = |cause: String| Err(malformed(cause).tensor(&name));
        let Some(dtype) = Dtype::from_name(&entry.dtype) else {
            return wrong(format!("unknown dtype {:?}", entry.dtype));
        };
        if end < start {
            return wrong(format!("data_offsets [{start}, {end}] are reversed"));
        }
        if start > expected {
            return wrong(format!(
                "data_offsets [{start}, {end}] leave a hole: the data before ends at {expected}"
            ));
        }
        if start < expected {
            return wrong(format!(
                "data_offsets [{start}, {end}] overlap the data before, which ends at {expected}"
            ));
        }
        let shape = entry.shape;
        let bits = shape.iter().try_fold(1u64, |n, size| n.checked_mul(*size));
        let Some(bits) = bits.and_then(|elements| elements.checked_mul(dtype.bits())) else {
            return wrong(format!("the number of elements of shape {shape:?} overflows"));
        };
        if bits % 8 != 0 {
            return wrong(format!("shape {shape:?} of {} does not fill whole bytes", dtype.name()));
        }
        if end - start != bits / 8 {
            return wrong(format!(
                "shape {shape:?} of {} takes {} bytes, but data_offsets [{start}, {end}] hold {}",
                dtype.name(),
                bits / 8,
                end - start
            ));
        }
        expected = end;
        let Some(range) = data_start.checked_add(end).map(|end| data_start + start..end) else {
            return wrong(format!("data_offsets [{start}, {end}] overflow"));
        };
        tensors.push(ParsedTensor { name: name.into(), dtype, shape, range });
    }
    let has = object_bytes - data_start;
    if expected > has {
        let last = tensors.iter().find(|tensor| tensor.range.end > object_bytes);
        let error = malformed(format!(
            "the header describes {expected} bytes of data, but the file holds only {has}"
        ))
        .remedy("The download is incomplete: fetch the file again");
        return Err(match last {
            Some(tensor) => error.tensor(&*tensor.name).range(tensor.range.clone()),
            None => error,
        });
    }
    if expected < has {
        return Err(malformed(format!(
            "the file holds {has} bytes of data, but the header describes only {expected}"
        ))
        .range(data_start + expected..object_bytes));
    }
    Ok(tensors)
}

fn malformed(cause: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Format, cause)
}

/// Adds what the file seems to be instead, where its beginning tells.
fn recognised(prefix: &[u8], error: Error) -> Error {
    const KNOWN: &[(&[u8], &str)] = &[
        (b"version https://git-lfs", "This is a Git LFS pointer, not the file: run `git lfs pull`"),
        (b"PK\x03\x04", "This is a ZIP file, probably a PyTorch checkpoint: convert it to safetensors"),
        (b"\x80\x02", "This is a pickle, probably a PyTorch checkpoint: convert it to safetensors"),
        (b"GGUF", "This is a GGUF file: convert it to safetensors"),
        (b"\x89HDF", "This is an HDF5 file: convert it to safetensors"),
        (b"<!DOCTYPE", "This is a web page: the download failed or needs a login"),
        (b"<html", "This is a web page: the download failed or needs a login"),
        (
            b"{",
            "This is JSON without a safetensors prefix: give the .safetensors file, or a shard index as *.json",
        ),
    ];
    match KNOWN.iter().find(|(magic, _)| prefix.starts_with(magic)) {
        Some((_, remedy)) => error.remedy(*remedy),
        None => error,
    }
}

fn to_usize(n: u64) -> Result<usize> {
    usize::try_from(n).map_err(|_| malformed(format!("{n} bytes are more than this machine can address")))
}

/// A header's JSON, as it stands there.
struct Json {
    metadata: Option<BTreeMap<String, String>>,
    tensors: Vec<(String, Entry)>,
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Json;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
                let mut json = Json { metadata: None, tensors: Vec::new() };
                let mut seen = HashSet::new();
                while let Some(key) = map.next_key::<String>()? {
                    if !seen.insert(key.clone()) {
                        return Err(de::Error::custom(format_args!("duplicate tensor name {key:?}")));
                    }
                    if key == "__metadata__" {
                        json.metadata = map.next_value::<Option<Strings>>()?.map(|strings| strings.0);
                    } else {
                        let entry = map.next_value::<Entry>();
                        let entry =
                            entry.map_err(|e| de::Error::custom(format_args!("tensor {key:?}: {e}")))?;
                        json.tensors.push((key, entry));
                    }
                }
                Ok(json)
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// A map of strings without duplicate keys.
pub(super) struct Strings(pub(super) BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Strings;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object whose values are strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Strings, A::Error> {
                let mut strings = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if strings.contains_key(&key) {
                        return Err(de::Error::custom(format_args!("duplicate key {key:?}")));
                    }
                    strings.insert(key, value);
                }
                Ok(Strings(strings))
            }
        }
        deserializer.deserialize_map(Map)
    }
}
