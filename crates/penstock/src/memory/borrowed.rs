//! Bytes of the caller's memory that are to be read: tensors that are saved.
//!
//! Promises nothing by itself: whoever makes one says that the memory stays. Knows no tensor.

/// Memory of someone else that can be read as long as this exists.
#[derive(Debug)]
pub struct HostBytes {
    start: *const u8,
    len: usize,
}

// SAFETY: the memory is only read, and whoever made this has promised that it stays, whatever thread reads it.
unsafe impl Send for HostBytes {}
// SAFETY: as above.
unsafe impl Sync for HostBytes {}

impl HostBytes {
    /// `len` bytes from `start` on.
    ///
    /// # Safety
    /// The bytes must be mapped and initialised, and neither written to nor freed as long as this exists.
    pub unsafe fn new(start: *const u8, len: usize) -> Self {
        Self { start, len }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: whoever made this has promised that these bytes can be read and do not change while it exists.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}
