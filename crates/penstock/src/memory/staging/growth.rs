//! How an arena grows: how far it may, what a chunk costs it, and when it looks at the memory that is left.

use super::chunk::{AddressRange, BufferAddress, Chunk, ChunkRange, RangeAllocator};
use super::lease::LeaseLimits;
use super::pool::State;
use super::{Arena, lock};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::headroom::Headroom;

/// Buffers that a load may have however little memory there is: one is filled while the other is copied.
const MINIMUM: usize = 2;
/// One part in this many of what could be spared is the arena's at most.
const SHARE: u64 = 4;
/// Memory is tight when threads wait for it this share of the time, in per cent.
const TIGHT: f64 = 10.0;
/// Bytes that are made between two looks at what there is to spare.
pub(super) const LOOK_EVERY: usize = 32 << 20;

impl Arena {
    /// How many buffers may be made in one piece now.
    pub(super) fn room(&self, state: &State, limits: &LeaseLimits) -> usize {
        let useful = limits.budget.min(state.wanted);
        let affordable = state.ceiling.max(MINIMUM);
        if state.buffers >= affordable && affordable < useful {
            let mib = |buffers: usize| (buffers * self.buffer_bytes) as f64 / f64::from(1 << 20);
            limits.cut(|| {
                format!(
                    "staging memory was held to {:.1} MiB of the {:.1} MiB that this load could use: {}",
                    mib(state.buffers),
                    mib(useful),
                    state.bound
                )
            });
        }
        useful.min(affordable).saturating_sub(state.buffers).min(self.chunk_buffers)
    }

    /// Where the next `buffers` buffers are to lie. All that the loads that run can use are reserved at once.
    fn range(&self, state: &mut State, buffers: usize, limits: &LeaseLimits) -> Result<ChunkRange> {
        if let Some(range) = state.ranges.as_mut().and_then(|ranges| ranges.take(buffers)) {
            return Ok(range);
        }
        let useful = limits.budget.min(state.wanted).saturating_sub(state.buffers - buffers).max(buffers);
        let reserve = |buffers| AddressRange::reserve(&self.spec, buffers, self.buffer_bytes);
        // Where addresses are limited, as many as must be.
        let mut ranges = RangeAllocator::of(reserve(useful).or_else(|_| reserve(buffers))?);
        let range = ranges.take(buffers);
        state.ranges = Some(ranges);
        range.ok_or_else(|| Error::new(ErrorKind::Memory, "no staging memory was asked for"))
    }

    /// Touching and registering take milliseconds, so this is called without the lock.
    pub(super) fn grow(&self, growth: Growth<'_>, limits: &LeaseLimits) -> Result<Option<BufferAddress>> {
        let range = self.range(&mut lock(&self.state), growth.buffers, limits);
        match range.and_then(|range| Chunk::make(&self.spec, range, limits.refusal())) {
            Ok(chunk) => {
                if let Some(because) = chunk.unpinned_because() {
                    limits.refuse(because);
                }
                let mut state = lock(&self.state);
                state.free.extend(chunk.addresses());
                state.chunks.push(chunk);
                let first = state.free.pop();
                state.taken += usize::from(first.is_some());
                growth.end(&mut state);
                Ok(first)
            }
            Err(error) => {
                drop(growth);
                let mut state = lock(&self.state);
                if state.buffers == 0 {
                    return Err(error);
                }
                // The buffers that there are will do.
                state.ceiling = state.buffers;
                state.bound = error.to_string();
                let _ = self.room(&state, limits);
                Ok(None)
            }
        }
    }

    /// Looks how much memory there is; whether there is enough for the buffers that exist and are being made.
    pub(super) fn look(&self) -> bool {
        let headroom = (self.watch)();
        let mut state = lock(&self.state);
        state.unlooked = 0;
        state.ceiling = usize::MAX;
        if let Some(headroom) = headroom {
            let held = ((state.buffers - state.allocating) * self.buffer_bytes) as u64;
            let buffers = share(&headroom, held) / self.buffer_bytes as u64;
            state.ceiling = usize::try_from(buffers).unwrap_or(usize::MAX);
            let mib = headroom.bytes as f64 / f64::from(1 << 20);
            state.bound = format!("{mib:.0} MiB were left {}", headroom.bound);
        }
        state.buffers <= state.ceiling.max(MINIMUM)
    }

    pub(super) fn is_tight(&self) -> bool {
        let held = (lock(&self.state).buffers * self.buffer_bytes) as u64;
        (self.watch)().is_some_and(|headroom| held > share(&headroom, held) || headroom.pressure >= TIGHT)
    }
}

/// The arena's share of what could be spared if it held nothing.
fn share(headroom: &Headroom, held: u64) -> u64 {
    headroom.bytes.saturating_add(held) / SHARE
}

/// Buffers being made: counted from the decision to its end, however that comes.
pub(super) struct Growth<'a> {
    arena: &'a Arena,
    buffers: usize,
    ended: bool,
}

impl<'a> Growth<'a> {
    pub(super) fn begin(arena: &'a Arena, state: &mut State, buffers: usize) -> Self {
        state.buffers += buffers;
        state.allocating += buffers;
        state.allocators += 1;
        Self { arena, buffers, ended: false }
    }

    /// The buffers exist.
    fn end(mut self, state: &mut State) {
        self.finish(state);
    }

    fn finish(&mut self, state: &mut State) {
        self.ended = true;
        state.allocating -= self.buffers;
        state.allocators -= 1;
        state.ended += 1;
        self.arena.changed.notify_all();
    }
}

impl Drop for Growth<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let arena = self.arena;
            let mut state = lock(&arena.state);
            state.buffers -= self.buffers;
            self.finish(&mut state);
        }
    }
}
