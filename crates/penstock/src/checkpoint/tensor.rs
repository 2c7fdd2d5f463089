//! One tensor of a checkpoint: what it is and where its bytes are.
//!
//! A [`TensorInfo`] is a fact from a header that was checked: its range lies in its object and is exactly as long as
//! its shape and type require, so whoever holds one need not check again.

use std::ops::Range;
use std::sync::Arc;

use super::Dtype;

/// A tensor's description and the place of its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, unique in the checkpoint.
    pub name: Arc<str>,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its extent in each dimension, slowest first; empty for a scalar.
    pub shape: Vec<u64>,
    /// Which of the checkpoint's objects holds it: an index into [`Checkpoint::objects`](super::Checkpoint::objects).
    pub object: u32,
    /// Its bytes, as absolute positions in that object.
    pub range: Range<u64>,
}

impl TensorInfo {
    /// Bytes of its data.
    pub fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Number of its elements: 1 for a scalar.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(shape: &[u64], range: Range<u64>) -> TensorInfo {
        TensorInfo { name: "t".into(), dtype: Dtype::F32, shape: shape.into(), object: 0, range }
    }

    #[test]
    fn a_scalar_has_one_element() {
        assert_eq!((tensor(&[], 8..12).elements(), tensor(&[], 8..12).bytes()), (1, 4));
    }

    #[test]
    fn an_empty_tensor_has_no_bytes() {
        assert_eq!((tensor(&[3, 0], 8..8).elements(), tensor(&[3, 0], 8..8).bytes()), (0, 0));
    }
}
