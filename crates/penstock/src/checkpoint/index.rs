//! The shard index of a checkpoint in several files: which tensor is in which.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use serde::Deserialize;

use super::header::Strings;
use crate::error::{Error, ErrorKind, Result};

/// A `*.safetensors.index.json`, checked: file names stay in the index's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Json {
    weight_map: Strings,
}

impl ShardIndex {
    /// Parses an index.
    ///
    /// # Errors
    /// `Format` where it is not UTF-8 or JSON, has no `weight_map` of strings, names a tensor twice, or names a file
    /// outside of its own directory.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let malformed = |cause: String| Error::new(ErrorKind::Format, cause);
        let text = std::str::from_utf8(json).map_err(|_| malformed("the shard index is not UTF-8".into()))?;
        let parsed: Json = serde_json::from_str(text)
            .map_err(|error| malformed(format!("not a valid shard index: {error}")))?;
        let weight_map = parsed.weight_map.0;
        for (tensor, file) in &weight_map {
            let inside = Path::new(file).components().all(|part| matches!(part, Component::Normal(_)));
            if file.is_empty() || file.contains('\0') || !inside {
                return Err(malformed(format!(
                    "the index places the tensor in {file:?}, outside of its own directory"
                ))
                .tensor(tensor)
                .remedy("Do not load checkpoints from a source that is not trusted"));
            }
        }
        Ok(Self { weight_map })
    }

    /// The files, sorted.
    pub fn files(&self) -> Vec<&str> {
        self.weight_map.values().map(String::as_str).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// The file that holds `tensor`.
    pub fn file_of(&self, tensor: &str) -> Option<&str> {
        self.weight_map.get(tensor).map(String::as_str)
    }

    /// (tensor, file) for every tensor, sorted by tensor.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &str)> {
        self.weight_map.iter().map(|(tensor, file)| (tensor.as_str(), file.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<ShardIndex> {
        ShardIndex::parse(json.as_bytes())
    }

    #[test]
    fn files_are_listed_once_and_sorted() {
        let index = parse(r#"{"metadata": {"total_size": 3}, "weight_map": {"a": "2", "b": "1", "c": "2"}}"#)
            .unwrap();
        assert_eq!(index.files(), ["1", "2"]);
        assert_eq!(index.file_of("c"), Some("2"));
    }

    #[test]
    fn a_file_in_a_subdirectory_is_fine_and_one_outside_is_not() {
        assert!(parse(r#"{"weight_map": {"a": "shards/1.safetensors"}}"#).is_ok());
        for file in ["../x", "/etc/passwd", "a/../../x", "", ".", "a\\u0000b"] {
            let error = parse(&format!(r#"{{"weight_map": {{"a": "{file}"}}}}"#)).unwrap_err();
            assert_eq!((error.kind(), error.tensor_name()), (ErrorKind::Format, Some("a")), "{file}");
        }
    }

    #[test]
    fn malformed_indices_are_format_errors() {
        let cases = [
            "",
            "[]",
            "{}",
            r#"{"weight_map": 1}"#,
            r#"{"weight_map": {"a": 1}}"#,
            r#"{"weight_map": {"a": "1", "a": "2"}}"#,
        ];
        for json in cases {
            assert_eq!(parse(json).unwrap_err().kind(), ErrorKind::Format, "{json}");
        }
        assert_eq!(ShardIndex::parse(b"\xff").unwrap_err().kind(), ErrorKind::Format);
    }
}
