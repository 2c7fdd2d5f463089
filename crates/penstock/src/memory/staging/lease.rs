//! What one load has of an arena, and the buffers that its readers hold.

use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::buffer::Buffer;
use super::pool::State;
use super::{Arena, ArenaUse, Pinning, lock, process};
use crate::error::Result;
use crate::memory::Window;

/// Buffers that a load may have however little memory there is: one is filled while the other is copied.
const MINIMUM: usize = 2;

/// One load's use of an arena. It ends when the last of it is dropped, which must come after that of its buffers.
pub struct Lease {
    arena: Arc<Arena>,
    /// Buffers that the arena may have for this load to make more.
    budget: usize,
    /// Buffers that this load can use at once.
    wanted: usize,
    /// That memory was short, the first time.
    cut: OnceLock<String>,
}

impl Lease {
    /// Begins a load with buffers of `buffer_bytes` (rounded up to whole pages), of which it can use `wanted` at once, from
    /// an arena of the process that may grow to `budget` bytes. A lower budget or a lower want still gives one buffer.
    pub fn begin(buffer_bytes: usize, budget: usize, wanted: usize, pinning: Arc<dyn Pinning>) -> Self {
        let lease = Self::of(process::arena(buffer_bytes, pinning), budget, wanted);
        let most = lease.wanted.min(lease.budget) * lease.arena.buffer_bytes;
        process::make_room(&lease.arena, budget.saturating_sub(most));
        lease
    }

    pub(super) fn of(arena: Arc<Arena>, budget: usize, wanted: usize) -> Self {
        // With less than one buffer nothing would ever move.
        let (budget, wanted) = ((budget / arena.buffer_bytes).max(1), wanted.max(1));
        arena.join(budget, wanted);
        Self { arena, budget, wanted, cut: OnceLock::new() }
    }

    /// A buffer, if one is free or one more may be made, which takes milliseconds.
    ///
    /// # Errors
    /// `Memory` where the operating system refuses the arena's first memory; later it gets by with what there is.
    pub fn try_acquire(&self) -> Result<Option<StagingBuffer>> {
        let mut state = lock(&self.arena.state);
        let free = state.free.pop();
        let useful = self.budget.min(state.wanted);
        if free.is_none() && !self.may_grow(&state, useful) {
            return Ok(None);
        }
        if let Some(buffer) = free {
            state.taken += 1;
            return Ok(Some(self.hold(buffer)));
        }
        self.arena.make(state, useful).map(|buffer| Some(self.hold(buffer))).or_else(|error| {
            let mut state = lock(&self.arena.state);
            if state.buffers == 0 {
                return Err(error);
            }
            state.ceiling = state.buffers;
            state.bound = error.to_string();
            self.may_grow(&state, useful);
            Ok(None)
        })
    }

    /// Whether one more buffer may be made, where the loads that run can use `useful` ones. Notes it where memory is short.
    fn may_grow(&self, state: &State, useful: usize) -> bool {
        let affordable = state.ceiling.max(MINIMUM);
        if affordable <= state.buffers && state.buffers < useful {
            let mib = |buffers: usize| (buffers * self.arena.buffer_bytes) as f64 / f64::from(1 << 20);
            self.cut.get_or_init(|| {
                format!(
                    "staging memory was held to {:.1} MiB of the {:.1} MiB that this load could use: {}",
                    mib(state.buffers),
                    mib(useful),
                    state.bound
                )
            });
        }
        state.buffers < useful.min(affordable)
    }

    fn hold(&self, buffer: Buffer) -> StagingBuffer {
        StagingBuffer { buffer: ManuallyDrop::new(buffer), arena: Arc::clone(&self.arena) }
    }

    /// Waits at most `timeout` for a buffer to be given back. Whether one was is for [`Lease::try_acquire`] to say.
    pub fn wait(&self, timeout: Duration) {
        self.arena.wait(timeout);
    }

    /// What the arena holds, for this load and others.
    pub fn usage(&self) -> ArenaUse {
        self.arena.usage()
    }

    /// What the load's owner should know: memory that was short, memory that could not be pinned.
    pub fn notes(&self) -> Vec<String> {
        let unpinned = self.usage().unpinned_because;
        let unpinned = unpinned.map(|because| format!("staging memory is not pinned: {because}"));
        self.cut.get().cloned().into_iter().chain(unpinned).collect()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.arena.is_ours() {
            self.arena.leave(self.wanted);
        }
    }
}

/// One piece of staging memory, held by one reader; given back on drop.
pub struct StagingBuffer {
    buffer: ManuallyDrop<Buffer>,
    arena: Arc<Arena>,
}

impl StagingBuffer {
    /// Where it begins: page-aligned.
    pub fn as_ptr(&self) -> *mut u8 {
        self.buffer.as_ptr()
    }

    /// Bytes in it.
    pub fn len(&self) -> usize {
        self.arena.buffer_bytes
    }

    /// Whether it holds no bytes: never.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// All of it, to be filled.
    pub fn window(&mut self) -> Window<'_> {
        // SAFETY: the buffer owns these bytes of the arena until it is dropped, and `&mut self` is exclusive. (In a
        // forked child there is no such memory; a child has no load to fill a buffer for.)
        unsafe { Window::from_raw(self.as_ptr(), self.len()) }
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        // In a child it is left alone: neither the memory nor the registration is the child's.
        if self.arena.is_ours() {
            // SAFETY: taken here and nowhere else, and not used afterwards.
            self.arena.put(unsafe { ManuallyDrop::take(&mut self.buffer) });
        }
    }
}
