//! Any bytes as a manifest: parsing must not panic, must take memory for what is there only, and must accept nothing
//! but what is written again in the same bytes.
//!
//! `cargo +nightly fuzz run manifest fuzz/corpus/manifest fuzz/seeds/manifest -- -max_total_time=60`
#![no_main]

use libfuzzer_sys::fuzz_target;
use penstock::manifest::Manifest;

fuzz_target!(|input: &[u8]| {
    check(input);
    // Once more with the right hash at the end, which no mutation hits.
    let mut summed = input.to_vec();
    summed.extend_from_slice(blake3::hash(input).as_bytes());
    check(&summed);
});

fn check(bytes: &[u8]) {
    let Ok(manifest) = Manifest::parse(bytes) else { return };
    assert_eq!(manifest.to_bytes(), bytes);
    for file in manifest.files() {
        assert!(file.value(file.blocks() - 1).is_some());
        assert!(file.value(file.blocks()).is_none());
        assert_eq!(manifest.file(file.name()), Some(file));
    }
}
