use proptest::prelude::*;

use super::*;

const BLOCK: u64 = 1 << LEAST_LOG2;

/// Hashes of a file of these bytes.
fn hashes(name: &str, bytes: &[u8]) -> FileHashes {
    let blocks = blocks_of(bytes.len() as u64, BLOCK);
    let value = |number: u64| {
        let start = (number * BLOCK) as usize;
        let mut hasher = BlockHasher::new(number * BLOCK, blocks == 1);
        hasher.update(&bytes[start..bytes.len().min(start + BLOCK as usize)]);
        hasher.value()
    };
    FileHashes::new(name, bytes.len() as u64, BLOCK, (0..blocks).map(value).collect()).unwrap()
}

fn example() -> Manifest {
    let long: Vec<u8> = (0..BLOCK * 3 + 17).map(|i| (i * 13 % 241) as u8).collect();
    let files = [("model.safetensors", &long[..]), ("a/config.json", b"{}"), ("empty", b"")];
    Manifest::new(files.map(|(name, bytes)| hashes(name, bytes)).into()).unwrap()
}

/// The same bytes with a right hash at the end, as an attacker would have it.
fn summed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len() - HASH);
    let sum = blake3::hash(&bytes);
    bytes.extend_from_slice(sum.as_bytes());
    bytes
}

fn refusal(bytes: &[u8]) -> String {
    let error = Manifest::parse(bytes).unwrap_err();
    assert_eq!((error.kind(), error.error_code()), (ErrorKind::Integrity, Code::BadManifest));
    error.to_string()
}

#[test]
fn a_manifest_is_what_was_written() {
    let manifest = example();
    assert_eq!(Manifest::parse(&manifest.to_bytes()).unwrap(), manifest);
    let names: Vec<_> = manifest.files().iter().map(FileHashes::name).collect();
    assert_eq!(names, ["a/config.json", "empty", "model.safetensors"]);
    let file = manifest.file("model.safetensors").unwrap();
    assert_eq!((file.blocks(), file.bytes()), (4, BLOCK * 3 + 17));
    assert_eq!((file.value(3).is_some(), file.value(4)), (true, None));
    assert_eq!(manifest.file("empty").unwrap().root(), blake3::hash(b"").as_bytes());
    assert!(manifest.file("model").is_none());
    let none = Manifest::new(Vec::new()).unwrap();
    assert_eq!(Manifest::parse(&none.to_bytes()).unwrap(), none);
}

#[test]
fn one_flipped_bit_anywhere_is_refused() {
    let bytes = example().to_bytes();
    for at in 0..bytes.len() {
        for bit in [0, 3, 7] {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            refusal(&flipped);
        }
    }
}

#[test]
fn a_manifest_that_is_cut_off_or_goes_on_is_refused() {
    let bytes = example().to_bytes();
    for len in 0..bytes.len() {
        refusal(&bytes[..len]);
    }
    let longer: Vec<u8> = bytes.iter().copied().chain([0]).collect();
    refusal(&longer);
    // With a right hash at the end too.
    let mut inside = bytes.clone();
    inside.insert(bytes.len() - HASH, 0);
    assert!(refusal(&summed(inside)).contains("follow its last file"));
    for less in 1..bytes.len() - MAGIC.len() - HASH {
        let mut shorter = bytes[..bytes.len() - less].to_vec();
        shorter.truncate(shorter.len().max(HASH + MAGIC.len()));
        refusal(&summed(shorter));
    }
}

#[test]
fn values_that_do_not_fold_to_the_root_are_refused() {
    let manifest = example();
    let mut forged = manifest.clone();
    forged.files[2].values.swap(0, 1);
    assert!(refusal(&summed(forged.to_bytes())).contains("do not fold"));
    let mut forged = manifest.clone();
    forged.files[2].root[31] ^= 1;
    assert!(refusal(&summed(forged.to_bytes())).contains("do not fold"));
    let mut forged = manifest;
    forged.files[2].values.pop();
    assert!(Manifest::parse(&summed(forged.to_bytes())).is_err());
}

#[test]
fn sizes_that_are_not_there_take_no_memory() {
    for claimed in [BLOCK * 4 + 1, BLOCK * 1_000_000, u64::MAX, u64::MAX - BLOCK, 1 << 63] {
        let mut forged = example();
        forged.files[2].bytes = claimed;
        refusal(&summed(forged.to_bytes()));
    }
    for (at, number) in
        [(20, u32::MAX), (20, 15), (20, 25), (24, u32::MAX), (24, 4), (24, 2), (28, 1), (16, 2)]
    {
        let mut forged = example().to_bytes();
        forged[at..at + 4].copy_from_slice(&number.to_le_bytes());
        refusal(&summed(forged));
    }
}

#[test]
fn a_million_blocks_are_parsed_as_any_others() {
    let values: Vec<_> =
        (0..1_000_000u32).map(|number| *blake3::hash(&number.to_le_bytes()).as_bytes()).collect();
    let file = FileHashes::new("m", 1_000_000 * BLOCK - 5, BLOCK, values).unwrap();
    let manifest = Manifest::new(vec![file]).unwrap();
    assert_eq!(Manifest::parse(&manifest.to_bytes()).unwrap(), manifest);
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    for name in ["", "/", "/etc/passwd", "a//b", "a/", "./a", "a/.", "..", "../a", "a/../b", "a/..", "."] {
        assert_eq!(FileHashes::new(name, 0, BLOCK, vec![[0; HASH]]).unwrap_err().kind(), ErrorKind::Config);
        let mut forged = example();
        name.clone_into(&mut forged.files[0].name);
        assert!(refusal(&summed(forged.to_bytes())).contains("name"), "{name}");
    }
    let mut forged = example();
    forged.files[2].name = "n".repeat(MAX_NAME_BYTES + 1);
    assert!(refusal(&summed(forged.to_bytes())).contains("too long"));
    // Dots that are part of a name are not.
    assert!(name_fault("..a/b../...").is_none());
}

#[test]
fn names_given_twice_or_out_of_order_are_refused() {
    let mut twice = example();
    twice.files[1].name = "a/config.json".into();
    assert!(refusal(&summed(twice.to_bytes())).contains("given twice"));
    assert_eq!(Manifest::new(twice.files).unwrap_err().kind(), ErrorKind::Config);
    let mut swapped = example();
    swapped.files.swap(0, 1);
    assert!(refusal(&summed(swapped.to_bytes())).contains("out of order"));
}

#[test]
fn a_name_that_is_not_utf_8_is_refused() {
    let mut forged = example().to_bytes();
    let at = MAGIC.len() + 16 + 2;
    forged[at] = 0xff;
    assert!(refusal(&summed(forged)).contains("not UTF-8"));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_parses_is_what_would_be_written(
        at in 0usize..400, with in prop::collection::vec(any::<u8>(), 0..40), cut in 0usize..40,
    ) {
        let mut bytes = example().to_bytes();
        let end = bytes.len() - HASH;
        let at = at.min(end);
        bytes.splice(at..end.min(at + cut), with);
        let bytes = summed(bytes);
        if let Ok(parsed) = Manifest::parse(&bytes) {
            prop_assert_eq!(parsed.to_bytes(), bytes);
        }
    }

    #[test]
    fn a_block_is_verified_by_its_own_value_only(len in 0u64..BLOCK * 3, one in 0u64..3, other in 0u64..3) {
        let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        let file = hashes("f", &bytes);
        let (one, other) = (one % file.blocks(), other % file.blocks());
        let mut hasher = file.hasher(one);
        let start = (one * BLOCK) as usize;
        hasher.update(&bytes[start..bytes.len().min(start + BLOCK as usize)]);
        prop_assert_eq!(Some(&hasher.value()) == file.value(other), one == other);
    }
}
