//! Devices that weights are copied to.
//!
//! A [`Device`] registers host memory and makes [`CopyStream`]s; a stream copies and says when its copies have ended.
//! That is all the pipeline knows, so that CUDA, and later HIP, are tables of functions behind one interface, and
//! tests can put a device of their own in place. Destinations of a load belong to the framework that asked, so that its
//! allocator owns them.
//!
//! * `cuda`: NVIDIA's. `pinned_memory`: host memory that stays registered with one.
//! * `gather`: bytes of host and device memory brought together in one buffer, for whoever writes them.
//! * `virtual_memory`: device memory at addresses that stay, for model pools; the one kind that is allocated here.
#![allow(unsafe_code)]

mod cuda;
mod gather;
mod pinned_memory;
mod virtual_memory;

use std::sync::Arc;

use crate::error::Result;
use crate::memory::Pinning;

pub use cuda::CudaDevice;
pub use gather::{DeviceBytes, Gatherer, SourceBytes, SourceDevice};
pub use pinned_memory::PinnedMemory;
pub use virtual_memory::{DEVICE_CHUNK, DeviceMemory, DeviceRange, DeviceUsage, Space};

/// A moment in the life of a stream: everything enqueued before it.
///
/// Marks belong to the stream that made them and are taken back by [`CopyStream::wait`] or by finding them done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyEvent(pub u64);

/// One copy: so many bytes from host memory to device memory.
#[derive(Debug, Clone, Copy)]
pub struct CopyRegion {
    /// The address in device memory.
    pub destination: u64,
    /// Where the bytes lie in host memory.
    pub source: *const u8,
    /// Bytes to copy.
    pub len: usize,
}

/// One copy back: so many bytes from device memory to host memory.
#[derive(Debug, Clone, Copy)]
pub struct ReadBackRegion {
    /// The address in device memory.
    pub source: u64,
    /// Where the bytes go in host memory.
    pub destination: *mut u8,
    /// Bytes to copy.
    pub len: usize,
}

/// An accelerator with memory of its own.
pub trait Device: Send + Sync {
    /// Its name in errors and statistics: `"cuda:0"`.
    fn name(&self) -> &str;

    /// How staging memory is registered with this kind of device.
    fn pinning(&self) -> Arc<dyn Pinning>;

    /// Makes the device current on the calling thread for good, as using its streams needs. For threads that belong to a
    /// load: on a thread of the program this would change the device that the program uses.
    ///
    /// # Errors
    /// `Device` where the driver refuses.
    fn bind_thread(&self) -> Result<()> {
        Ok(())
    }

    /// A stream, to be used by a thread that [`Device::bind_thread`] was called on. Leaves the calling thread as it is.
    ///
    /// # Errors
    /// `Device` where the driver refuses.
    fn stream(&self) -> Result<Box<dyn CopyStream>>;

    /// A point on the consumer's stream `handle` (0 is the default stream) that copies to memory allocated before now
    /// must not overtake: work queued there may still use that memory. Leaves the calling thread as it is.
    ///
    /// # Errors
    /// `Device` where the driver refuses.
    fn fence(&self, handle: u64) -> Result<Arc<dyn Fence>>;
}

/// A point in the consumer's work; freed on drop.
pub trait Fence: Send + Sync {
    /// The driver's handle, for the streams of the same device.
    fn handle(&self) -> u64;
}

/// A queue of copies to one device, used by one thread.
///
/// Dropping a stream waits for its copies: after that, neither sources nor destinations are in use.
pub trait CopyStream: Send {
    /// Makes later copies wait for `fence`.
    ///
    /// # Errors
    /// `Device` where the driver refuses.
    fn wait_for(&mut self, fence: &dyn Fence) -> Result<()>;

    /// Enqueues the copies of `pieces`, in any order among themselves.
    ///
    /// # Safety
    /// Sources must stay readable and unchanged, and destinations must stay allocated on this device, not overlap and
    /// not be used otherwise, until a later mark of this stream is done, also where this fails.
    ///
    /// # Errors
    /// `Device` where the driver refuses or an earlier copy failed.
    unsafe fn copy(&mut self, pieces: &[CopyRegion]) -> Result<()>;

    /// Enqueues copies from the device to host memory, in any order among themselves.
    ///
    /// # Safety
    /// Sources must stay allocated on this device and unchanged, and destinations must stay writable, not overlap and not
    /// be used otherwise, until a later mark of this stream is done, also where this fails.
    ///
    /// # Errors
    /// `Device` where the driver refuses or an earlier copy failed.
    unsafe fn read_back(&mut self, pieces: &[ReadBackRegion]) -> Result<()>;

    /// Marks the end of what was enqueued so far.
    ///
    /// # Errors
    /// `Device` where the driver refuses.
    fn mark(&mut self) -> Result<CopyEvent>;

    /// Whether everything before `mark` has ended; if so, the mark is taken back.
    ///
    /// # Errors
    /// `Device` where a copy failed.
    fn is_done(&mut self, mark: CopyEvent) -> Result<bool>;

    /// Waits until everything before `mark` has ended, and takes the mark back.
    ///
    /// # Errors
    /// `Device` where a copy failed.
    fn wait(&mut self, mark: CopyEvent) -> Result<()>;
}
