//! Bytes land in host memory where the plan says, while several readers write to neighbouring memory at once. Everything
//! is in memory, so that Miri can watch; what needs mappings, which Miri has none of, is left out there.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;

use super::*;
use crate::checkpoint::{Dtype, TensorInfo};
use crate::device::{CopyEvent, Fence, ReadBackRegion};
use crate::plan::{Layout, Selection};
use crate::store::Identity;

const GUARD: u8 = 0xA5;
const BRIDGE: u64 = 64;

/// An object in memory, which puts what goes to a buffer at an odd place.
struct Bytes(Vec<u8>);

/// The same, where one call may fill several windows, as an object store does it.
struct Scattering(Bytes);

/// An object that says of what it read that it lies outside of the buffer.
struct Lying(usize);

/// A device that copies at once.
struct Immediate;

impl CopyStream for Immediate {
    fn wait_for(&mut self, _: &dyn Fence) -> Result<()> {
        Ok(())
    }

    unsafe fn copy(&mut self, pieces: &[CopyRegion]) -> Result<()> {
        for piece in pieces {
            // SAFETY: what `CopyStream::copy` demands of its caller.
            unsafe { std::ptr::copy_nonoverlapping(piece.source, pointer(piece.destination), piece.len) };
        }
        Ok(())
    }

    unsafe fn read_back(&mut self, pieces: &[ReadBackRegion]) -> Result<()> {
        for piece in pieces {
            // SAFETY: what `CopyStream::read_back` demands of its caller.
            unsafe { std::ptr::copy_nonoverlapping(pointer(piece.source), piece.destination, piece.len) };
        }
        Ok(())
    }

    fn mark(&mut self) -> Result<CopyEvent> {
        Ok(CopyEvent(0))
    }

    fn is_done(&mut self, _: CopyEvent) -> Result<bool> {
        Ok(true)
    }

    fn wait(&mut self, _: CopyEvent) -> Result<()> {
        Ok(())
    }
}

impl Object for Lying {
    fn location(&self) -> &str {
        "lying"
    }

    fn bytes(&self) -> u64 {
        1 << 20
    }

    fn identity(&self) -> Identity {
        Identity(String::new())
    }

    fn read_into(&self, _: u64, _: Window<'_>, _: &mut ReadContext) -> Result<()> {
        Ok(())
    }

    fn read_to_staging(&self, _: Range<u64>, _: Window<'_>, _: &mut ReadContext) -> Result<usize> {
        Ok(self.0)
    }

    fn verify_unchanged(&self) -> Result<()> {
        Ok(())
    }
}

impl Object for Scattering {
    fn location(&self) -> &str {
        self.0.location()
    }

    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn identity(&self) -> Identity {
        self.0.identity()
    }

    fn read_into(&self, offset: u64, into: Window<'_>, cx: &mut ReadContext) -> Result<()> {
        self.0.read_into(offset, into, cx)
    }

    fn read_scattered(&self, into: &mut [(u64, Window<'_>)], cx: &mut ReadContext) -> Result<()> {
        let ends = into.iter().map(|(offset, window)| offset + window.len() as u64);
        assert!(ends.zip(into.iter().skip(1)).all(|(end, (offset, _))| end <= *offset), "ranges overlap");
        into.iter_mut().try_for_each(|(offset, window)| {
            let len = window.len();
            self.0.read_into(*offset, window.part(0, len), cx)
        })
    }

    fn scatters(&self) -> bool {
        true
    }

    fn read_to_staging(&self, range: Range<u64>, buffer: Window<'_>, cx: &mut ReadContext) -> Result<usize> {
        self.0.read_to_staging(range, buffer, cx)
    }

    fn verify_unchanged(&self) -> Result<()> {
        Ok(())
    }
}

impl Object for Bytes {
    fn location(&self) -> &str {
        "memory"
    }

    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn identity(&self) -> Identity {
        Identity(String::new())
    }

    fn read_into(&self, offset: u64, mut into: Window<'_>, _: &mut ReadContext) -> Result<()> {
        let (start, len) = (to_usize(offset), into.len());
        into.write(0, &self.0[start..start + len]);
        Ok(())
    }

    fn read_to_staging(
        &self,
        range: Range<u64>,
        mut buffer: Window<'_>,
        cx: &mut ReadContext,
    ) -> Result<usize> {
        const ODD: usize = 4097;
        let len = to_usize(range.end - range.start);
        self.read_into(range.start, buffer.part(ODD, len), cx).map(|()| ODD)
    }

    fn verify_unchanged(&self) -> Result<()> {
        Ok(())
    }
}

/// Tensors of these many bytes one after the other, with a gap of a few bytes between two of them.
fn tensors(sizes: &[u64]) -> (Bytes, Vec<TensorInfo>) {
    let mut end = 13;
    let mut made = Vec::new();
    for (number, size) in sizes.iter().enumerate() {
        let range = end..end + size;
        end = range.end + u64::from(number == 1) * 5;
        let (name, shape) = (format!("t{number}").into(), vec![*size]);
        made.push(TensorInfo { name, dtype: Dtype::U8, shape, object: 0, range });
    }
    // Not byte by byte, which takes Miri minutes.
    let mut bytes = (0..251).collect::<Vec<u8>>().repeat(to_usize(end / 251 + 1));
    bytes.truncate(to_usize(end));
    (Bytes(bytes), made)
}

fn plan_of(tensors: &[TensorInfo], block_bytes: u64) -> Plan {
    Plan::new(tensors.iter().map(|tensor| (tensor, Selection::all(tensor))).collect(), block_bytes, BRIDGE)
}

/// Has three readers bring in all blocks, at most `request` bytes at once.
fn read_all(plan: &Plan, object: &dyn Object, destinations: &Destinations, request: u64) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let (mut cx, mut scratch) = (ReadContext::default(), None);
                while let Some(block) = plan.blocks().get(next.fetch_add(1, Ordering::Relaxed)) {
                    to_host(plan, block, object, destinations, request, &mut cx, &mut scratch).unwrap();
                }
            });
        }
    });
}

/// Loads to one piece of memory laid out as a slab is.
#[test]
fn neighbours_in_one_slab_are_read_in_place_by_several_readers() {
    for block_bytes in [200, 1000, 1 << 20] {
        let (object, infos) = tensors(&[100, 7, 0, 3000, 1, 500]);
        let plan = plan_of(&infos, block_bytes);
        let layout = Layout::of(&plan);
        let mut memory = vec![GUARD; to_usize(layout.bytes()) + 1];
        let destinations = Destinations::new(infos.len(), true);
        let base = memory.as_mut_ptr() as usize as u64;
        for tensor in 0..infos.len() {
            destinations.set(tensor, base + layout.offset(tensor));
        }
        read_all(&plan, &object, &destinations, u64::MAX);
        for (tensor, info) in infos.iter().enumerate() {
            let start = to_usize(layout.offset(tensor));
            let file = to_usize(info.range.start)..to_usize(info.range.end);
            assert_eq!(memory[start..start + file.len()], object.0[file], "{}", info.name);
        }
        assert_eq!(memory.last(), Some(&GUARD), "written too far");
    }
}

/// Loads to memory of each tensor's own.
fn land_apart(sizes: &[u64], block_bytes: u64, request: u64) {
    let (object, infos) = tensors(sizes);
    let plan = plan_of(&infos, block_bytes);
    let memory: Vec<_> =
        infos.iter().map(|info| vec![GUARD; to_usize(info.bytes()) + 1]).map(Mutex::new).collect();
    let destinations = Destinations::new(infos.len(), false);
    for (tensor, memory) in memory.iter().enumerate() {
        destinations.set(tensor, memory.lock().unwrap().as_mut_ptr() as usize as u64);
    }
    read_all(&plan, &object, &destinations, request);
    for (memory, info) in memory.iter().zip(&infos) {
        let memory = memory.lock().unwrap();
        let (guard, bytes) = memory.split_last().unwrap();
        assert_eq!(*guard, GUARD, "{} was written too far", info.name);
        assert!(bytes == &object.0[to_usize(info.range.start)..to_usize(info.range.end)], "{}", info.name);
    }
}

#[test]
fn large_tensors_apart_from_each_other_get_reads_of_their_own() {
    land_apart(&[300_000, 270_001, 0, 400_000], 1 << 20, u64::MAX);
}

#[test]
fn a_tensor_of_many_blocks_is_read_in_place_wherever_it_lies() {
    land_apart(&[10_000], 1000, u64::MAX);
}

#[test]
fn requests_smaller_than_a_block_bring_the_same_bytes() {
    land_apart(&[10_000], 4000, 512);
    land_apart(&[300_000, 270_001, 0, 400_000], 1 << 20, 4096);
}

#[test]
fn requests_are_cut_at_multiples_of_their_size() {
    let cut = |range, bytes| requests(range, bytes).collect::<Vec<_>>();
    assert_eq!(cut(5..25, 10), [5..10, 10..20, 20..25]);
    assert_eq!(cut(10..20, 10), [10..20]);
    assert_eq!(cut(7..7, 10), []);
    assert_eq!(cut(3..1 << 40, u64::MAX), [3..1 << 40]);
}

#[test]
#[cfg_attr(miri, ignore = "scratch memory is mapped with flags that Miri does not know")]
fn small_tensors_apart_from_each_other_are_copied_from_one_read() {
    land_apart(&[100, 7, 0, 3000, 1, 500], 1 << 20, u64::MAX);
}

// Ranges that overlap

/// An object of so many bytes, each different from those around it and a page or a block further on.
fn object_of(bytes: u64) -> Bytes {
    Bytes((0..bytes).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect())
}

/// Where tensors go.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Target {
    Slab,
    Host,
    Scattered,
    Device,
    FromPinned,
}

/// Reads what is wanted to such a target and checks every byte, and those around each tensor.
fn land(
    object: &Bytes,
    wanted: Vec<(&TensorInfo, Selection)>,
    expected: &[Vec<u8>],
    block_bytes: u64,
    target: Target,
) {
    const GAP: usize = 3;
    let plan = Plan::new(wanted, block_bytes, 512);
    let layout = Layout::of(&plan);
    let tensors = plan.tensors();
    // Apart, each has memory of its own with guards around it. A slab begins at a multiple of a page.
    let mut ends = GAP;
    let apart: Vec<_> = tensors
        .iter()
        .map(|tensor| {
            let start = ends;
            ends += to_usize(tensor.bytes()) + GAP;
            start
        })
        .collect();
    let slab = target == Target::Slab;
    let places =
        if slab { (0..tensors.len()).map(|tensor| to_usize(layout.offset(tensor))).collect() } else { apart };
    let len = if slab { to_usize(layout.bytes()) + GAP } else { ends };
    let mut memory = vec![GUARD; len];
    let base = memory.as_mut_ptr() as usize as u64;
    let destinations = Destinations::new(tensors.len(), slab);
    for (tensor, place) in places.iter().enumerate() {
        destinations.set(tensor, base + *place as u64);
    }
    match target {
        Target::Slab | Target::Host => read_all(&plan, object, &destinations, 700),
        Target::Scattered => {
            read_all(&plan, &Scattering(Bytes(object.0.clone())), &destinations, u64::MAX);
        }
        Target::Device => {
            let mut buffer = vec![0; to_usize(block_bytes) + ALIGNMENT_PADDING];
            for block in plan.blocks() {
                let (segments, window) = (plan.segments(block), Window::from_slice(&mut buffer));
                let (mut cx, mut pieces) = (ReadContext::default(), Vec::new());
                let fetched = fetch(object, &block.range, window, &mut cx).unwrap();
                super::land(segments, &block.range, fetched, &destinations, &mut Immediate, &mut pieces)
                    .unwrap();
            }
        }
        Target::FromPinned => {
            let bytes = Arc::new(object.0.clone());
            let mut pieces = Vec::new();
            for block in plan.blocks() {
                let lies = &bytes[to_usize(block.range.start)..to_usize(block.range.end)];
                // SAFETY: the vector stays as long as its owner, and nobody writes to it.
                let span = unsafe { PinnedSpan::new(lies.as_ptr(), lies.len(), Arc::clone(&bytes) as _) };
                let (segments, fetched) = (plan.segments(block), Fetched::Pinned(&span));
                super::land(segments, &block.range, fetched, &destinations, &mut Immediate, &mut pieces)
                    .unwrap();
            }
            assert!(*bytes == object.0, "what is pinned belongs to others too");
            assert_eq!(Arc::strong_count(&bytes), 1);
        }
    }
    let mut owned = vec![false; len];
    for (tensor, place) in tensors.iter().zip(&places) {
        let span = *place..*place + to_usize(tensor.bytes());
        assert!(memory[span.clone()] == expected[tensor.item], "{} ({target:?}, {block_bytes})", tensor.name);
        owned[span].fill(true);
    }
    let untouched = memory.iter().zip(&owned).all(|(byte, owned)| *owned || *byte == GUARD);
    // Padding in a slab may be read along.
    assert!(slab || untouched, "something was written beside the tensors ({target:?})");
}

const TARGETS: [Target; 5] =
    [Target::Slab, Target::Host, Target::Scattered, Target::Device, Target::FromPinned];

fn land_ranges(object: &Bytes, ranges: &[Range<u64>]) {
    let tensors: Vec<_> = ranges
        .iter()
        .enumerate()
        .map(|(number, range)| TensorInfo {
            name: format!("{range:?} ({number})").into(),
            dtype: Dtype::U8,
            shape: vec![range.end - range.start],
            object: 0,
            range: range.clone(),
        })
        .collect();
    let bytes = |range: &Range<u64>| object.0[to_usize(range.start)..to_usize(range.end)].to_vec();
    let expected: Vec<_> = ranges.iter().map(bytes).collect();
    for target in TARGETS {
        for block_bytes in [4096, 16_384, 1 << 20] {
            let wanted = tensors.iter().map(|tensor| (tensor, Selection::all(tensor))).collect();
            land(object, wanted, &expected, block_bytes, target);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "scratch memory is mapped with flags that Miri does not know")]
fn a_tensor_in_the_gap_between_two_others_of_a_slab_is_not_overwritten() {
    // In the slab the second lies behind the first; the third comes after it at the distance that it has in the file.
    land_ranges(&object_of(36_000), &[0..30_000, 5_496..5_596, 30_200..35_000]);
    // One that ends within another, one that is within two, the same twice, none of it.
    land_ranges(
        &object_of(36_000),
        &[0..9_000, 100..200, 100..200, 50..50, 8_000..20_000, 8_500..8_600, 20_300..36_000],
    );
}

#[test]
#[cfg_attr(miri, ignore = "scratch memory is mapped with flags that Miri does not know")]
fn pieces_of_a_column_are_not_overwritten_by_what_is_read_between_them() {
    // Two columns' rows, and a range between the rows that lies in the slab as it does in the file.
    let object = object_of(5_000);
    let matrix =
        TensorInfo { name: "m".into(), dtype: Dtype::U8, shape: vec![2, 1000], object: 0, range: 0..2000 };
    let bytes = TensorInfo { name: "b".into(), dtype: Dtype::U8, shape: vec![60], object: 0, range: 40..100 };
    let column = Selection::of(&matrix, &[0..2, 0..10]).unwrap();
    let expected = [[&object.0[..10], &object.0[1000..1010]].concat(), object.0[40..100].to_vec()];
    for target in TARGETS {
        let wanted = vec![(&matrix, column.clone()), (&bytes, Selection::all(&bytes))];
        land(&object, wanted, &expected, 1 << 20, target);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(150) })]

    #[test]
    #[cfg_attr(miri, ignore = "too much for Miri")]
    fn ranges_that_overlap_in_any_way_arrive_wherever_they_go(
        spans in prop::collection::vec(
            (0u64..40_000, prop_oneof![0u64..20, 0u64..3_000, 0u64..30_000]), 1..12
        ),
        // Neighbours at page distances of each other are what a layout treats in a way of its own.
        near in prop::collection::vec((any::<prop::sample::Index>(), 0u64..6_000, 0u64..5_000), 0..6),
    ) {
        let object = object_of(100_000);
        let mut ranges: Vec<_> = spans.iter().map(|(start, len)| *start..start + len).collect();
        for (after, gap, len) in near {
            let start = ranges[after.index(ranges.len())].end + gap;
            ranges.push(start..(start + len).min(100_000).max(start));
        }
        ranges.retain(|range| range.end <= 100_000);
        land_ranges(&object, &ranges);
    }

    #[test]
    #[cfg_attr(miri, ignore = "too much for Miri")]
    fn boxes_of_one_tensor_that_overlap_in_any_way_arrive_wherever_they_go(
        boxes in prop::collection::vec((0u64..40, 0u64..40, 0u64..300, 0u64..300), 1..8),
    ) {
        let object = object_of(12_017);
        let shape = vec![40, 300];
        let tensor = TensorInfo { name: "m".into(), dtype: Dtype::U8, shape, object: 0, range: 17..12_017 };
        let ordered = |a: u64, b: u64| a.min(b)..a.max(b);
        let boxes: Vec<_> = boxes.iter().map(|(a, b, c, d)| [ordered(*a, *b), ordered(*c, *d)]).collect();
        let expected: Vec<Vec<u8>> = boxes
            .iter()
            .map(|[rows, columns]| {
                let row = |row: u64| 17 + row * 300 + columns.start..17 + row * 300 + columns.end;
                rows.clone().flat_map(|number| object.0[to_usize(row(number).start)..to_usize(row(number).end)].to_vec()).collect()
            })
            .collect();
        for target in TARGETS {
            for block_bytes in [4096, 1 << 20] {
                let wanted = boxes.iter().map(|ranges| (&tensor, Selection::of(&tensor, ranges).unwrap())).collect();
                land(&object, wanted, &expected, block_bytes, target);
            }
        }
    }
}

// Stores that are wrong

#[test]
#[cfg_attr(miri, ignore = "scratch memory is mapped with flags that Miri does not know")]
fn a_store_that_puts_a_range_outside_of_its_buffer_fails_the_load() {
    let (_, infos) = tensors(&[100, 200, 300]);
    let plan = plan_of(&infos, 4096);
    let block = &plan.blocks()[0];
    let mut memory = vec![GUARD; 1000];
    let base = memory.as_mut_ptr() as usize as u64;
    for start in [4096 + ALIGNMENT_PADDING, usize::MAX, usize::MAX - 10] {
        let destinations = Destinations::new(infos.len(), false);
        [0, 100, 300].iter().enumerate().for_each(|(tensor, at)| destinations.set(tensor, base + at));
        let (mut cx, mut scratch) = (ReadContext::default(), None);
        let object = Lying(start);
        let host =
            to_host(&plan, block, &object, &destinations, u64::MAX, &mut cx, &mut scratch).err().unwrap();
        let mut buffer = vec![0; 4096 + ALIGNMENT_PADDING];
        let window = Window::from_slice(&mut buffer);
        let device = fetch(&object, &block.range, window, &mut cx).err().unwrap();
        for error in [host, device] {
            assert_eq!((error.kind(), error.object_name()), (ErrorKind::Storage, Some("lying")), "{error}");
        }
    }
    assert!(memory.iter().all(|byte| *byte == GUARD));
}
