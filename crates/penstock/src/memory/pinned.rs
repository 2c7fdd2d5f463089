//! Bytes that lie in pinned host memory already: what a model pool, or a cache that processes of a node share, offers a
//! load in place of a read.
//!
//! Promises that the bytes can be read for as long as a span exists. Knows neither who pinned them nor what they are.

use std::any::Any;
use std::sync::Arc;

/// A span of pinned host memory that nobody writes to, kept by its owner.
#[derive(Clone)]
pub struct PinnedSpan {
    start: *const u8,
    len: usize,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the memory is only read, and whoever made the span has promised that it stays, whatever thread drops it.
unsafe impl Send for PinnedSpan {}
// SAFETY: as above.
unsafe impl Sync for PinnedSpan {}

impl PinnedSpan {
    /// `len` bytes from `start` on, which `owner` keeps.
    ///
    /// # Safety
    /// The bytes must be initialised, registered with the device that loads copy them to, and neither written to nor
    /// freed as long as `owner` lives.
    pub unsafe fn new(start: *const u8, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { start, len, _owner: owner }
    }

    /// Where it begins.
    pub fn as_ptr(&self) -> *const u8 {
        self.start
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: whoever made the span has promised that these bytes can be read and do not change while it exists.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// Its length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "an empty range is never asked for")]
    pub fn len(&self) -> usize {
        self.len
    }
}
