//! The planner's promise, for any tensors, selections, block sizes and bridges: every requested byte is written
//! exactly once and to its place, nothing else is touched, and little is read that no one asked for.

use std::ops::Range;

use penstock::checkpoint::{Dtype, TensorInfo};
use penstock::plan::{Layout, Plan, Selection};
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Wanted {
    tensor: TensorInfo,
    ranges: Vec<Range<u64>>,
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(vec![Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::F64])
}

/// A tensor's shape with a range of each of its first dimensions.
fn boxes() -> impl Strategy<Value = (Vec<u64>, Vec<Range<u64>>)> {
    prop::collection::vec(0u64..12, 0..4).prop_flat_map(|shape| {
        let ranges: Vec<_> = shape
            .iter()
            .map(|size| (0..=*size, 0..=*size).prop_map(|(a, b)| a.min(b)..a.max(b)).boxed())
            .collect();
        (Just(shape), ranges, 0usize..4).prop_map(|(shape, mut ranges, keep)| {
            ranges.truncate(keep);
            (shape, ranges)
        })
    })
}

/// Objects full of tensors, some of which are wanted, with holes between those; some in several parts that may overlap.
fn wanted() -> impl Strategy<Value = Vec<Wanted>> {
    let again = prop::collection::vec(prop::collection::vec((0u64..12, 0u64..12), 0..4), 0..3);
    let tensor = (boxes(), dtype(), 0u64..300, 0u32..3, any::<bool>(), again);
    prop::collection::vec(tensor, 0..24).prop_map(|tensors| {
        let mut ends = [0u64; 3];
        let mut wanted = Vec::new();
        for (index, ((shape, ranges), dtype, gap, object, whole, again)) in tensors.into_iter().enumerate() {
            let start = ends[object as usize] + gap;
            let end = start + shape.iter().product::<u64>() * dtype.bits() / 8;
            ends[object as usize] = end;
            let ranges = if whole { Vec::new() } else { ranges };
            let name = format!("t{index}").into();
            let tensor = TensorInfo { name, dtype, shape, object, range: start..end };
            for part in again {
                let clipped = part.iter().zip(&tensor.shape);
                let ranges =
                    clipped.map(|((a, b), size)| (*a.min(b)).min(*size)..(*a.max(b)).min(*size)).collect();
                wanted.push(Wanted { tensor: tensor.clone(), ranges });
            }
            wanted.push(Wanted { tensor, ranges });
        }
        wanted
    })
}

/// The byte that the tests' objects hold at `offset`: neighbours differ, and so do objects.
fn byte(object: u32, offset: u64) -> u8 {
    (offset.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u8 ^ (object as u8).wrapping_mul(77)
}

/// The selected box, element by element, as the definition of slicing says.
fn expected(wanted: &Wanted) -> Vec<u8> {
    let shape = &wanted.tensor.shape;
    let size = wanted.tensor.dtype.bits() / 8;
    let mut elements = vec![0u64];
    for (dimension, extent) in shape.iter().enumerate() {
        let range = wanted.ranges.get(dimension).cloned().unwrap_or(0..*extent);
        elements = elements
            .iter()
            .flat_map(|outer| range.clone().map(move |index| outer * extent + index))
            .collect();
    }
    let start = wanted.tensor.range.start;
    let bytes = elements.iter().flat_map(|element| start + element * size..start + (element + 1) * size);
    bytes.map(|at| byte(wanted.tensor.object, at)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn every_requested_byte_is_written_once_and_nothing_else(
        wanted in wanted(),
        block_bytes in prop::sample::select(vec![16u64, 64, 4096]),
        coalesce_gap_bytes in prop::sample::select(vec![0u64, 8, 100]),
    ) {
        let selections: Vec<_> = wanted
            .iter()
            .map(|w| (&w.tensor, Selection::of(&w.tensor, &w.ranges).unwrap()))
            .collect();
        let plan = Plan::new(selections, block_bytes, coalesce_gap_bytes);
        let mut written: Vec<Vec<Option<u8>>> =
            plan.tensors().iter().map(|t| vec![None; t.bytes() as usize]).collect();
        let mut previous: Option<(u32, u64)> = None;
        for block in plan.blocks() {
            prop_assert!(block.range.end - block.range.start <= block_bytes);
            prop_assert_eq!(block.range.start / block_bytes, (block.range.end - 1) / block_bytes);
            prop_assert!(previous <= Some((block.object, block.range.start)), "blocks are in file order");
            previous = Some((block.object, block.range.start));
            let mut pieces = Vec::new();
            for segment in plan.segments(block) {
                for piece in 0..segment.count {
                    let src = segment.src + piece * segment.stride;
                    prop_assert!(src >= block.range.start && src + segment.len <= block.range.end);
                    pieces.push(src..src + segment.len);
                    for i in 0..segment.len {
                        let to = (segment.dst + piece * segment.len + i) as usize;
                        let buffer = &mut written[segment.tensor as usize][to];
                        prop_assert_eq!(buffer.replace(byte(block.object, src + i)), None, "written twice");
                    }
                }
            }
            let sources: Vec<_> = plan.segments(block).iter().map(|segment| segment.src).collect();
            prop_assert!(sources.is_sorted(), "segments are in order");
            pieces.sort_by_key(|piece| piece.start);
            let mut covered = block.range.start;
            for piece in pieces {
                prop_assert!(piece.start <= covered.saturating_add(coalesce_gap_bytes), "an unbridgeable gap is read");
                covered = covered.max(piece.end);
            }
            prop_assert_eq!(covered, block.range.end, "the end of a block is wanted");
        }
        let reads: Vec<_> = plan.blocks().iter().map(|block| (block.object, block.range.clone())).collect();
        prop_assert!(
            reads.windows(2).all(|two| two[0].0 < two[1].0 || two[0].1.end <= two[1].1.start),
            "no byte is read twice, however many want it"
        );
        for (tensor, bytes) in plan.tensors().iter().zip(written) {
            let wanted = &wanted[tensor.item];
            prop_assert_eq!(&tensor.name, &wanted.tensor.name);
            prop_assert_eq!(bytes.into_iter().collect::<Option<Vec<_>>>(), Some(expected(wanted)));
        }
    }

    #[test]
    fn a_block_is_ready_when_the_tensors_it_touches_are(wanted in wanted(), block_bytes in 16u64..200) {
        let selections: Vec<_> = wanted
            .iter()
            .map(|w| (&w.tensor, Selection::of(&w.tensor, &w.ranges).unwrap()))
            .collect();
        let plan = Plan::new(selections, block_bytes, 8);
        for tensors in 0..=plan.tensors().len() {
            let ready = plan.blocks_ready(tensors);
            let needs = |block| plan.segments(block).iter().map(|s| s.tensor as usize + 1).max().unwrap();
            prop_assert!(plan.blocks()[..ready].iter().all(|block| needs(block) <= tensors));
            let next = plan.blocks().get(ready);
            prop_assert!(next.is_none_or(|block| needs(block) > tensors), "a ready block is held back");
        }
        for (tensor, needed) in plan.attached_to_land().into_iter().enumerate() {
            let blocks_with = |p: &Plan| {
                let holds = |b| p.segments(b).iter().any(|s| s.tensor as usize == tensor);
                p.blocks().iter().rposition(holds).map_or(0, |last| last + 1)
            };
            prop_assert!(plan.blocks_ready(needed) >= blocks_with(&plan), "it can land");
            prop_assert!(needed == tensor + 1 || plan.blocks_ready(needed - 1) < blocks_with(&plan));
        }
    }

    #[test]
    fn a_layout_gives_every_tensor_memory_of_its_own_and_keeps_its_phase(wanted in wanted()) {
        let selections: Vec<_> = wanted
            .iter()
            .map(|w| (&w.tensor, Selection::of(&w.tensor, &w.ranges).unwrap()))
            .collect();
        let plan = Plan::new(selections, 64, 0);
        let layout = Layout::of(&plan);
        let mut spans: Vec<_> = (0..plan.tensors().len())
            .map(|i| layout.offset(i)..layout.offset(i) + plan.tensors()[i].bytes())
            .collect();
        for (tensor, span) in plan.tensors().iter().zip(&spans) {
            let source = &wanted[tensor.item];
            prop_assert!(span.end <= layout.bytes());
            prop_assert_eq!(span.start % (source.tensor.dtype.bits() / 8), 0, "elements are aligned");
            let file = source.tensor.range.start + tensor.selection.first();
            if tensor.selection.is_contiguous() && file % (source.tensor.dtype.bits() / 8) == 0 {
                prop_assert_eq!(span.start % 4096, file % 4096);
            }
        }
        spans.retain(|span| !span.is_empty());
        spans.sort_by_key(|span| span.start);
        prop_assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start));
    }
}

#[test]
fn one_large_tensor_and_many_small_ones_make_equal_blocks() {
    let large =
        TensorInfo { name: "l".into(), dtype: Dtype::U8, shape: vec![1 << 20], object: 0, range: 0..1 << 20 };
    let one = Plan::new(vec![(&large, Selection::all(&large))], 1 << 16, 0);
    let small: Vec<_> = (0..1024u64)
        .map(|i| TensorInfo {
            name: i.to_string().into(),
            dtype: Dtype::U8,
            shape: vec![1024],
            object: 0,
            range: i * 1024..(i + 1) * 1024,
        })
        .collect();
    let many = Plan::new(small.iter().map(|t| (t, Selection::all(t))).collect(), 1 << 16, 0);
    let ranges = |plan: &Plan| plan.blocks().iter().map(|block| block.range.clone()).collect::<Vec<_>>();
    assert_eq!(ranges(&one), ranges(&many));
    assert_eq!(one.blocks().len(), 16);
}

#[test]
fn parts_of_one_matrix_share_its_blocks() {
    let t =
        TensorInfo { name: "t".into(), dtype: Dtype::F32, shape: vec![64, 16], object: 0, range: 0..4096 };
    let columns = |from, to| (&t, Selection::of(&t, &[0..64, from..to]).unwrap());
    let plan = Plan::new(vec![columns(8, 16), columns(0, 8), columns(4, 6)], 2048, 0);
    assert_eq!(
        plan.blocks().iter().map(|block| block.range.clone()).collect::<Vec<_>>(),
        [0..2048, 2048..4096]
    );
    assert_eq!(plan.tensors().iter().map(|tensor| tensor.item).collect::<Vec<_>>(), [1, 2, 0]);
    for block in plan.blocks() {
        let segments = plan.segments(block).iter().map(|s| (s.tensor, s.len, s.count, s.stride));
        assert_eq!(segments.collect::<Vec<_>>(), [(0, 32, 32, 64), (1, 8, 32, 64), (2, 32, 32, 64)]);
    }
}

#[test]
fn rows_of_a_column_slice_are_one_strided_segment() {
    let t =
        TensorInfo { name: "t".into(), dtype: Dtype::F32, shape: vec![64, 16], object: 0, range: 0..4096 };
    let plan = Plan::new(vec![(&t, Selection::of(&t, &[0..64, 0..4]).unwrap())], 4096, 4096);
    let segments = plan.segments(&plan.blocks()[0]);
    assert_eq!((segments.len(), segments[0].count, segments[0].len, segments[0].stride), (1, 64, 16, 64));
}
