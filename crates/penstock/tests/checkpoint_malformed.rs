//! Every way a safetensors file can be malformed that we know of, one test each: refused, with an error that names the
//! tensor, the bytes and the value at fault.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use penstock::checkpoint::header::{Header, MAX_HEADER_BYTES, parse_object_prefix};
use penstock::{Error, ErrorKind};

/// A file of `header` and `data` zero bytes.
fn file(header: &[u8], data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header);
    file.resize(file.len() + data, 0);
    file
}

fn open(file: &[u8]) -> penstock::Result<Header> {
    parse_object_prefix(file, file.len() as u64)
}

/// The refusal of `file`, which the safetensors crate must refuse as well.
fn refusal(file: &[u8]) -> Error {
    assert!(safetensors::SafeTensors::deserialize(file).is_err(), "safetensors accepts it");
    our_refusal(file)
}

fn our_refusal(file: &[u8]) -> Error {
    let error = open(file).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Format, "{error}");
    error
}

fn refused(header: &str, data: usize) -> Error {
    refusal(&file(header.as_bytes(), data))
}

#[track_caller]
fn says(error: &Error, part: &str) {
    assert!(error.to_string().contains(part), "{error}");
}

#[test]
fn empty_file() {
    let error = refusal(b"");
    says(&error, "the file is empty");
    says(&error, "Download it again");
}

#[test]
fn fewer_than_eight_bytes() {
    says(&refusal(&[1, 0, 0]), "3 bytes, too few");
}

#[test]
fn header_length_of_zero() {
    says(&refusal(&[0; 64]), "header length is 0");
}

#[test]
fn header_longer_than_the_limit() {
    let mut start = (MAX_HEADER_BYTES + 1).to_le_bytes().to_vec();
    start.push(b'{');
    let error = parse_object_prefix(&start, MAX_HEADER_BYTES * 2).unwrap_err();
    says(&error, "100000001");
    assert_eq!(error.byte_range(), Some(0..8));
}

#[test]
fn header_length_of_u64_max() {
    says(&refusal(&[255; 16]), "18446744073709551615");
}

#[test]
fn header_beyond_the_end_of_the_file() {
    let mut short = file(br#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1);
    short.truncate(20);
    let error = refusal(&short);
    says(&error, "the file has 20 bytes, but its header alone says 61");
    says(&error, "Download it again");
}

#[test]
fn header_that_is_not_utf8() {
    let error = refusal(&file(b"{\"\xff\":1}", 0));
    says(&error, "not UTF-8: invalid byte 0xff");
    assert_eq!(error.byte_range(), Some(10..11));
}

#[test]
fn header_that_is_not_json() {
    says(&refused("hello, world", 0), "malformed");
}

#[test]
fn header_that_is_cut_json() {
    says(&refused(r#"{"t":{"dtype":"U8","#, 0), "malformed");
}

#[test]
fn header_that_is_an_array() {
    says(&refused("[]", 0), "an object of tensors");
}

#[test]
fn header_with_text_behind_it() {
    says(&refused("{} x", 0), "trailing");
}

#[test]
fn header_padded_with_zeros() {
    says(&refused("{}\0\0\0", 0), "trailing");
}

#[test]
fn header_nested_beyond_reason() {
    says(&refused(&"{\"a\":".repeat(100_000), 0), "malformed");
}

#[test]
fn unknown_field_nested_beyond_reason() {
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    let error =
        refused(&format!(r#"{{"t":{{"x":{deep},"dtype":"U8","shape":[0],"data_offsets":[0,0]}}}}"#), 0);
    says(&error, "recursion");
}

#[test]
fn tensor_named_twice() {
    // The safetensors crate keeps the last of the two without a word.
    let header = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#;
    let error = our_refusal(&file(header.as_bytes(), 1));
    says(&error, "names this tensor twice");
    assert_eq!(error.tensor_name(), Some("a"));
}

#[test]
fn tensor_named_twice_in_two_spellings() {
    let header = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\u0061":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#;
    assert_eq!(our_refusal(&file(header.as_bytes(), 1)).tensor_name(), Some("a"));
}

#[test]
fn metadata_key_given_twice() {
    says(&our_refusal(&file(br#"{"__metadata__":{"k":"1","k":"2"}}"#, 0)), "the key \"k\" twice");
}

#[test]
fn metadata_given_twice() {
    says(&refused(r#"{"__metadata__":{},"__metadata__":{}}"#, 0), "`__metadata__` appears twice");
}

#[test]
fn metadata_value_that_is_not_a_string() {
    says(&refused(r#"{"__metadata__":{"k":1}}"#, 0), "expected a string");
}

#[test]
fn metadata_that_is_not_an_object() {
    says(&refused(r#"{"__metadata__":"pt"}"#, 0), "`__metadata__` to be an object of strings");
}

#[test]
fn field_given_twice() {
    let error = refused(r#"{"t":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1);
    says(&error, "the field `dtype` appears twice");
    assert_eq!(error.tensor_name(), Some("t"));
}

#[test]
fn missing_dtype_shape_or_offsets() {
    for (header, field) in [
        (r#"{"t":{"shape":[1],"data_offsets":[0,1]}}"#, "dtype"),
        (r#"{"t":{"dtype":"U8","data_offsets":[0,1]}}"#, "shape"),
        (r#"{"t":{"dtype":"U8","shape":[1]}}"#, "data_offsets"),
    ] {
        let error = refused(header, 1);
        says(&error, &format!("missing field `{field}`"));
        assert_eq!(error.tensor_name(), Some("t"));
    }
}

#[test]
fn unknown_dtype() {
    let error = refused(r#"{"t":{"dtype":"F8_E9M9","shape":[1],"data_offsets":[0,1]}}"#, 1);
    says(&error, "unknown dtype \"F8_E9M9\"");
    says(&error, "known are BOOL, F4");
    assert_eq!(error.tensor_name(), Some("t"));
}

#[test]
fn dtype_that_is_a_number() {
    says(&refused(r#"{"t":{"dtype":4,"shape":[1],"data_offsets":[0,1]}}"#, 1), "the name of a dtype");
}

#[test]
fn negative_fractional_and_huge_extents() {
    for extent in ["-1", "1.0", "1e0", "-0", "18446744073709551616", "\"1\"", "null"] {
        let header = format!(r#"{{"t":{{"dtype":"U8","shape":[{extent}],"data_offsets":[0,1]}}}}"#);
        assert_eq!(refused(&header, 1).tensor_name(), Some("t"), "{extent}");
    }
}

#[test]
fn too_few_and_too_many_offsets() {
    for offsets in ["[]", "[0]", "[0,1,1]", "1"] {
        let header = format!(r#"{{"t":{{"dtype":"U8","shape":[1],"data_offsets":{offsets}}}}}"#);
        assert_eq!(refused(&header, 1).tensor_name(), Some("t"), "{offsets}");
    }
}

#[test]
fn shape_that_does_not_fit_the_bytes() {
    let error = refused(r#"{"t":{"dtype":"F32","shape":[2,2],"data_offsets":[0,12]}}"#, 12);
    says(&error, "shape [2, 2] of F32 needs 16 bytes, but data_offsets [0, 12] give it 12");
    assert_eq!(error.byte_range(), Some(65..77));
}

#[test]
fn shape_product_that_overflows() {
    let header = r#"{"t":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#;
    says(&refused(header, 0), "more bits than 64-bit arithmetic can count");
}

#[test]
fn shape_product_that_overflows_before_a_zero() {
    let header = r#"{"t":{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}}"#;
    says(&refused(header, 0), "more bits");
}

#[test]
fn bit_count_that_overflows() {
    let header = r#"{"t":{"dtype":"F64","shape":[1152921504606846976],"data_offsets":[0,0]}}"#;
    says(&refused(header, 0), "more bits");
}

#[test]
fn sub_byte_tensor_that_ends_within_a_byte() {
    let error = refused(r#"{"t":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#, 2);
    says(&error, "shape [3] of F4 has 12 bits, not a whole number of bytes");
}

#[test]
fn begin_after_end() {
    let error = refused(r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}"#, 1);
    says(&error, "data_offsets [1, 0] end before they begin");
}

#[test]
fn hole_between_tensors() {
    let error = refused(
        r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}}"#,
        6,
    );
    says(&error, "2 bytes before this tensor belong to no tensor");
    assert_eq!((error.tensor_name(), error.byte_range()), (Some("b"), Some(115..117)));
}

#[test]
fn hole_before_the_first_tensor() {
    says(&refused(r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#, 3), "1 bytes before");
}

#[test]
fn overlapping_tensors() {
    let error = refused(
        r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#,
        6,
    );
    says(&error, "its bytes overlap those of tensor \"a\"");
    assert_eq!(error.tensor_name(), Some("b"));
}

#[test]
fn two_tensors_on_the_same_bytes() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}"#;
    says(&refused(header, 4), "overlap");
}

#[test]
fn empty_tensor_inside_another() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"I8","shape":[0],"data_offsets":[2,2]}}"#;
    says(&refused(header, 4), "overlap");
}

#[test]
fn data_shorter_than_the_header_says() {
    let error = refused(
        r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[6],"data_offsets":[2,8]}}"#,
        5,
    );
    says(&error, "the file has 118 bytes, but its header says 121: it is incomplete");
    says(&error, "Download it again");
    assert_eq!((error.tensor_name(), error.byte_range()), (Some("b"), Some(115..121)));
}

#[test]
fn data_longer_than_the_header_says() {
    let error = refused(r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#, 5);
    says(&error, "the file has 66 bytes, but its header accounts for 63 only");
    assert_eq!(error.byte_range(), Some(63..66));
}

#[test]
fn data_without_tensors() {
    says(&refused("{}", 3), "accounts for 10 only");
}

#[test]
fn sizes_that_sum_beyond_64_bits() {
    // safetensors itself overflows here, so it is not asked.
    let each = u64::MAX / 8;
    let tensors: Vec<_> = (0..8)
        .map(|i| {
            format!(
                r#""{i}":{{"dtype":"U8","shape":[{each}],"data_offsets":[{},{}]}}"#,
                i * each,
                (i + 1) * each
            )
        })
        .collect();
    says(&our_refusal(&file(format!("{{{}}}", tensors.join(",")).as_bytes(), 1)), "incomplete");
}

#[test]
fn git_lfs_pointer() {
    let error = refusal(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n");
    says(&error, "looks like a Git LFS pointer");
    says(&error, "git lfs pull");
}

#[test]
fn other_formats_are_named() {
    for (start, name) in [
        (&b"PK\x03\x04\x14\x00\x08\x08"[..], "zip archive"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8", "pickle"),
        (b"GGUF\x03\0\0\0\x23\x01\0\0", "GGUF"),
        (b"\n<!DOCTYPE html><html>", "HTML"),
        (b"<Error><Code>AccessDenied</Code></Error>", "XML error"),
        (b"{\"metadata\": {\"total_size\": 1}}", ".safetensors.index.json"),
    ] {
        says(&refusal(start), name);
    }
}
