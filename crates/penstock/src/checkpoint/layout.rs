//! Whether the tensors of a header fit each other and their file.
//!
//! The format leaves no freedom: the tensors, in order of their offsets, cover the data part of the file from its first
//! byte to its last, with no hole and no overlap, each exactly as long as its shape and type require. Tensors without
//! elements may lie at any boundary. A header that says otherwise comes from a damaged file, a broken writer, or
//! someone who wants two readers to see different things, and is refused with the tensor and the bytes concerned.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use super::Dtype;
use super::header::ParsedTensor;
use super::json::{RawDtype, RawTensor};
use crate::error::{Code, Error, ErrorKind, Result};

/// Checks the tensors against each other and the `data_bytes` that follow the header, and sorts them by offset.
///
/// Errors give absolute ranges: `data_start` is where the data begins in the file.
pub(super) fn check(
    raw: Vec<(Cow<'_, str>, RawTensor)>,
    data_start: u64,
    data_bytes: u64,
) -> Result<Vec<ParsedTensor>> {
    let mut raw = raw;
    raw.sort_by(|(a_name, a), (b_name, b)| a.offsets.cmp(&b.offsets).then_with(|| a_name.cmp(b_name)));
    let mut tensors: Vec<ParsedTensor> = Vec::with_capacity(raw.len());
    let mut covered = 0;
    for (name, tensor) in raw {
        let parsed = check_one(name, tensor, data_start)?;
        let begin = parsed.range.start;
        if begin > covered {
            return Err(Error::new(
                ErrorKind::Format,
                format!("{} bytes before this tensor belong to no tensor", begin - covered),
            )
            .code(Code::Gap)
            .tensor(&*parsed.name)
            .range(absolute(data_start, covered..begin))
            .remedy("The file was written by a broken tool: save it again with safetensors"));
        }
        if begin < covered {
            // The previous tensor ends at `covered`, so there is one.
            let other = tensors.last().map_or("", |last| &*last.name);
            return Err(Error::new(
                ErrorKind::Format,
                format!("its bytes overlap those of tensor {other:?}"),
            )
            .code(Code::Overlap)
            .detail("other", other)
            .tensor(&*parsed.name)
            .range(absolute(data_start, parsed.range)));
        }
        covered = parsed.range.end;
        tensors.push(parsed);
    }
    match covered.cmp(&data_bytes) {
        std::cmp::Ordering::Equal => Ok(tensors),
        std::cmp::Ordering::Greater => Err(incomplete(&tensors, data_start, data_bytes)),
        std::cmp::Ordering::Less => {
            let end = data_start + data_bytes;
            let named = data_start + covered;
            Err(Error::new(
                ErrorKind::Format,
                format!("the file has {end} bytes, but its header accounts for {named} only"),
            )
            .code(Code::TrailingBytes)
            .range(named..end)
            .remedy("Something was appended to the file, or its header is not its own: download it again"))
        }
    }
}

/// The failure of a file that ends before its last tensor does; names the first tensor that is cut.
fn incomplete(tensors: &[ParsedTensor], data_start: u64, data_bytes: u64) -> Error {
    let covered = tensors.last().map_or(0, |last| last.range.end);
    let cause = format!(
        "the file has {} bytes, but its header says {}: it is incomplete",
        data_start.saturating_add(data_bytes),
        u128::from(data_start) + u128::from(covered),
    );
    let error = Error::new(ErrorKind::Format, cause)
        .code(Code::Truncated)
        .remedy("Download it again, and check the free disk space");
    match tensors.iter().find(|tensor| tensor.range.end > data_bytes) {
        Some(cut) => error.tensor(&*cut.name).range(absolute(data_start, cut.range.clone())),
        None => error,
    }
}

/// Checks that a tensor is as long as its shape and type require.
fn check_one(name: Cow<'_, str>, raw: RawTensor, data_start: u64) -> Result<ParsedTensor> {
    let (begin, end) = raw.offsets;
    let refuse = |cause: String| {
        Error::new(ErrorKind::Format, cause)
            .tensor(&*name)
            .range(absolute(data_start, begin.min(end)..end.max(begin)))
    };
    let dtype = match raw.dtype {
        RawDtype::Known(dtype) => dtype,
        RawDtype::Unknown(other) => {
            let known: Vec<_> = Dtype::ALL.iter().map(|dtype| dtype.name()).collect();
            return Err(refuse(format!("unknown dtype {other:?}"))
                .code(Code::UnknownDtype)
                .detail("dtype", other)
                .remedy(format!(
                    "Update penstock if the format has gained it; known are {}",
                    known.join(", ")
                )));
        }
    };
    let Some(length) = end.checked_sub(begin) else {
        return Err(refuse(format!("data_offsets [{begin}, {end}] end before they begin")));
    };
    let shape = &raw.shape;
    // Multiplied left to right, as safetensors does: an overflow before a zero is an overflow.
    let bits = shape
        .iter()
        .try_fold(1u64, |product, extent| product.checked_mul(*extent))
        .and_then(|elements| elements.checked_mul(dtype.bits()));
    let Some(bits) = bits else {
        return Err(refuse(format!(
            "shape {shape:?} of {dtype} has more bits than 64-bit arithmetic can count"
        )));
    };
    if bits % 8 != 0 {
        return Err(refuse(format!(
            "shape {shape:?} of {dtype} has {bits} bits, not a whole number of bytes"
        )));
    }
    if bits / 8 != length {
        return Err(refuse(format!(
            "shape {shape:?} of {dtype} needs {} bytes, but data_offsets [{begin}, {end}] give it {length}",
            bits / 8
        ))
        .code(Code::SizeMismatch)
        .detail("needed", bits / 8)
        .detail("given", length));
    }
    Ok(ParsedTensor { name: Arc::from(name), dtype, shape: raw.shape, range: begin..end })
}

fn absolute(data_start: u64, range: Range<u64>) -> Range<u64> {
    data_start.saturating_add(range.start)..data_start.saturating_add(range.end)
}
