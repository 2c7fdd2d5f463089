//! Where a plan's offsets become addresses.
//!
//! The soundness of everything here rests on two promises: the planner's, that every byte of every destination is
//! written by exactly one segment (property-tested), and the caller's of [`Session::attach`](super::Session::attach),
//! that a destination is writable memory of the planned length until its tensor has landed or the session has ended.
#![allow(unsafe_code)]

use std::ops::{AddAssign, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::device::{CopyRegion, CopyStream};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{HostSlab, HostTensor, PinnedSpan, Region, Window};
use crate::plan::{Block, Plan, Segment};
use crate::store::{ALIGNMENT_PADDING, Object, ReadContext};

/// Segments of at least this many bytes on average are worth a read each; smaller ones share a read and are copied.
const SEGMENT_WORTH_A_READ: u64 = 256 << 10;

/// Addresses of a load's destinations, set as they are attached.
pub(super) struct Destinations {
    addresses: Box<[AtomicU64]>,
    /// Whether the destinations lie in one slab as the plan's layout says: in the plan's order, without overlap.
    slab: bool,
}

impl Destinations {
    pub(super) fn new(tensors: usize, slab: bool) -> Self {
        Self { addresses: (0..tensors).map(|_| AtomicU64::new(0)).collect(), slab }
    }

    pub(super) fn set(&self, tensor: usize, address: u64) {
        self.addresses[tensor].store(address, Ordering::Release);
    }

    fn of(&self, segment: &Segment) -> u64 {
        self.addresses[segment.tensor as usize].load(Ordering::Acquire) + segment.dst
    }

    /// The address where the block's range goes as it is, if it does: one run of host memory that holds nothing but the
    /// block's segments and, in a slab, padding between two tensors.
    fn in_one_run(&self, plan: &Plan, block: &Block, segments: &[Segment]) -> Option<u64> {
        let first = segments.first()?;
        let shift = self.of(first).wrapping_sub(first.src);
        let mut end = block.range.start;
        let mut before: Option<&Segment> = None;
        for segment in segments {
            // Where ranges overlap in the file, a gap of the file may be another tensor's memory in the slab.
            let follows = segment.src == end
                || (self.slab
                    && segment.src > end
                    && before.is_some_and(|before| only_padding_between(plan, before, segment)));
            let one_piece = segment.count == 1;
            if !follows || !one_piece || self.of(segment).wrapping_sub(segment.src) != shift {
                return None;
            }
            end = segment.src + segment.len;
            before = Some(segment);
        }
        (end == block.range.end).then(|| shift.wrapping_add(block.range.start))
    }
}

/// Whether no tensor of a slab has bytes between the end of `before` and the beginning of `after`. Tensors lie in the
/// slab in the plan's order, so that is so where one ends, the other begins, and those between them are empty.
fn only_padding_between(plan: &Plan, before: &Segment, after: &Segment) -> bool {
    let tensors = plan.tensors();
    let (one, other) = (before.tensor as usize, after.tensor as usize);
    one < other
        && after.dst == 0
        && before.dst + before.bytes() == tensors[one].bytes()
        && tensors[one + 1..other].iter().all(|tensor| tensor.bytes() == 0)
}

/// Time a reader spent on one block.
#[derive(Default)]
pub(super) struct Timing {
    pub(super) reading: Duration,
    pub(super) copying: Duration,
}

impl AddAssign for Timing {
    fn add_assign(&mut self, more: Self) {
        self.reading += more.reading;
        self.copying += more.copying;
    }
}

/// `range` in pieces of at most `bytes`, cut at multiples of that, as storage lays out what it stripes.
pub(super) fn requests(range: Range<u64>, bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let mut next = range.start;
    std::iter::from_fn(move || {
        let start = next;
        next = range.end.min(start.saturating_add(bytes - start % bytes));
        (start < next).then_some(start..next)
    })
}

/// Fills `window` with the bytes that begin at `offset`, at most `request` of them at once.
fn read(
    object: &dyn Object,
    offset: u64,
    mut window: Window<'_>,
    request: u64,
    cx: &mut ReadContext,
) -> Result<()> {
    requests(offset..offset + window.len() as u64, request).try_for_each(|range| {
        let part = window.part(to_usize(range.start - offset), to_usize(range.end - range.start));
        object.read_into(range.start, part, cx)
    })
}

/// As [`Object::read_to_staging`], of any object: where it says that the range begins is checked, as it is about to become an
/// address.
fn read_to_staging(
    object: &dyn Object,
    range: &Range<u64>,
    buffer: Window<'_>,
    cx: &mut ReadContext,
) -> Result<usize> {
    let (len, room) = (to_usize(range.end - range.start), buffer.len());
    let start = object.read_to_staging(range.clone(), buffer, cx)?;
    if start.checked_add(len).is_some_and(|end| end <= room) {
        return Ok(start);
    }
    let cause =
        format!("the store says that it put {len} bytes at position {start} of a buffer of {room} bytes");
    Err(Error::new(ErrorKind::Storage, cause)
        .object(object.location())
        .range(range.clone())
        .remedy("This is a bug of the store: report it to its authors"))
}

/// Reads a block to its destinations in host memory, at most `request` bytes at once: in place where the destinations
/// allow, else through `scratch`.
pub(super) fn to_host(
    plan: &Plan,
    block: &Block,
    object: &dyn Object,
    destinations: &Destinations,
    request: u64,
    cx: &mut ReadContext,
    scratch: &mut Option<Region>,
) -> Result<Timing> {
    let began = Instant::now();
    let segments = plan.segments(block);
    let len = to_usize(block.range.end - block.range.start);
    if let Some(address) = destinations.in_one_run(plan, block, segments) {
        // SAFETY: the run consists of the block's own spans of attached destinations and, in a slab, of padding between
        // the end of one tensor and the beginning of another. Only the block that has both may write to that padding.
        let window = unsafe { Window::from_raw(pointer(address), len) }.non_temporal();
        read(object, block.range.start, window, request, cx)?;
        return Ok(Timing { reading: began.elapsed(), copying: Duration::ZERO });
    }
    let wanted: u64 = segments.iter().map(Segment::bytes).sum();
    // Bytes that several tensors want are read once, to scratch memory.
    let simple = segments.iter().all(|segment| segment.count == 1) && are_apart(segments);
    if simple && (object.scatters() || wanted >= segments.len() as u64 * SEGMENT_WORTH_A_READ) {
        let window = |segment: &Segment| {
            // SAFETY: this segment's own span of an attached destination.
            let window =
                unsafe { Window::from_raw(pointer(destinations.of(segment)), to_usize(segment.len)) };
            (segment.src, window.non_temporal())
        };
        // Two tensors may lie in one block that is verified whole.
        if object.scatters() || object.verification_block().is_some() {
            object.read_scattered(&mut segments.iter().map(window).collect::<Vec<_>>(), cx)?;
        } else {
            for (offset, window) in segments.iter().map(window) {
                read(object, offset, window, request, cx)?;
            }
        }
        return Ok(Timing { reading: began.elapsed(), copying: Duration::ZERO });
    }
    let region = match scratch {
        Some(region) => region,
        None => scratch.insert(Region::reserve(to_usize(plan.block_bytes()) + ALIGNMENT_PADDING)?),
    };
    let start = read_to_staging(object, &block.range, region.window(), cx)?;
    let reading = began.elapsed();
    let bytes = &region.as_mut_slice()[start..start + len];
    for segment in segments {
        let (piece, target) = (to_usize(segment.len), destinations.of(segment));
        for i in 0..segment.count {
            let at = to_usize(segment.src + i * segment.stride - block.range.start);
            // SAFETY: this piece's own span of an attached destination.
            let window = unsafe { Window::from_raw(pointer(target + i * segment.len), piece) };
            window.non_temporal().write(0, &bytes[at..at + piece]);
        }
    }
    Ok(Timing { reading, copying: began.elapsed().saturating_sub(reading) })
}

/// Where the bytes of a range are that is to be landed on a device.
pub(super) enum Fetched<'a> {
    /// In a staging buffer, from this place on. The buffer is the reader's own, so pieces may be packed in it.
    Staging(Window<'a>, usize),
    /// In memory that was pinned before, and belongs to others too.
    Pinned(&'a PinnedSpan),
}

/// Reads `range`, a block's or, of a block without strides, a part of it, to `buffer`.
pub(super) fn fetch<'a>(
    object: &dyn Object,
    range: &Range<u64>,
    mut buffer: Window<'a>,
    cx: &mut ReadContext,
) -> Result<Fetched<'a>> {
    let len = buffer.len();
    let start = read_to_staging(object, range, buffer.part(0, len), cx)?;
    Ok(Fetched::Staging(buffer, start))
}

/// Enqueues the copies of what was fetched of `range` to its destinations in device memory.
///
/// What `fetched` lies in must be kept until a later event of `stream` is done, even after an error. `pieces` is room for
/// the list of copies, kept by the caller so that it is not made anew for every block.
pub(super) fn land(
    segments: &[Segment],
    range: &Range<u64>,
    fetched: Fetched<'_>,
    destinations: &Destinations,
    stream: &mut dyn CopyStream,
    pieces: &mut Vec<CopyRegion>,
) -> Result<()> {
    let len = to_usize(range.end - range.start);
    let (base, packs) = match fetched {
        Fetched::Staging(buffer, start) => {
            assert!(
                start.checked_add(len).is_some_and(|end| end <= buffer.len()),
                "more than the buffer holds"
            );
            // SAFETY: the range's bytes, from `start` on, lie in the buffer.
            (unsafe { buffer.as_ptr().add(start) }, true)
        }
        Fetched::Pinned(span) => {
            assert!(len <= span.len(), "more than the span holds");
            (span.as_ptr().cast_mut(), false)
        }
    };
    pieces.clear();
    let packs = packs && are_apart(segments);
    let begin_before_its_end = segments.iter().take_while(|segment| segment.src < range.end);
    let touched = begin_before_its_end.filter(|segment| segment.src + segment.span() > range.start);
    for segment in touched.map(|segment| segment.within(range)) {
        let at = to_usize(segment.src - range.start);
        // SAFETY: `at` is within the range, whose bytes lie from `base` on.
        let source = unsafe { base.add(at) };
        let (piece, stride) = (to_usize(segment.len), to_usize(segment.stride));
        let destination = destinations.of(&segment);
        if segment.count > 1 && !packs {
            // Another segment's bytes lie between these pieces, or they are not ours to move: each goes from where it is.
            pieces.extend((0..to_usize(segment.count)).map(|i| CopyRegion {
                destination: destination + (i * piece) as u64,
                // SAFETY: as above.
                source: unsafe { source.add(i * stride) },
                len: piece,
            }));
            continue;
        }
        for i in 1..to_usize(segment.count) {
            // Pieces are packed where they lie, so that they need one copy. The stride is at least the length, so a
            // piece moves towards the front only, over bytes that were packed before or that no one asked for.
            // SAFETY: both ends lie in the segment's part of the staging buffer; `copy` allows them to overlap.
            unsafe { std::ptr::copy(source.add(i * stride), source.add(i * piece), piece) };
        }
        pieces.push(CopyRegion { destination, source, len: to_usize(segment.bytes()) });
    }
    // SAFETY: what the bytes lie in stays until a later event is done, as this function's caller promises; destinations are
    // the segments' own spans of attached ones.
    unsafe { stream.copy(pieces) }
}

/// Whether no segment reaches into the next: parts of one tensor may.
fn are_apart(segments: &[Segment]) -> bool {
    let mut end = 0;
    segments.iter().all(|segment| {
        let apart = segment.src >= end;
        end = end.max(segment.src + segment.span());
        apart
    })
}

/// The memory of a landed tensor, which lies at `offset` of its slab. Called once for each tensor of a layout.
pub(super) fn host_tensor(slab: &Arc<HostSlab>, offset: u64, bytes: u64) -> HostTensor {
    // SAFETY: a layout gives every tensor bytes of its own (property-tested), and the session hands each out once.
    unsafe { slab.tensor(to_usize(offset), to_usize(bytes)) }
}

fn pointer(address: u64) -> *mut u8 {
    address as usize as *mut u8
}

/// Lengths here are lengths of memory that exists, so they fit.
fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests;
