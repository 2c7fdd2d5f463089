//! Oddities that are valid, one test each: accepted by safetensors, so accepted here, and read the same.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use penstock::checkpoint::Dtype;
use penstock::checkpoint::header::{Header, parse_object_prefix};

/// The header of a file of `header` and `data` zero bytes, which safetensors must accept.
fn accepted(header: &str, data: usize) -> Header {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + data, 0);
    safetensors::SafeTensors::deserialize(&file).expect("safetensors accepts it");
    parse_object_prefix(&file, file.len() as u64).unwrap()
}

fn names(header: &Header) -> Vec<&str> {
    header.tensors.iter().map(|tensor| &*tensor.name).collect()
}

#[test]
fn no_tensors() {
    assert!(accepted("{}", 0).tensors.is_empty());
}

#[test]
fn scalar() {
    let header = accepted(r#"{"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#, 4);
    assert_eq!((header.tensors[0].shape.len(), header.tensors[0].range.clone()), (0, 0..4));
}

#[test]
fn empty_tensors_at_any_boundary() {
    let header = accepted(
        r#"{"z":{"dtype":"F32","shape":[0],"data_offsets":[4,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
           "m":{"dtype":"F32","shape":[3,0],"data_offsets":[0,0]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},
           "e":{"dtype":"F32","shape":[0],"data_offsets":[8,8]},"c":{"dtype":"I8","shape":[0],"data_offsets":[4,4]}}"#,
        8,
    );
    assert_eq!(names(&header), ["m", "a", "c", "z", "b", "e"]);
}

#[test]
fn overflow_behind_a_zero() {
    accepted(r#"{"t":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}}"#, 0);
}

#[test]
fn tensors_listed_out_of_order() {
    let header = accepted(
        r#"{"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
        2,
    );
    assert_eq!(names(&header), ["a", "b"]);
}

#[test]
fn header_padded_with_spaces() {
    let header = accepted("{}      ", 0);
    assert_eq!(header.data_start, 16);
}

#[test]
fn header_that_begins_with_space() {
    // The format asks for `{` first; the crate does not insist.
    accepted(" \n\t{}", 0);
}

#[test]
fn misaligned_data() {
    let header = accepted(
        r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F64","shape":[1],"data_offsets":[1,9]}}"#,
        9,
    );
    assert_eq!(header.tensors[1].range, 1..9);
}

#[test]
fn odd_names() {
    let header = accepted(
        r#"{"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"../a/b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},
           "重み🦀":{"dtype":"U8","shape":[1],"data_offsets":[2,3]},"n\u0000\"\\\n":{"dtype":"U8","shape":[1],"data_offsets":[3,4]},
           "dtype":{"dtype":"U8","shape":[1],"data_offsets":[4,5]},"__metadata":{"dtype":"U8","shape":[1],"data_offsets":[5,6]}}"#,
        6,
    );
    assert_eq!(names(&header), ["", "../a/b", "重み🦀", "n\0\"\\\n", "dtype", "__metadata"]);
}

#[test]
fn metadata() {
    let header = accepted(r#"{"__metadata__":{"format":"pt","":"ü"}}"#, 0);
    assert_eq!(header.metadata.get("format").map(String::as_str), Some("pt"));
    assert_eq!(header.metadata.len(), 2);
}

#[test]
fn null_metadata() {
    assert!(accepted(r#"{"__metadata__":null}"#, 0).metadata.is_empty());
}

#[test]
fn unknown_fields_of_a_tensor() {
    accepted(
        r#"{"t":{"x":[{"y":null,"y":-1.5e3}],"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":"z"}}"#,
        1,
    );
}

#[test]
fn tensor_written_as_an_array() {
    let header = accepted(r#"{"t":["BF16",[2],[0,4]]}"#, 4);
    assert_eq!((header.tensors[0].dtype, &header.tensors[0].shape[..]), (Dtype::Bf16, &[2][..]));
}

#[test]
fn dtype_written_as_an_object() {
    assert_eq!(
        accepted(r#"{"t":{"dtype":{"I8":null},"shape":[1],"data_offsets":[0,1]}}"#, 1).tensors[0].dtype,
        Dtype::I8
    );
}

#[test]
fn every_dtype() {
    for dtype in Dtype::ALL {
        let header =
            format!(r#"{{"t":{{"dtype":"{dtype}","shape":[8],"data_offsets":[0,{}]}}}}"#, dtype.bits());
        let bytes = usize::try_from(dtype.bits()).unwrap();
        assert_eq!(accepted(&header, bytes).tensors[0].dtype, dtype);
    }
}
