//! A load's pieces, merged where they touch and cut into equal blocks.
//!
//! Tensors are planned in file order, object by object. Blocks are cut at multiples of the block size in the object,
//! so that they are equal whatever the tensors' sizes, aligned for direct reads, and one large tensor is shared by many
//! readers while many small ones share a block. Pieces with a gap of at most the bridge size between them go into one
//! block, which reads the gap too: that costs less than another read.

use std::ops::Range;
use std::sync::Arc;

use super::Selection;
use crate::checkpoint::TensorInfo;

/// One tensor of a load: what is delivered, and where it comes from.
#[derive(Debug, Clone)]
pub struct PlannedTensor {
    /// The tensor's name.
    pub name: Arc<str>,
    /// Which of those that were asked for this is, in the order of the asking.
    pub item: usize,
    /// The object that holds it, as an index into the checkpoint's objects.
    pub object: u32,
    /// What of it is wanted.
    pub selection: Selection,
    /// The tensor's first byte in the object.
    start: u64,
    element_bits: u64,
}

impl PlannedTensor {
    /// Bytes delivered.
    pub fn bytes(&self) -> u64 {
        self.selection.bytes()
    }

    /// Where the delivered bytes begin in the object, if they are consecutive there.
    pub(super) fn file_start(&self) -> Option<u64> {
        self.selection.is_contiguous().then(|| self.start + self.selection.first())
    }

    /// The alignment that elements of the dtype want.
    pub(super) fn element_align(&self) -> u64 {
        (self.element_bits / 8).max(1)
    }
}

/// Equal pieces at equal distances, on their way to consecutive bytes of one tensor. Mostly just one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The tensor, as an index into the plan's tensors.
    pub tensor: u32,
    /// Where the first piece begins in the object.
    pub src: u64,
    /// Where it goes, from the first delivered byte of the tensor.
    pub dst: u64,
    /// Bytes of a piece.
    pub len: u64,
    /// Number of pieces.
    pub count: u64,
    /// Bytes from one piece's beginning to the next one's in the object; `len` where there is only one.
    pub stride: u64,
}

impl Segment {
    /// Bytes the segment delivers.
    pub fn bytes(&self) -> u64 {
        self.len * self.count
    }

    /// Bytes of the object from the beginning of the first piece to the end of the last.
    pub fn span(&self) -> u64 {
        self.count.checked_sub(1).map_or(0, |before| before * self.stride + self.len)
    }

    /// What of it lies in `range`. Only of a single piece: several lie in the range as a whole.
    #[must_use]
    pub fn within(&self, range: &Range<u64>) -> Self {
        if self.count != 1 {
            return *self;
        }
        let src = self.src.max(range.start);
        let len = (self.src + self.len).min(range.end).saturating_sub(src);
        Self { src, dst: self.dst + (src - self.src), len, stride: len, ..*self }
    }
}

/// What one reader reads at once: a range of one object, and where its bytes go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The object, as an index into the checkpoint's objects.
    pub object: u32,
    /// Bytes of the object, from the first to the last wanted one.
    pub range: Range<u64>,
    /// Which of the plan's segments, in order of `src`.
    segments: Range<usize>,
}

/// All reads of one load.
#[derive(Debug, Clone)]
pub struct Plan {
    tensors: Vec<PlannedTensor>,
    blocks: Vec<Block>,
    segments: Vec<Segment>,
    /// For every tensor, how many blocks are complete once it and all before it have destinations.
    blocks_until: Vec<usize>,
    block_bytes: u64,
}

impl Plan {
    /// Plans the reading of `wanted`, in blocks of `block_bytes` (a multiple of 4 KiB), bridging gaps of up to
    /// `coalesce_gap_bytes`. The order of the plan's tensors is file order, not the order of `wanted`.
    pub fn new(wanted: Vec<(&TensorInfo, Selection)>, block_bytes: u64, coalesce_gap_bytes: u64) -> Self {
        let mut wanted: Vec<Wanted<'_>> = wanted
            .into_iter()
            .enumerate()
            .map(|(item, (tensor, selection))| Wanted { item, tensor, selection })
            .collect();
        wanted.sort_by_key(|wanted| (wanted.tensor.object, wanted.begin()));
        let mut planner = Planner { block_bytes, coalesce_gap_bytes, ..Planner::default() };
        let mut planned = 0;
        while planned < wanted.len() {
            let group = planned..planned + overlapping(&wanted[planned..]);
            planner.plan(planned, &wanted[group.clone()]);
            planned = group.end;
        }
        let Planner { blocks, segments, .. } = planner;
        let mut blocks_until = vec![blocks.len(); wanted.len()];
        // Blocks become ready in their order: one that needs a later tensor than those after it holds them up.
        let mut needed = 0;
        for (index, block) in blocks.iter().enumerate() {
            let needs = last_tensor(&segments[block.segments.clone()]);
            blocks_until[needed..needs.max(needed)].fill(index);
            needed = needs.max(needed);
        }
        let tensors = wanted.into_iter().map(Wanted::planned).collect();
        Self { tensors, blocks, segments, blocks_until, block_bytes }
    }

    /// The tensors, in file order.
    pub fn tensors(&self) -> &[PlannedTensor] {
        &self.tensors
    }

    /// The blocks, in the order they should be read.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Where a block's bytes go, in order of their place in the object.
    pub fn segments(&self, block: &Block) -> &[Segment] {
        &self.segments[block.segments.clone()]
    }

    /// How many blocks, from the first, touch only tensors with an index below `tensors`.
    pub fn blocks_ready(&self, tensors: usize) -> usize {
        match tensors.checked_sub(1) {
            None => 0,
            Some(last) => self.blocks_until[last],
        }
    }

    /// For every tensor, how many tensors must have destinations before it can land: its last block may hold the
    /// beginning of those after it, or wait for a block that does.
    pub fn attached_to_land(&self) -> Vec<usize> {
        let mut needed: Vec<usize> = (1..=self.tensors.len()).collect();
        let mut last = 0;
        for block in &self.blocks {
            let segments = self.segments(block);
            last = last.max(last_tensor(segments) + 1);
            for segment in segments {
                let needed = &mut needed[segment.tensor as usize];
                *needed = last.max(*needed);
            }
        }
        needed
    }

    /// Bytes delivered in all.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(PlannedTensor::bytes).sum()
    }

    /// The most bytes of a block's range.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }
}

/// One of those asked for.
struct Wanted<'a> {
    item: usize,
    tensor: &'a TensorInfo,
    selection: Selection,
}

impl Wanted<'_> {
    /// Its first byte in the object.
    fn begin(&self) -> u64 {
        self.tensor.range.start + self.selection.first()
    }

    fn planned(self) -> PlannedTensor {
        PlannedTensor {
            name: Arc::clone(&self.tensor.name),
            item: self.item,
            object: self.tensor.object,
            selection: self.selection,
            start: self.tensor.range.start,
            element_bits: self.tensor.dtype.bits(),
        }
    }
}

/// How many of the first of `wanted`, which are in file order, reach into each other.
fn overlapping(wanted: &[Wanted<'_>]) -> usize {
    let Some(first) = wanted.first() else { return 0 };
    let mut end = first.tensor.range.start + first.selection.end();
    let more = wanted[1..].iter().take_while(|next| {
        let reached = next.tensor.object == first.tensor.object && next.begin() < end;
        end = end.max(next.tensor.range.start + next.selection.end());
        reached
    });
    1 + more.count()
}

/// The last tensor, as an index into the plan's, that segments of a block belong to.
fn last_tensor(segments: &[Segment]) -> usize {
    segments.iter().map(|segment| segment.tensor as usize).max().unwrap_or(0)
}

#[derive(Default)]
struct Planner {
    block_bytes: u64,
    coalesce_gap_bytes: u64,
    blocks: Vec<Block>,
    segments: Vec<Segment>,
    /// How many tensors are being planned together.
    together: usize,
}

impl Planner {
    /// Adds tensors that reach into each other, or a single one; the first is number `first` of the plan.
    fn plan(&mut self, first: usize, group: &[Wanted<'_>]) {
        self.together = group.len();
        let mut parts = Vec::new();
        for (index, wanted) in (first..).zip(group) {
            let tensor = u32::try_from(index).unwrap_or(u32::MAX);
            let (object, start) = (wanted.tensor.object, wanted.tensor.range.start);
            let mut dst = 0;
            wanted.selection.for_each_piece(|at, len| {
                cut(
                    self.block_bytes,
                    Segment { tensor, src: start + at, dst, len, count: 1, stride: len },
                    |part| match group {
                        [_] => self.part(object, part),
                        _ => parts.push(part),
                    },
                );
                dst += len;
            });
        }
        parts.sort_unstable_by_key(|part| (part.src, part.tensor));
        for part in parts {
            self.part(group[0].tensor.object, part);
        }
    }

    /// Adds a piece that lies in one cell of the grid, to the last block if it fits there.
    fn part(&mut self, object: u32, part: Segment) {
        let cell = part.src / self.block_bytes;
        let end = part.src + part.len;
        let last = self.blocks.last_mut().filter(|block| {
            block.object == object
                && block.range.start / self.block_bytes == cell
                && part.src >= block.range.start
                && part.src <= block.range.end.saturating_add(self.coalesce_gap_bytes)
        });
        match last {
            Some(block) => {
                block.range.end = block.range.end.max(end);
                // Those planned together take turns.
                let latest = self.segments[block.segments.clone()].iter_mut().rev().take(self.together);
                let own = latest.into_iter().find(|segment| segment.tensor == part.tensor);
                if !own.is_some_and(|own| extend(own, &part)) {
                    self.segments.push(part);
                    block.segments.end += 1;
                }
            }
            None => {
                let segments = self.segments.len()..self.segments.len() + 1;
                self.blocks.push(Block { object, range: part.src..end, segments });
                self.segments.push(part);
            }
        }
    }
}

/// Cuts a piece at the block grid.
fn cut(block_bytes: u64, mut piece: Segment, mut part: impl FnMut(Segment)) {
    while piece.len > 0 {
        let cell_end = (piece.src / block_bytes + 1) * block_bytes;
        let len = piece.len.min(cell_end - piece.src);
        part(Segment { len, stride: len, ..piece });
        piece = Segment { src: piece.src + len, dst: piece.dst + len, len: piece.len - len, ..piece };
    }
}

/// Whether `part` could be added to `last` as its next piece; if so, it was.
fn extend(last: &mut Segment, part: &Segment) -> bool {
    if last.tensor != part.tensor || last.len != part.len || last.dst + last.bytes() != part.dst {
        return false;
    }
    let stride = part.src - (last.src + last.stride * (last.count - 1));
    if last.count > 1 && stride != last.stride {
        return false;
    }
    last.stride = stride;
    last.count += 1;
    true
}
