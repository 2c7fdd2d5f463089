//! The buffers of one size and kind: which are free, who holds them, when they go. See the module's essay.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::chunk::{ArenaSpec, BufferAddress, Chunk, RangeAllocator};
use super::growth::{Growth, LOOK_EVERY};
use super::lease::LeaseLimits;
use super::{ArenaUse, lock};
use crate::error::Result;
use crate::memory::fork::Owner;
use crate::memory::headroom::Headroom;

/// Bytes of a chunk, rounded up to whole buffers: registering has a price per call, and a reader waits this long.
const CHUNK_BYTES: usize = 8 << 20;
/// Looks how much memory there is to spare.
pub(super) type Watch = Box<dyn Fn() -> Option<Headroom> + Send + Sync>;

/// Staging buffers of one size, shared by all loads of the process that use that size and kind of device.
pub struct Arena {
    pub(super) buffer_bytes: usize,
    pub(super) chunk_buffers: usize,
    pub(super) spec: ArenaSpec,
    pub(super) watch: Watch,
    owner: Owner,
    pub(super) state: Mutex<State>,
    /// A buffer was given back, or the making of a chunk has ended.
    pub(super) changed: Condvar,
}

pub(super) struct State {
    pub(super) chunks: Vec<Chunk>,
    /// Where the next chunks will lie.
    pub(super) ranges: Option<RangeAllocator>,
    /// Most recently used last: its lines are likeliest still in the processor's cache.
    pub(super) free: Vec<BufferAddress>,
    /// Buffers that readers hold.
    pub(super) taken: usize,
    /// Buffers whose memory exists, is being made or is being given back.
    pub(super) buffers: usize,
    /// Of those, the ones being made; by how many readers; and how many more readers wait for one of them.
    pub(super) allocating: usize,
    pub(super) allocators: usize,
    pub(super) waiters: usize,
    /// How often the making of a chunk has ended, well or not.
    pub(super) ended: u64,
    /// Loads that run, and the buffers that they can use together.
    pub(super) leases: usize,
    pub(super) wanted: usize,
    /// Buffers that there is memory for, as of the last look; and what bounds them.
    pub(super) ceiling: usize,
    pub(super) bound: String,
    /// Bytes made since the last look.
    pub(super) unlooked: usize,
}

impl Arena {
    pub(super) fn new(buffer_bytes: usize, spec: ArenaSpec, watch: Watch) -> Self {
        Self {
            buffer_bytes,
            chunk_buffers: CHUNK_BYTES.div_ceil(buffer_bytes),
            spec,
            watch,
            owner: Owner::current(),
            state: Mutex::new(State {
                chunks: Vec::new(),
                ranges: None,
                free: Vec::new(),
                taken: 0,
                buffers: 0,
                allocating: 0,
                allocators: 0,
                waiters: 0,
                ended: 0,
                leases: 0,
                wanted: 0,
                ceiling: usize::MAX,
                bound: String::new(),
                unlooked: 0,
            }),
            changed: Condvar::new(),
        }
    }

    #[cfg(test)]
    pub(super) fn with_chunks_of(mut self, buffers: usize) -> Self {
        self.chunk_buffers = buffers;
        self
    }

    /// How many readers are making chunks, and how many wait for one of their buffers.
    #[cfg(test)]
    pub(super) fn growing(&self) -> (usize, usize) {
        let state = lock(&self.state);
        (state.allocators, state.waiters)
    }

    /// Holds the arena's lock, as a thread does that a forked child will not have.
    #[cfg(test)]
    pub(super) fn hold(&self) -> impl Drop {
        lock(&self.state)
    }

    pub(super) fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }

    /// Whether this is the process that the arena belongs to. In a child, its lock may be held by a thread that the
    /// child does not have.
    pub(super) fn is_ours(&self) -> bool {
        self.owner.is_current()
    }

    /// What this arena holds.
    pub fn usage(&self) -> ArenaUse {
        let state = lock(&self.state);
        ArenaUse {
            bytes: state.buffers * self.buffer_bytes,
            buffers_taken: state.taken,
            buffers: state.buffers,
            unpinned_because: state
                .chunks
                .iter()
                .find_map(|chunk| chunk.unpinned_because().map(str::to_owned)),
        }
    }

    /// Whether no load uses it.
    pub(super) fn is_idle(&self) -> bool {
        lock(&self.state).leases == 0
    }

    /// A load begins that can use `limits.wanted` buffers.
    pub(super) fn join(&self, limits: &LeaseLimits) {
        let mut state = lock(&self.state);
        let alone = state.leases == 0;
        state.leases += 1;
        state.wanted += limits.wanted;
        // Before it grows, it looks; if it will not grow as far as can be seen, then not yet.
        let will_grow = state.buffers < limits.budget.min(state.wanted);
        state.unlooked = LOOK_EVERY;
        drop(state);
        if alone {
            // What an earlier load with a larger budget left.
            self.give_back(limits.budget, |_| true);
        }
        if will_grow {
            self.look();
        }
    }

    /// A load has ended, with all of its buffers given back.
    pub(super) fn leave(&self, limits: &LeaseLimits) {
        let mut state = lock(&self.state);
        state.leases -= 1;
        state.wanted -= limits.wanted;
        let (last, held) = (state.leases == 0, state.buffers);
        drop(state);
        // Memory that could not be pinned has little worth; without it, the next load tries again.
        self.give_back(0, |chunk| chunk.unpinned_because().is_some());
        if last && held > 0 && self.is_tight() {
            let bytes = self.give_back(0, |_| true);
            tracing::debug!(bytes, "memory is tight: staging memory was given back");
        }
    }

    /// A buffer, if one is free or may be made. Waits for one that is being made and has no taker yet.
    ///
    /// # Errors
    /// `Memory` where the operating system refuses the arena's first memory; later it gets by with what there is.
    pub(super) fn acquire(&self, limits: &LeaseLimits) -> Result<Option<BufferAddress>> {
        let mut state = lock(&self.state);
        loop {
            if let Some(address) = state.free.pop() {
                state.taken += 1;
                return Ok(Some(address));
            }
            if state.allocating > state.allocators + state.waiters {
                let ended = state.ended;
                state.waiters += 1;
                let waiting = |state: &mut State| state.free.is_empty() && state.ended == ended;
                state = self.changed.wait_while(state, waiting).unwrap_or_else(PoisonError::into_inner);
                state.waiters -= 1;
                continue;
            }
            let buffers = self.room(&state, limits);
            if buffers == 0 {
                return Ok(None);
            }
            state.unlooked += buffers * self.buffer_bytes;
            let look = state.unlooked > LOOK_EVERY;
            let growth = Growth::begin(self, &mut state, buffers);
            drop(state);
            if look && !self.look() {
                drop(growth);
                state = lock(&self.state);
                continue;
            }
            return self.grow(growth, limits);
        }
    }

    /// Waits at most `timeout` for a buffer to be given back. Whether one was is for [`Arena::acquire`] to say.
    pub(super) fn wait(&self, timeout: Duration) {
        let state = lock(&self.state);
        if state.free.is_empty() {
            drop(self.changed.wait_timeout(state, timeout));
        }
    }

    /// Takes a buffer back.
    pub(super) fn put(&self, address: BufferAddress) {
        let mut state = lock(&self.state);
        state.taken -= 1;
        state.free.push(address);
        drop(state);
        self.changed.notify_one();
    }

    /// Frees chunks that `may_go` and that no reader holds a buffer of, the newest first, until `keep` buffers are left;
    /// returns the bytes given back.
    pub(super) fn give_back(&self, keep: usize, may_go: impl Fn(&Chunk) -> bool) -> usize {
        let mut state = lock(&self.state);
        let State { chunks, free, .. } = &mut *state;
        let mut buffers: usize = chunks.iter().map(Chunk::buffers).sum();
        let mut going = Vec::new();
        for index in (0..chunks.len()).rev() {
            let chunk = &chunks[index];
            let own_free = || free.iter().filter(|buffer| chunk.holds(**buffer)).count();
            if buffers > keep && may_go(chunk) && own_free() == chunk.buffers() {
                buffers -= chunk.buffers();
                free.retain(|buffer| !chunk.holds(*buffer));
                going.push(chunks.swap_remove(index));
            }
        }
        drop(state);
        let (buffers, bytes) =
            (going.iter().map(Chunk::buffers).sum::<usize>(), going.iter().map(Chunk::bytes).sum());
        // Unregistering takes milliseconds, so without the lock; only then is there room for others.
        drop(going);
        let mut state = lock(&self.state);
        state.buffers -= buffers;
        let unused = if state.buffers == 0 { state.ranges.take() } else { None };
        drop(state);
        drop(unused);
        bytes
    }
}
