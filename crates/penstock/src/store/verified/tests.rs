use std::sync::Mutex;

use proptest::prelude::*;

use super::*;

const BLOCK: u64 = 64 << 10;

/// An object in memory, which logs what is read of it, and may be reached over a network that damages bytes.
struct Bytes {
    bytes: Mutex<Vec<u8>>,
    log: Mutex<Vec<Range<u64>>>,
    /// How many reads get a flipped bit, where there is a network.
    damage: Mutex<Option<u32>>,
    piecemeal: bool,
}

impl Object for Bytes {
    fn location(&self) -> &str {
        "/m/file"
    }

    fn bytes(&self) -> u64 {
        self.bytes.lock().unwrap().len() as u64
    }

    fn identity(&self) -> Identity {
        Identity("one".into())
    }

    fn read_into(&self, offset: u64, mut into: Window<'_>, _: &mut ReadContext) -> Result<()> {
        let range = offset..offset + into.len() as u64;
        let mut bytes = self.bytes.lock().unwrap()[range.start as usize..range.end as usize].to_vec();
        if let Some(left @ 1..) = &mut *self.damage.lock().unwrap() {
            *left -= 1;
            bytes[0] ^= 1;
        }
        into.write(0, &bytes);
        self.log.lock().unwrap().push(range);
        Ok(())
    }

    fn read_to_staging(
        &self,
        range: Range<u64>,
        mut buffer: Window<'_>,
        cx: &mut ReadContext,
    ) -> Result<usize> {
        let start = if self.piecemeal { 7 } else { 0 };
        let len = (range.end - range.start) as usize;
        self.read_into(range.start, buffer.part(start, len), cx).map(|()| start)
    }

    fn access(&self) -> Option<Access> {
        let (endpoint, credentials) = (String::new(), String::new());
        let remote = self.damage.lock().unwrap().is_some();
        remote.then_some(Access { provider: "S3", endpoint, region: None, credentials })
    }

    fn verify_unchanged(&self) -> Result<()> {
        Ok(())
    }
}

fn content(len: u64) -> Vec<u8> {
    (0..len).map(|i| (i * 7 % 251) as u8).collect()
}

/// A verified object of `len` bytes, and the one inside it.
fn object(len: u64, damage: Option<u32>) -> (VerifiedObject, Arc<Bytes>) {
    let bytes = content(len);
    let blocks: Vec<_> =
        if bytes.is_empty() { vec![&[][..]] } else { bytes.chunks(BLOCK as usize).collect() };
    let whole = blocks.len() == 1;
    let values = blocks.iter().enumerate().map(|(number, block)| {
        // As `FileHashes::hasher`, of which there is none yet.
        let placeholder = FileHashes::new(
            "f",
            if whole { 1 } else { BLOCK * 2 },
            BLOCK,
            match whole {
                true => vec![[0; 32]],
                false => vec![[0; 32]; 2],
            },
        );
        let mut hasher = placeholder.unwrap().hasher(number as u64);
        hasher.update(block);
        hasher.value()
    });
    let file = FileHashes::new("file", len, BLOCK, values.collect()).unwrap();
    let manifest = Arc::new(Manifest::new(vec![file]).unwrap());
    let inner = Arc::new(Bytes {
        bytes: Mutex::new(bytes),
        log: Mutex::default(),
        damage: Mutex::new(damage),
        piecemeal: true,
    });
    (VerifiedObject::new(Arc::clone(&inner) as _, &manifest, "file").unwrap(), inner)
}

fn flip(inner: &Bytes, at: u64) {
    inner.bytes.lock().unwrap()[at as usize] ^= 0x10;
}

#[test]
fn a_file_of_another_size_or_name_is_refused_before_it_is_read() {
    let (object, inner) = object(BLOCK * 2, None);
    let manifest = Arc::clone(&object.manifest);
    let refused = |name: &str| VerifiedObject::new(Arc::clone(&inner) as _, &manifest, name).err().unwrap();
    assert!(refused("other").to_string().contains("does not have this file"));
    for len in [BLOCK * 2 - 1, BLOCK * 2 + 1, 0] {
        *inner.bytes.lock().unwrap() = content(len);
        let error = refused("file");
        assert_eq!(error.kind(), ErrorKind::Integrity);
        assert!(error.to_string().contains(&format!("has {len} bytes")), "{error}");
    }
    assert!(inner.log.lock().unwrap().is_empty());
}

#[test]
fn a_damaged_block_is_an_error_of_a_file_and_names_the_block() {
    let (object, inner) = object(BLOCK * 3 + 5, None);
    flip(&inner, BLOCK + 9);
    let mut buffer = vec![0; 10];
    let mut cx = ReadContext::default();
    let error = object.read_into(BLOCK * 2 - 5, Window::from_slice(&mut buffer), &mut cx).unwrap_err();
    assert_eq!((error.kind(), error.byte_range()), (ErrorKind::Integrity, Some(BLOCK..BLOCK * 2)));
    assert_eq!(inner.log.lock().unwrap().len(), 3, "read once, in three parts");
    // Others are not touched by it.
    object.read_into(BLOCK * 2, Window::from_slice(&mut buffer), &mut cx).unwrap();
    assert_eq!(buffer, content(BLOCK * 4)[(BLOCK * 2) as usize..][..10]);
}

#[test]
fn what_a_network_damages_is_fetched_once_more() {
    let (object, inner) = object(BLOCK * 3, Some(1));
    let mut buffer = vec![0; BLOCK as usize * 2];
    let mut cx = ReadContext::default();
    object.read_into(0, Window::from_slice(&mut buffer), &mut cx).unwrap();
    assert_eq!(buffer, content(BLOCK * 2));
    assert_eq!(*inner.log.lock().unwrap(), [0..BLOCK * 2, 0..BLOCK]);
    assert!(object.notes()[0].contains("fetched once more"));
    *inner.damage.lock().unwrap() = Some(2);
    let error = object.read_into(0, Window::from_slice(&mut buffer), &mut cx).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Integrity);
}

#[test]
fn a_staging_buffer_that_is_too_small_for_whole_blocks_is_enough() {
    let (object, _) = object(BLOCK * 3, None);
    let mut buffer = vec![0; 20 + ALIGNMENT_PADDING];
    let range = BLOCK - 10..BLOCK + 10;
    let mut cx = ReadContext::default();
    let at = object.read_to_staging(range, Window::from_slice(&mut buffer), &mut cx).unwrap();
    assert_eq!(buffer[at..at + 20], content(BLOCK * 2)[BLOCK as usize - 10..][..20]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn windows_get_what_the_manifest_says_or_nothing_passes(
        len in 1..BLOCK * 5,
        mut cuts in prop::collection::vec((0..BLOCK * 5, any::<bool>()), 2..12),
        flipped in prop::option::of(0..BLOCK * 5),
        cached in any::<bool>(),
    ) {
        let (object, inner) = object(len, None);
        let good = content(len);
        cuts.iter_mut().for_each(|(at, _)| *at = (*at).min(len));
        cuts.sort_unstable_by_key(|(at, _)| *at);
        let wanted: Vec<_> = cuts.windows(2).filter(|pair| pair[0].1).map(|pair| pair[0].0..pair[1].0).collect();
        if let Some(at) = flipped.filter(|at| *at < len) {
            flip(&inner, at);
        }
        let touched = |block: u64| wanted.iter().any(|range| {
            range.start < range.end && range.start / BLOCK <= block && (range.end - 1) / BLOCK >= block
        });
        let fails = flipped.is_some_and(|at| at < len && touched(at / BLOCK));
        let mut memory: Vec<_> = wanted.iter().map(|range| vec![0u8; (range.end - range.start) as usize]).collect();
        let mut cx = ReadContext { cached: Some(cached), ..ReadContext::default() };
        let mut windows: Vec<_> = wanted.iter().zip(&mut memory)
            .map(|(range, memory)| (range.start, Window::from_slice(memory))).collect();
        let done = object.read_scattered(&mut windows, &mut cx);
        prop_assert_eq!(done.is_err(), fails);
        if !fails {
            for (range, memory) in wanted.iter().zip(&memory) {
                prop_assert_eq!(&memory[..], &good[range.start as usize..range.end as usize]);
            }
        }
        // Each byte of the blocks that are touched is read once, and no other.
        let mut log = inner.log.lock().unwrap().clone();
        log.sort_unstable_by_key(|range| range.start);
        prop_assert!(log.windows(2).all(|pair| pair[0].end <= pair[1].start), "{log:?}");
        let blocks = (0..len.div_ceil(BLOCK)).filter(|block| touched(*block));
        let whole: u64 = blocks.map(|block| len.min((block + 1) * BLOCK) - block * BLOCK).sum();
        prop_assert_eq!(log.iter().map(|range| range.end - range.start).sum::<u64>(), whole);
        let wanted_bytes: u64 = wanted.iter().map(|range| range.end - range.start).sum();
        prop_assert_eq!(cx.verification_excess_bytes, whole - wanted_bytes);
    }

    #[test]
    fn a_staging_buffer_gets_what_the_manifest_says_or_nothing_passes(
        len in 1..BLOCK * 5, from in 0..BLOCK * 5, to in 0..BLOCK * 5,
        flipped in prop::option::of(0..BLOCK * 5), cached in any::<bool>(), room in any::<bool>(),
    ) {
        let (object, inner) = object(len, None);
        let good = content(len);
        let (from, to) = (from.min(to).min(len), from.max(to).min(len));
        if let Some(at) = flipped.filter(|at| *at < len) {
            flip(&inner, at);
        }
        let fails = from < to && flipped.is_some_and(|at| {
            at < len && from / BLOCK <= at / BLOCK && at / BLOCK <= (to - 1) / BLOCK
        });
        let more = if room { BLOCK as usize * 2 } else { 0 };
        let mut buffer = vec![0; (to - from) as usize + ALIGNMENT_PADDING + more];
        let mut cx = ReadContext { cached: Some(cached), ..ReadContext::default() };
        let done = object.read_to_staging(from..to, Window::from_slice(&mut buffer), &mut cx);
        prop_assert_eq!(done.is_err(), fails);
        if let Ok(at) = done {
            prop_assert_eq!(&buffer[at..at + (to - from) as usize], &good[from as usize..to as usize]);
        }
    }
}
