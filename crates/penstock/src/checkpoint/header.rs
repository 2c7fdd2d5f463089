//! The header of one safetensors object: eight bytes of length, JSON, then data.
//!
//! Reading it costs one request in nearly every case: the first read is generous, and only a header longer than that is
//! fetched with a second. Parsing is pure and takes nothing on trust: a header is either exactly what the `safetensors`
//! crate 0.8 would accept or a `Format` error that names the tensor, the bytes and the value at fault. Two things are
//! stricter here, since readers disagree on them: a tensor named twice and a metadata key given twice are refused.
//!
//! The text is read in `json`, its numbers are checked in `layout`; what another kind of file looks like, `sniff` knows.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::{Dtype, json, layout, sniff};
use crate::error::{Code, Error, ErrorKind, Result};
use crate::memory::{Region, Window};
use crate::store::{Object, ReadContext};

/// The longest header that is read, as in safetensors.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes of the first read: more than the header of nearly every shard, and one request on any store.
const FIRST_READ: u64 = 256 << 10;
/// Bytes of memory that a byte of a header or an index takes at most while it is read, itself included: 5 were seen, for
/// the shortest entries there can be.
const CATALOGUE_PER_BYTE: usize = 8;
/// Bytes of the number in front of the header.
const LENGTH_BYTES: u64 = 8;

/// A tensor as its header describes it: checked, with a range relative to the start of the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedTensor {
    /// Its name, unique in the header.
    pub name: Arc<str>,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its extent in each dimension; empty for a scalar.
    pub shape: Vec<u64>,
    /// Its bytes, counted from [`Header::data_start`].
    pub range: Range<u64>,
}

/// The checked header of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The strings the writer attached.
    pub metadata: BTreeMap<String, String>,
    /// The tensors in order of their offsets; tensors at the same place (all but one of them empty) by name.
    pub tensors: Vec<ParsedTensor>,
    /// Where the data begins in the object.
    pub data_start: u64,
}

/// Reads the header of `object`.
///
/// # Errors
/// `Format` where it is not a safetensors object, naming the object; what the store reports where reading fails.
pub fn read(object: &dyn Object, cx: &mut ReadContext) -> Result<Header> {
    read_unnamed(object, cx).map_err(|error| error.object(object.location()))
}

fn read_unnamed(object: &dyn Object, cx: &mut ReadContext) -> Result<Header> {
    let bytes = object.bytes();
    let mut buffer = vec![0; to_usize(bytes.min(FIRST_READ))?];
    if !buffer.is_empty() {
        object.read_into(0, Window::from_slice(&mut buffer), cx)?;
    }
    let end = to_usize(json_range(&buffer, bytes)?.end)?;
    let held = buffer.len();
    if end > held {
        lengthen(&mut buffer, end)?;
        object.read_into(held as u64, Window::from_slice(&mut buffer[held..]), cx)?;
    }
    parse_object_prefix(&buffer, bytes)
}

/// Parses the header of an object of `object_bytes` bytes that begins with `prefix`.
///
/// # Errors
/// `Format` where the object is not a safetensors object, or `prefix` ends before its header does.
pub fn parse_object_prefix(prefix: &[u8], object_bytes: u64) -> Result<Header> {
    let range = json_range(prefix, object_bytes)?;
    let json = prefix.get(to_usize(range.start)?..to_usize(range.end)?).ok_or_else(|| {
        Error::new(ErrorKind::Format, format!("only {} bytes of the header were given", prefix.len()))
            .range(range)
    })?;
    parse(json, object_bytes)
}

/// Parses the JSON of a header that follows eight bytes of length in an object of `object_bytes` bytes.
///
/// # Errors
/// `Format`, as the module says.
pub fn parse(json: &[u8], object_bytes: u64) -> Result<Header> {
    let data_start = LENGTH_BYTES + json.len() as u64;
    let Some(data_bytes) = object_bytes.checked_sub(data_start) else {
        return Err(beyond_the_end(json.len() as u64, object_bytes));
    };
    let text = std::str::from_utf8(json).map_err(|error| {
        let at = error.valid_up_to();
        let found = json.get(at).copied().unwrap_or_default();
        let position = LENGTH_BYTES + at as u64;
        Error::new(ErrorKind::Format, format!("the header is not UTF-8: invalid byte 0x{found:02x}"))
            .code(Code::HeaderNotUtf8)
            .range(position..position + 1)
            .remedy("The file is damaged or not a safetensors file: download it again")
    })?;
    let raw = json::read(text).map_err(|error| error.range(LENGTH_BYTES..data_start))?;
    let tensors = layout::check(raw.tensors, data_start, data_bytes)?;
    Ok(Header { metadata: raw.metadata, tensors, data_start })
}

/// Where the header's JSON lies in an object of `object_bytes` bytes that begins with `prefix`.
fn json_range(prefix: &[u8], object_bytes: u64) -> Result<Range<u64>> {
    let Some(length) = prefix.first_chunk().filter(|_| object_bytes >= LENGTH_BYTES) else {
        return Err(too_short(prefix, object_bytes));
    };
    let length = u64::from_le_bytes(*length);
    let cause = if length == 0 {
        Error::new(ErrorKind::Format, "the header length is 0: the file begins with zeros")
            .remedy("The file was created but never written, or the download stopped: download it again")
    } else if length > MAX_HEADER_BYTES {
        Error::new(ErrorKind::Format, format!("the header length {length} exceeds {MAX_HEADER_BYTES}"))
            .code(Code::HeaderTooLarge)
            .remedy("The file is damaged or not a safetensors file")
    } else if length > object_bytes - LENGTH_BYTES {
        beyond_the_end(length, object_bytes)
    } else {
        return Ok(LENGTH_BYTES..LENGTH_BYTES + length);
    };
    Err(sniff::explain(prefix).unwrap_or(cause).range(0..LENGTH_BYTES))
}

fn too_short(prefix: &[u8], object_bytes: u64) -> Error {
    let error = if object_bytes == 0 {
        Error::new(ErrorKind::Format, "the file is empty").code(Code::Truncated)
    } else if object_bytes >= LENGTH_BYTES {
        return Error::new(
            ErrorKind::Format,
            format!("only {} bytes of the header were given", prefix.len()),
        );
    } else {
        let cause = format!("the file has {object_bytes} bytes, too few for a safetensors header");
        sniff::explain(prefix).unwrap_or_else(|| Error::new(ErrorKind::Format, cause).code(Code::Truncated))
    };
    error.remedy("Download it again, and check the free disk space").range(0..object_bytes)
}

fn beyond_the_end(length: u64, object_bytes: u64) -> Error {
    let needed = length.saturating_add(LENGTH_BYTES);
    let cause =
        format!("the file has {object_bytes} bytes, but its header alone says {needed}: it is incomplete");
    Error::new(ErrorKind::Format, cause)
        .code(Code::Truncated)
        .range(0..object_bytes)
        .remedy("Download it again, and check the free disk space")
}

/// Makes `buffer` `len` bytes long at least, for a header or an index, or fails where there is no memory for it and for
/// what is made of it. A file says how much that is, and most of it are small allocations, which abort the process where
/// they fail; so room for all of them is asked for beforehand, in one piece that is given back untouched.
pub(super) fn lengthen(buffer: &mut Vec<u8>, len: usize) -> Result<()> {
    drop(Region::reserve(len.saturating_mul(CATALOGUE_PER_BYTE))?);
    let more = len.saturating_sub(buffer.len());
    buffer.try_reserve_exact(more).map_err(|error| {
        Error::new(ErrorKind::Memory, format!("reading {len} bytes failed: {error}"))
            .remedy("Check the memory limit of the process (ulimit -v, cgroup)")
    })?;
    buffer.resize(buffer.len() + more, 0);
    Ok(())
}

fn to_usize(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| {
        Error::new(ErrorKind::Format, format!("a header of {bytes} bytes does not fit this machine's memory"))
    })
}
