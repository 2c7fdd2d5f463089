//! Any bytes as a safetensors file: the header parser must not panic, must accept exactly what the `safetensors` crate
//! accepts (apart from names and keys given twice), and must describe the same tensors.
//!
//! `cargo +nightly fuzz run header fuzz/corpus/header fuzz/seeds/header -- -max_total_time=60`
#![no_main]

use libfuzzer_sys::fuzz_target;
use penstock::checkpoint::header::parse_object_prefix;
use safetensors::SafeTensors;

fuzz_target!(|input: &[u8]| {
    compare(input);
    // Once more with the right length in front, which mutations seldom hit: all up to the last brace is header.
    if let Some(last) = input.iter().rposition(|byte| *byte == b'}') {
        let mut file = (last as u64 + 1).to_le_bytes().to_vec();
        file.extend_from_slice(input);
        compare(&file);
    }
});

fn compare(file: &[u8]) {
    let ours = parse_object_prefix(file, file.len() as u64);
    if could_overflow(file) {
        return;
    }
    let theirs = SafeTensors::read_metadata(file);
    match (ours, theirs) {
        (Ok(ours), Ok((length, theirs))) => {
            assert_eq!(ours.data_start, 8 + length as u64);
            assert_eq!(ours.tensors.len(), theirs.tensors().len());
            for tensor in &ours.tensors {
                let other = theirs.info(&tensor.name).expect("the same names");
                assert_eq!(tensor.dtype.name(), other.dtype.to_string());
                assert!(tensor.shape.iter().copied().eq(other.shape.iter().map(|extent| *extent as u64)));
                assert_eq!(tensor.range, other.data_offsets.0 as u64..other.data_offsets.1 as u64);
            }
            let metadata = theirs.metadata().clone().unwrap_or_default();
            assert_eq!(ours.metadata, metadata.into_iter().collect());
        }
        (Err(ours), Ok(_)) => assert!(ours.cause().contains(" twice"), "refused, but valid: {ours}"),
        (Ok(_), Err(theirs)) => panic!("accepted, but invalid: {theirs}"),
        (Err(_), Err(_)) => {}
    }
}

/// Whether `safetensors` might overflow, and panic in this build, when it adds the header's length to the last offset:
/// only an offset of twenty digits is large enough.
fn could_overflow(file: &[u8]) -> bool {
    file.split(|byte| !byte.is_ascii_digit()).any(|digits| digits.len() >= 20)
}
