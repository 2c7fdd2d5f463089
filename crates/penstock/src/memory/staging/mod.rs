//! The staging arena: buffers on the way to a device, taken by readers, given back, kept for the next load.
//!
//! * `lease`: what one load has of an arena: its budget, the buffers it can use at most, what it has to report.
//! * `pool`: the buffers of one size: which are free, how many there are and may be, when they go.
//! * `buffer`: the memory of one, touched and registered (pinned) in one piece.
//! * `process`: the arenas of the process, by buffer size and kind of device.
//!
//! **Growth.** Addresses are reserved for all that the running loads can use. Memory grows a buffer at a time: a reader
//! that finds no free one makes one for itself, outside of any lock, so several grow the arena in parallel and no copy
//! ever spans two registrations. Buffers come back on drop; a later load finds them all.
//!
//! **Bounds.** An arena grows as long as it has fewer buffers than the loads that run can use together, than the budget
//! of the load that asks, and than a quarter of what could be spared if the arena held nothing (the machine's
//! available memory, or a control group's limit where that is tighter) when the latest load began that needs more. A
//! quarter, because the same memory is wanted for the tensors, for the page cache that reads go through, and by the
//! other processes of the node: eight ranks that start one after the other take a quarter of what is left each time, and
//! never the whole. With the usual budget this is felt below 2 GiB. Against it stands what a load needs to move at all:
//! two buffers, one being filled while the other is copied, or one where the budget says so.
//!
//! **Giving back.** Buffers stay when a load ends, since registering them is the costly part. Those that no reader holds
//! go when the last load ends while the arena holds more than its quarter, when they could not be pinned (so that the next
//! load tries again), when another kind of load needs the budget, and on request.
//!
//! **After `fork`** a child starts with no arena. It inherits neither the memory (the kernel leaves it out) nor any
//! lock; what it may still hold of its parent's arenas does nothing when dropped.
//!
//! The arena does not know what a device is: [`Pinning`] is its caller's.

mod buffer;
mod lease;
mod pool;
mod process;
#[cfg(test)]
mod tests;

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::Result;

pub use lease::{Lease, StagingBuffer};
pub use pool::Arena;

/// How memory is made known to a device, so that copies from it are asynchronous and fast.
pub trait Pinning: Send + Sync {
    /// Which kind of device; arenas are shared by loads to devices of one kind.
    fn family(&self) -> &'static str;

    /// Registers `len` bytes at `ptr`.
    ///
    /// # Safety
    /// The memory must stay mapped until it is unregistered.
    ///
    /// # Errors
    /// `Memory` or `Device` where the driver or a limit refuses; the arena then uses the memory as it is.
    unsafe fn register(&self, ptr: *mut u8, len: usize) -> Result<()>;

    /// Undoes [`Pinning::register`]. Failures are ignored: there is nothing left to do about them.
    ///
    /// # Safety
    /// `ptr` must be registered, with no copy in flight.
    unsafe fn unregister(&self, ptr: *mut u8);
}

/// What an arena holds at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ArenaUse {
    /// Bytes of buffers that exist.
    pub bytes: usize,
    /// Buffers that readers hold.
    pub buffers_taken: usize,
    /// Buffers that exist.
    pub buffers: usize,
    /// Why some of the memory is not pinned although a device asked for it.
    pub unpinned_because: Option<String>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while the lock was held leaves counts that are still true: every update is a single step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
