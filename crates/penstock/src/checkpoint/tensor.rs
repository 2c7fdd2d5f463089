//! One tensor's entry in the catalogue.

use std::ops::Range;
use std::sync::Arc;

use super::Dtype;

/// What a header says of one tensor, and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: Arc<str>,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Elements along each dimension; empty for a scalar.
    pub shape: Vec<u64>,
    /// The object that holds it, as an index into the checkpoint's objects.
    pub object: u32,
    /// Its bytes, from the beginning of the object.
    pub range: Range<u64>,
}

impl TensorInfo {
    /// Bytes of its data.
    pub fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }
}
