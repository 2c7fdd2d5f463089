//! The buffers of one size and kind: which are free, how many there are and may be, when they go. See the module's essay.

use std::mem::{self, ManuallyDrop};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::buffer::Buffer;
use super::{ArenaUse, Pinning, lock};
use crate::error::Result;
use crate::memory::Region;
use crate::memory::fork::Owner;
use crate::memory::headroom::Headroom;

/// One part in this many of what could be spared is the arena's at most.
const SHARE: u64 = 4;
/// Looks how much memory there is to spare.
pub(super) type Watch = Box<dyn Fn() -> Option<Headroom> + Send + Sync>;

/// Staging buffers of one size, shared by all loads of the process that use that size and kind of device.
pub struct Arena {
    pub(super) buffer_bytes: usize,
    pinning: Arc<dyn Pinning>,
    watch: Watch,
    owner: Owner,
    pub(super) state: Mutex<State>,
    /// A buffer was given back.
    changed: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    /// Most recently used last: its lines are likeliest still in the processor's cache.
    pub(super) free: Vec<Buffer>,
    /// Buffers that readers hold or make.
    pub(super) taken: usize,
    /// Buffers whose memory exists, is being made or is being given back.
    pub(super) buffers: usize,
    /// Where the next buffers will lie: addresses, and how many bytes of them were given out. Reserving, and saying how
    /// pages shall be made, keeps every other thread of the process from making pages meanwhile. Twelve readers that each
    /// reserved their own had the last buffer after 21 ms, in one reservation after 5. Unmapped with the last buffer on it.
    addresses: Option<(Arc<Region>, usize)>,
    /// Loads that run, and the buffers that they can use together.
    leases: usize,
    pub(super) wanted: usize,
    /// Buffers that there is memory for, as of the last look, and what bounds them.
    pub(super) ceiling: usize,
    pub(super) bound: String,
    /// Why memory could not be pinned: then it is not tried again while loads run.
    pub(super) unpinned_because: Option<String>,
}

impl Arena {
    pub(super) fn new(buffer_bytes: usize, pinning: Arc<dyn Pinning>, watch: Watch) -> Self {
        Self {
            buffer_bytes,
            pinning,
            watch,
            owner: Owner::current(),
            state: Mutex::new(State { ceiling: usize::MAX, ..State::default() }),
            changed: Condvar::new(),
        }
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
            unpinned_because: state.unpinned_because.clone(),
        }
    }

    /// Whether no load uses it.
    pub(super) fn is_idle(&self) -> bool {
        lock(&self.state).leases == 0
    }

    /// A load begins that can use `wanted` buffers and makes more up to `budget`.
    pub(super) fn join(&self, budget: usize, wanted: usize) {
        let mut state = lock(&self.state);
        let alone = state.leases == 0;
        state.leases += 1;
        state.wanted += wanted;
        let will_grow = state.buffers < budget.min(state.wanted);
        drop(state);
        if alone {
            // What an earlier load with a larger budget left.
            self.give_back(budget, |_| true);
        }
        if will_grow && let Some(headroom) = (self.watch)() {
            let mut state = lock(&self.state);
            let buffers = self.share(&headroom, state.buffers) / self.buffer_bytes as u64;
            state.ceiling = usize::try_from(buffers).unwrap_or(usize::MAX);
            let mib = headroom.bytes as f64 / f64::from(1 << 20);
            state.bound = format!("{mib:.0} MiB were left {}", headroom.bound);
        }
    }

    /// A load has ended, with all of its buffers given back.
    pub(super) fn leave(&self, wanted: usize) {
        let mut state = lock(&self.state);
        state.leases -= 1;
        state.wanted -= wanted;
        let (last, held) = (state.leases == 0, state.buffers);
        if last {
            state.unpinned_because = None;
        }
        drop(state);
        // Memory that could not be pinned has little worth; without it, the next load tries again.
        self.give_back(0, |buffer| !buffer.is_pinned());
        let is_tight = || {
            let most = (self.watch)().map(|headroom| self.share(&headroom, held));
            most.is_some_and(|most| (held * self.buffer_bytes) as u64 > most)
        };
        if last && held > 0 && is_tight() {
            let bytes = self.give_back(0, |_| true);
            tracing::debug!(bytes, "memory is tight: staging memory was given back");
        }
    }

    /// The arena's share, in bytes, of what could be spared if it did not hold its `buffers`.
    fn share(&self, headroom: &Headroom, buffers: usize) -> u64 {
        headroom.bytes.saturating_add((buffers * self.buffer_bytes) as u64) / SHARE
    }

    /// Makes a buffer, of which there may be `most` now, for a reader.
    ///
    /// # Errors
    /// `Memory` where the operating system refuses.
    pub(super) fn make(&self, mut state: MutexGuard<'_, State>, most: usize) -> Result<Buffer> {
        let place = self.place(&mut state, most);
        state.buffers += 1;
        state.taken += 1;
        let pinning = state.unpinned_because.is_none().then_some(&self.pinning);
        // Touching and registering take milliseconds, so without the lock.
        drop(state);
        let made = Counted(self);
        let (addresses, start) = place?;
        let (buffer, refused) = Buffer::make(addresses, start, self.buffer_bytes, pinning)?;
        if let Some(because) = refused {
            tracing::warn!(because, "staging memory could not be pinned; copies will be slower");
            lock(&self.state).unpinned_because.get_or_insert(because);
        }
        let _ = ManuallyDrop::new(made);
        Ok(buffer)
    }

    /// Where the next buffer is to lie. Addresses for all `most` that there may be are reserved at once.
    fn place(&self, state: &mut State, most: usize) -> Result<(Arc<Region>, usize)> {
        if let Some((addresses, given)) = &mut state.addresses
            && addresses.len() - *given >= self.buffer_bytes
        {
            *given += self.buffer_bytes;
            return Ok((Arc::clone(addresses), *given - self.buffer_bytes));
        }
        let more = most.saturating_sub(state.buffers).max(1);
        let addresses = Arc::new(Region::reserve(more.saturating_mul(self.buffer_bytes))?);
        if !addresses.keep_from_children() {
            tracing::debug!("staging memory cannot be left out of forked children");
        }
        state.addresses = Some((Arc::clone(&addresses), self.buffer_bytes));
        Ok((addresses, 0))
    }

    /// Waits at most `timeout` for a buffer to be given back.
    pub(super) fn wait(&self, timeout: Duration) {
        let state = lock(&self.state);
        if state.free.is_empty() {
            drop(self.changed.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Takes a buffer back.
    pub(super) fn put(&self, buffer: Buffer) {
        let mut state = lock(&self.state);
        state.taken -= 1;
        state.free.push(buffer);
        drop(state);
        self.changed.notify_one();
    }

    /// Frees buffers that `may_go` and that no reader holds until `keep` are left; returns the bytes given back.
    pub(super) fn give_back(&self, keep: usize, may_go: impl Fn(&Buffer) -> bool) -> usize {
        let mut state = lock(&self.state);
        let most = state.buffers.saturating_sub(keep);
        let going: Vec<_> = state.free.extract_if(.., |buffer| may_go(buffer)).take(most).collect();
        drop(state);
        let gone = going.len();
        // Unregistering takes milliseconds, so without the lock; only then is there room for others.
        drop(going);
        let mut state = lock(&self.state);
        state.buffers -= gone;
        let unused = if state.buffers == 0 { state.addresses.take() } else { None };
        drop(state);
        drop(unused);
        gone * self.buffer_bytes
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if !self.is_ours() {
            // A child: what was registered is its parent's, and the addresses may be used for something else by now.
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            let _ = ManuallyDrop::new((mem::take(&mut state.free), state.addresses.take()));
        }
    }
}

/// A buffer that is counted, but not made yet. Where it is not made, it is counted no more, even if a driver panics.
struct Counted<'a>(&'a Arena);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.buffers -= 1;
        state.taken -= 1;
    }
}
