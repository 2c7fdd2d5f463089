//! The index of a sharded checkpoint: `*.safetensors.index.json`.
//!
//! An index says which shard holds which tensor. It decides: a tensor it does not map is not part of the checkpoint,
//! whatever the shards hold. It comes with the model, from someone else, so it may name files only beside or below
//! itself, and a tensor it maps twice is refused, because readers differ on which of the two entries counts.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::json::{Text, UniqueStrings};
use crate::error::{Code, Error, ErrorKind, Result};

/// A parsed shard index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardIndex {
    /// The shards' file names, relative to the index: sorted, each once.
    pub shards: Vec<String>,
    /// Which of `shards` each tensor is in.
    pub weight_map: BTreeMap<String, u32>,
}

impl ShardIndex {
    /// Parses the text of an index.
    ///
    /// # Errors
    /// `Format` where it is not an index, maps a tensor twice, or names a file outside of its own directory.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let malformed = |cause: &dyn fmt::Display| {
            Error::new(ErrorKind::Format, format!("the shard index is malformed: {cause}"))
                .code(Code::BadIndex)
                .remedy("Download the index file again")
        };
        if json.starts_with(b"version https://git-lfs") {
            return Err(Error::new(ErrorKind::Format, "the shard index is a Git LFS pointer")
                .remedy("Run `git lfs pull` in the repository"));
        }
        let mut deserializer = serde_json::Deserializer::from_slice(json);
        let files = deserializer
            .deserialize_map(IndexVisitor)
            .and_then(|files| deserializer.end().map(|()| files))
            .map_err(|error| malformed(&error))?;
        for (tensor, file) in &files {
            check_file_name(file).map_err(|error| error.tensor(tensor))?;
        }
        let mut shards: Vec<_> = files.values().cloned().collect();
        shards.sort_unstable();
        shards.dedup();
        if u32::try_from(shards.len()).is_err() {
            return Err(malformed(&format_args!("it names {} shards", shards.len())));
        }
        let number: BTreeMap<_, _> = shards.iter().zip(0u32..).collect();
        let weight_map =
            files.iter().filter_map(|(tensor, file)| Some((tensor.clone(), *number.get(file)?))).collect();
        Ok(Self { shards, weight_map })
    }
}

/// Refuses a shard's name that could lead out of the index's directory.
fn check_file_name(file: &str) -> Result<()> {
    let refuse = |why: &str| {
        Err(Error::new(ErrorKind::Format, format!("the shard index names the file {file:?}, which {why}"))
            .remedy("An index may only name files beside it: do not load it unless you trust its origin"))
    };
    if file.is_empty() {
        refuse("is empty")
    } else if file.contains('\0') {
        refuse("holds a NUL character")
    } else if file.starts_with(['/', '\\']) || file.contains(':') {
        refuse("is not relative to the index")
    } else if file.split(['/', '\\']).any(|part| part == "..") {
        refuse("leads out of the index's directory")
    } else if file.ends_with('/') {
        refuse("is a directory")
    } else {
        Ok(())
    }
}

struct IndexVisitor;

impl<'de> Visitor<'de> for IndexVisitor {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a `weight_map`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut files = None;
        while let Some(key) = map.next_key_seed(Text)? {
            if key != "weight_map" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            // From tensor to file.
            let weight_map = map.next_value_seed(UniqueStrings {
                expected: "`weight_map` to be an object from tensor to file name",
                repeated: "`weight_map` names the tensor",
            })?;
            if files.replace(weight_map).is_some() {
                return Err(A::Error::custom("`weight_map` appears twice"));
            }
        }
        let files = files.ok_or_else(|| A::Error::missing_field("weight_map"))?;
        if files.is_empty() {
            return Err(A::Error::custom("its `weight_map` names no tensor"));
        }
        Ok(files)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(json: &str) -> String {
        let error = ShardIndex::parse(json.as_bytes()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Format);
        error.to_string()
    }

    fn naming(file: &str) -> String {
        format!(r#"{{"weight_map":{{"t":{}}}}}"#, serde_json::to_string(file).unwrap())
    }

    #[test]
    fn shards_are_sorted_and_unique() {
        let index = ShardIndex::parse(
            br#"{"metadata":{"total_size":9},"weight_map":{"a":"m-2.safetensors","b":"m-1.safetensors","c":"m-2.safetensors"}}"#,
        )
        .unwrap();
        assert_eq!(index.shards, ["m-1.safetensors", "m-2.safetensors"]);
        assert_eq!(index.weight_map, [("a".into(), 1), ("b".into(), 0), ("c".into(), 1)].into());
    }

    #[test]
    fn a_tensor_mapped_twice_is_refused() {
        let text = refusal(r#"{"weight_map":{"a":"1.safetensors","a":"2.safetensors"}}"#);
        assert!(text.contains("names the tensor \"a\" twice"), "{text}");
    }

    #[test]
    fn a_second_weight_map_is_refused() {
        assert!(refusal(r#"{"weight_map":{"a":"1"},"weight_map":{"b":"2"}}"#).contains("appears twice"));
    }

    #[test]
    fn an_index_without_tensors_is_refused() {
        assert!(refusal("{}").contains("missing field `weight_map`"));
        assert!(refusal(r#"{"weight_map":{}}"#).contains("names no tensor"));
    }

    #[test]
    fn what_is_not_an_index_is_refused() {
        for json in [
            "",
            "[]",
            "{",
            r#"{"weight_map":[]}"#,
            r#"{"weight_map":{"a":1}}"#,
            r#"{"weight_map":{"a":"1"}} x"#,
        ] {
            assert!(refusal(json).contains("malformed"), "{json}");
        }
        assert!(refusal("version https://git-lfs.github.com/spec/v1").contains("git lfs pull"));
    }

    #[test]
    fn files_outside_of_the_directory_are_refused() {
        for file in [
            "../x.safetensors",
            "a/../../x.safetensors",
            "/etc/x.safetensors",
            "..\\x.safetensors",
            "\\\\host\\x.safetensors",
            "C:\\x.safetensors",
            "s3://bucket/x.safetensors",
            "..",
            "",
            "a/",
            "a\0b",
        ] {
            let text = refusal(&naming(file));
            assert!(text.contains(&format!("{file:?}")) && text.contains("tensor \"t\""), "{text}");
        }
    }

    #[test]
    fn files_in_sub_directories_and_odd_names_are_accepted() {
        for file in ["sub/dir/x.safetensors", "./x.safetensors", "..x.safetensors", "x..y", "ü *.safetensors"]
        {
            assert_eq!(ShardIndex::parse(naming(file).as_bytes()).unwrap().shards, [file]);
        }
    }
}
