//! A tensor, or a box cut out of it, as pieces of consecutive bytes of its object.

use std::ops::Range;

use crate::checkpoint::TensorInfo;
use crate::error::{Error, ErrorKind, Result};

/// What of a tensor is wanted: all of it, or `start..end` along each of its first dimensions.
///
/// The selected box is delivered packed, in row-major order. A box that takes whole rows is one piece; one that cuts
/// an inner dimension is one piece for every row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    shape: Vec<u64>,
    /// Bytes of one piece, and where the first begins, from the tensor's own first byte.
    piece: u64,
    first: u64,
    /// Dimensions to walk, outermost first: how many steps, and bytes between them.
    walk: Vec<(u64, u64)>,
}

impl Selection {
    /// The whole tensor.
    pub fn all(tensor: &TensorInfo) -> Self {
        Self { shape: tensor.shape.clone(), piece: tensor.bytes(), first: 0, walk: Vec::new() }
    }

    /// The part of `tensor` that `ranges` select; dimensions beyond the last range are taken whole.
    ///
    /// # Errors
    /// `Selection` where there are more ranges than dimensions, a range is reversed or leaves the tensor, or elements
    /// smaller than a byte would have to be taken apart.
    pub fn of(tensor: &TensorInfo, ranges: &[Range<u64>]) -> Result<Self> {
        let wrong = |cause: String| {
            Err(Error::new(ErrorKind::Selection, cause)
                .tensor(&*tensor.name)
                .remedy(format!("The tensor's shape is {:?}", tensor.shape)))
        };
        if ranges.len() > tensor.shape.len() {
            return wrong(format!("{} slices for {} dimensions", ranges.len(), tensor.shape.len()));
        }
        for (dimension, (range, size)) in ranges.iter().zip(&tensor.shape).enumerate() {
            if range.start > range.end || range.end > *size {
                return wrong(format!(
                    "slice {}..{} does not fit dimension {dimension} of size {size}",
                    range.start, range.end
                ));
            }
        }
        let mut wanted: Vec<_> = tensor.shape.iter().map(|size| 0..*size).collect();
        wanted[..ranges.len()].clone_from_slice(ranges);
        let shape: Vec<u64> = wanted.iter().map(|range| range.end - range.start).collect();
        if shape.contains(&0) {
            return Ok(Self { shape, piece: 0, first: 0, walk: Vec::new() });
        }

        // Strides in bits, so that packed dtypes are measured too. The products fit: they are parts of the tensor's
        // own size, which the header check proved to fit. (No dimension is zero here.)
        let mut strides = vec![tensor.dtype.bits(); wanted.len()];
        for dimension in (0..wanted.len().saturating_sub(1)).rev() {
            strides[dimension] = strides[dimension + 1] * tensor.shape[dimension + 1];
        }
        // The innermost dimension that is cut decides the piece: from there on, bytes are consecutive.
        let cut = (0..wanted.len()).rev().find(|d| shape[*d] != tensor.shape[*d]);
        let Some(cut) = cut else { return Ok(Self::all(tensor)) };
        let first: u64 = wanted.iter().zip(&strides).map(|(range, stride)| range.start * stride).sum();
        let piece = shape[cut] * strides[cut];
        let walk: Vec<_> = (0..cut).filter(|d| shape[*d] > 1).map(|d| (shape[d], strides[d])).collect();
        let in_bytes = |bits: u64| bits.is_multiple_of(8);
        if !(in_bytes(first) && in_bytes(piece) && walk.iter().all(|(_, stride)| in_bytes(*stride))) {
            return wrong(format!(
                "the slice cuts through bytes that hold several {} elements",
                tensor.dtype.name()
            ));
        }
        let walk = walk.into_iter().map(|(steps, stride)| (steps, stride / 8)).collect();
        Ok(Self { shape, piece: piece / 8, first: first / 8, walk })
    }

    /// The shape of what is delivered.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Bytes of what is delivered.
    pub fn bytes(&self) -> u64 {
        self.piece * self.walk.iter().map(|(steps, _)| steps).product::<u64>()
    }

    /// Whether the selected bytes are consecutive in the object.
    pub fn is_contiguous(&self) -> bool {
        self.walk.is_empty()
    }

    /// Where the first selected byte lies, from the tensor's own first byte.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// The end of the last selected byte, from the tensor's own first byte.
    pub fn end(&self) -> u64 {
        self.first + self.walk.iter().map(|(steps, stride)| (steps - 1) * stride).sum::<u64>() + self.piece
    }

    /// Calls `piece(offset from the tensor's first byte, length)` for every piece, in order of offset; the pieces
    /// follow each other in what is delivered.
    pub fn for_each_piece(&self, mut piece: impl FnMut(u64, u64)) {
        if self.piece == 0 {
            return;
        }
        let mut steps = vec![0u64; self.walk.len()];
        let mut at = self.first;
        loop {
            piece(at, self.piece);
            // An odometer over the walked dimensions, innermost fastest.
            let mut dimension = self.walk.len();
            loop {
                if dimension == 0 {
                    return;
                }
                dimension -= 1;
                let (count, stride) = self.walk[dimension];
                steps[dimension] += 1;
                at += stride;
                if steps[dimension] < count {
                    break;
                }
                at -= stride * count;
                steps[dimension] = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Dtype;

    fn tensor(dtype: Dtype, shape: &[u64]) -> TensorInfo {
        let bytes = shape.iter().product::<u64>() * dtype.bits() / 8;
        TensorInfo { name: "t".into(), dtype, shape: shape.to_vec(), object: 0, range: 100..100 + bytes }
    }

    fn pieces(selection: &Selection) -> Vec<(u64, u64)> {
        let mut pieces = Vec::new();
        selection.for_each_piece(|at, len| pieces.push((at, len)));
        pieces
    }

    #[test]
    fn whole_rows_are_one_piece() {
        let selection = Selection::of(&tensor(Dtype::F16, &[8, 3, 5]), &[2..6]).unwrap();
        assert_eq!((selection.shape(), pieces(&selection)), (&[4, 3, 5][..], vec![(60, 120)]));
    }

    #[test]
    fn a_cut_inner_dimension_is_a_piece_for_every_row() {
        let selection = Selection::of(&tensor(Dtype::F32, &[2, 3, 4]), &[0..2, 1..3, 1..3]).unwrap();
        assert_eq!(pieces(&selection), [(20, 8), (36, 8), (68, 8), (84, 8)]);
        assert_eq!((selection.bytes(), selection.is_contiguous()), (32, false));
    }

    #[test]
    fn one_row_of_an_outer_dimension_is_not_walked() {
        let selection = Selection::of(&tensor(Dtype::U8, &[4, 4, 4]), &[1..2, 2..4]).unwrap();
        assert_eq!((pieces(&selection), selection.is_contiguous()), (vec![(24, 8)], true));
    }

    #[test]
    fn empty_and_full_selections_are_plain() {
        let t = tensor(Dtype::U8, &[4, 4]);
        assert_eq!(Selection::of(&t, &[2..2]).unwrap().bytes(), 0);
        assert_eq!(Selection::of(&t, &[0..4, 0..4]).unwrap(), Selection::all(&t));
        assert_eq!(Selection::of(&tensor(Dtype::U8, &[]), &[]).unwrap().bytes(), 1);
    }

    #[test]
    fn selections_that_do_not_fit_say_where() {
        let t = tensor(Dtype::U8, &[4, 4]);
        for ranges in [vec![0..5], vec![Range { start: 3, end: 2 }], vec![0..1, 0..1, 0..1]] {
            let error = Selection::of(&t, &ranges).unwrap_err();
            assert_eq!((error.kind(), error.tensor_name()), (ErrorKind::Selection, Some("t")));
            assert!(error.to_string().contains("[4, 4]"), "{error}");
        }
    }

    #[test]
    fn packed_dtypes_are_cut_at_bytes_or_not_at_all() {
        let t = tensor(Dtype::F4, &[4, 4]);
        assert_eq!(pieces(&Selection::of(&t, &[0..4, 2..4]).unwrap()), [(1, 1), (3, 1), (5, 1), (7, 1)]);
        assert!(Selection::of(&t, &[0..4, 1..4]).is_err());
    }
}
