//! Where a plan's offsets become addresses.
//!
//! The soundness of everything here rests on two promises: the planner's, that every byte of every destination is
//! written by exactly one segment (property-tested), and the caller's of [`Session::attach`](super::Session::attach),
//! that a destination is writable memory of the planned length until its tensor has landed or the session has ended.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::device::{CopyStream, Piece};
use crate::error::Result;
use crate::memory::{HostSlab, HostTensor, Region, Slot, Window};
use crate::plan::{Block, Plan, Segment};
use crate::store::{Lane, Object, SLOT_SLACK};

/// Segments of at least this many bytes on average are worth a read each; smaller ones share a read and are copied.
const SEGMENT_WORTH_A_READ: u64 = 256 << 10;

/// Addresses of a load's destinations, set as they are attached.
pub(super) struct Destinations {
    addresses: Box<[AtomicU64]>,
    /// Whether the destinations lie in one slab as the plan's layout says, so that gaps between them belong to no one.
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

    /// The address where the block's range goes as it is, if it does: one run of host memory.
    fn in_one_run(&self, block: &Block, segments: &[Segment]) -> Option<u64> {
        let first = segments.first()?;
        let shift = self.of(first).wrapping_sub(first.src);
        let mut end = block.range.start;
        for segment in segments {
            let follows = segment.count == 1 && (self.slab || segment.src == end);
            if !follows || self.of(segment).wrapping_sub(segment.src) != shift {
                return None;
            }
            end = segment.src + segment.len;
        }
        Some(shift.wrapping_add(block.range.start))
    }
}

/// Time a reader spent on one block.
#[derive(Default)]
pub(super) struct Spent {
    pub(super) reading: Duration,
    pub(super) copying: Duration,
}

/// Reads a block to its destinations in host memory: in place where the destinations allow, else through `scratch`.
pub(super) fn to_host(
    plan: &Plan,
    block: &Block,
    object: &dyn Object,
    destinations: &Destinations,
    lane: &mut Lane,
    scratch: &mut Option<Region>,
) -> Result<Spent> {
    let began = Instant::now();
    let segments = plan.segments(block);
    let len = to_usize(block.range.end - block.range.start);
    if let Some(address) = destinations.in_one_run(block, segments) {
        // SAFETY: the run consists of the block's own spans of attached destinations and, in a slab, of gaps between
        // them that belong to no tensor and to no other block.
        let window = unsafe { Window::from_raw(pointer(address), len) };
        object.read_into(block.range.start, window, lane)?;
        return Ok(Spent { reading: began.elapsed(), copying: Duration::ZERO });
    }
    let wanted: u64 = segments.iter().map(Segment::bytes).sum();
    let simple = segments.iter().all(|segment| segment.count == 1);
    if simple && (object.scatters() || wanted >= segments.len() as u64 * SEGMENT_WORTH_A_READ) {
        let window = |segment: &Segment| {
            // SAFETY: this segment's own span of an attached destination.
            let window =
                unsafe { Window::from_raw(pointer(destinations.of(segment)), to_usize(segment.len)) };
            (segment.src, window)
        };
        object.read_scattered(&mut segments.iter().map(window).collect::<Vec<_>>(), lane)?;
        return Ok(Spent { reading: began.elapsed(), copying: Duration::ZERO });
    }
    let region = match scratch {
        Some(region) => region,
        None => scratch.insert(Region::reserve(to_usize(plan.block_bytes()) + SLOT_SLACK)?),
    };
    let start = object.read_to_slot(block.range.clone(), region.window(), lane)?;
    let reading = began.elapsed();
    // SAFETY: the store filled these bytes of the scratch region.
    let bytes = unsafe { std::slice::from_raw_parts(region.as_ptr().add(start), len) };
    for segment in segments {
        let (piece, target) = (to_usize(segment.len), destinations.of(segment));
        for i in 0..segment.count {
            let at = to_usize(segment.src + i * segment.stride - block.range.start);
            // SAFETY: this piece's own span of an attached destination.
            let mut window = unsafe { Window::from_raw(pointer(target + i * segment.len), piece) };
            window.write(0, &bytes[at..at + piece]);
        }
    }
    Ok(Spent { reading, copying: began.elapsed().saturating_sub(reading) })
}

/// Reads a block to `slot` and enqueues the copies to its destinations in device memory.
///
/// The slot must be kept until a later mark of `stream` is done, even after an error. `pieces` is room for the list of
/// copies, kept by the caller so that it is not made anew for every block.
#[allow(clippy::too_many_arguments)]
pub(super) fn to_device(
    plan: &Plan,
    block: &Block,
    object: &dyn Object,
    destinations: &Destinations,
    lane: &mut Lane,
    slot: &mut Slot,
    stream: &mut dyn CopyStream,
    pieces: &mut Vec<Piece>,
) -> Result<Spent> {
    let began = Instant::now();
    let start = object.read_to_slot(block.range.clone(), slot.window(), lane)?;
    let reading = began.elapsed();
    // SAFETY: the store filled the block's bytes from `start` on.
    let base = unsafe { slot.as_ptr().add(start) };
    pieces.clear();
    for segment in plan.segments(block) {
        let at = to_usize(segment.src - block.range.start);
        // SAFETY: segments lie in their block, which was read to the slot.
        let source = unsafe { base.add(at) };
        let piece = to_usize(segment.len);
        for i in 1..to_usize(segment.count) {
            // Pieces are packed where they lie, so that they need one copy. The stride is at least the length, so a
            // piece moves towards the front only, over bytes that were packed before or that no one asked for.
            // SAFETY: both ends lie in the segment's part of the slot; `copy` allows them to overlap.
            unsafe { std::ptr::copy(source.add(i * to_usize(segment.stride)), source.add(i * piece), piece) };
        }
        pieces.push(Piece { destination: destinations.of(segment), source, len: to_usize(segment.bytes()) });
    }
    // SAFETY: the slot stays until a later mark is done, as this function's caller promises; destinations are the
    // segments' own spans of attached ones.
    unsafe { stream.copy(pieces)? };
    Ok(Spent { reading, copying: began.elapsed().saturating_sub(reading) })
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
