//! What one load has of an arena, and the buffers that its readers hold.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::chunk::BufferAddress;
use super::{Arena, ArenaUse, Pinning, lock, process};
use crate::error::Result;
use crate::memory::Window;

/// How many buffers a load may make, and what it was told while it made them.
pub(super) struct LeaseLimits {
    /// Buffers that the arena may have for this load to make more.
    pub(super) budget: usize,
    /// Buffers that this load can use at once.
    pub(super) wanted: usize,
    notes: Mutex<Notes>,
}

#[derive(Default)]
struct Notes {
    cut: Option<String>,
    unpinned_because: Option<String>,
}

impl LeaseLimits {
    fn new(budget: usize, wanted: usize) -> Self {
        // With less than one buffer nothing would ever move.
        Self { budget: budget.max(1), wanted: wanted.max(1), notes: Mutex::default() }
    }

    /// Notes that memory was short; the first time says it.
    pub(super) fn cut(&self, because: impl FnOnce() -> String) {
        lock(&self.notes).cut.get_or_insert_with(because);
    }

    /// Notes that memory could not be pinned, which will not be tried again in this load.
    pub(super) fn refuse(&self, because: &str) {
        lock(&self.notes).unpinned_because.get_or_insert_with(|| {
            tracing::warn!(because, "staging memory could not be pinned; copies will be slower");
            because.to_owned()
        });
    }

    pub(super) fn refusal(&self) -> Option<String> {
        lock(&self.notes).unpinned_because.clone()
    }
}

/// One load's use of an arena. It ends when the last of it is dropped, which must come after that of its buffers.
pub struct Lease {
    arena: Arc<Arena>,
    limits: LeaseLimits,
}

impl Lease {
    /// Begins a load with buffers of `buffer_bytes` (rounded up to whole pages), of which it can use `wanted` at once, from
    /// an arena of the process that may grow to `budget` bytes. A lower budget or a lower want still gives one buffer.
    pub fn begin(buffer_bytes: usize, budget: usize, wanted: usize, pinning: Arc<dyn Pinning>) -> Self {
        let arena = process::arena(buffer_bytes, pinning);
        let lease = Self::of(arena, budget, wanted);
        let most = lease.limits.wanted.min(lease.limits.budget) * lease.arena.buffer_bytes();
        process::make_room(&lease.arena, budget.saturating_sub(most));
        lease
    }

    pub(super) fn of(arena: Arc<Arena>, budget: usize, wanted: usize) -> Self {
        let limits = LeaseLimits::new(budget / arena.buffer_bytes(), wanted);
        arena.join(&limits);
        Self { arena, limits }
    }

    /// A buffer, if one is free or more may be made. May take as long as making a chunk takes.
    ///
    /// # Errors
    /// `Memory` where the operating system refuses the arena's first memory.
    pub fn try_acquire(&self) -> Result<Option<StagingBuffer>> {
        let address = self.arena.acquire(&self.limits)?;
        Ok(address.map(|address| StagingBuffer { address, arena: Arc::clone(&self.arena) }))
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
        let cut = lock(&self.limits.notes).cut.clone();
        // Another load may have made memory that this one uses.
        let unpinned = self.limits.refusal().or_else(|| self.usage().unpinned_because);
        cut.into_iter()
            .chain(unpinned.map(|because| format!("staging memory is not pinned: {because}")))
            .collect()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.arena.is_ours() {
            self.arena.leave(&self.limits);
        }
    }
}

/// One piece of staging memory, held by one reader; given back on drop.
pub struct StagingBuffer {
    address: BufferAddress,
    arena: Arc<Arena>,
}

impl StagingBuffer {
    /// Where it begins: page-aligned.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// Bytes in it.
    pub fn len(&self) -> usize {
        self.arena.buffer_bytes()
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
        if self.arena.is_ours() {
            self.arena.put(self.address);
        }
    }
}
