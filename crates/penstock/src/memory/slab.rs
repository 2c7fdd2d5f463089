//! The final home of host tensors: one reservation per load, laid out as the files are.
//!
//! Tensors that lie next to each other in a file lie next to each other here, at addresses that equal their file
//! offsets modulo [`HUGE_PAGE`](super::HUGE_PAGE). So a block is one read whatever tensors it holds, an O_DIRECT read
//! goes straight to its final place, and no two readers fault the same huge page.
//!
//! Each tensor is still its own: a [`HostTensor`] gives its pages back when it is dropped (neighbours share at most
//! the page at their border, which goes when the last of the slab goes). Only pages that are touched exist, so the
//! reservation of a load that keeps few tensors costs address space, not memory.

use std::sync::Arc;

use super::{Region, Window};
use crate::error::Result;

/// Memory for all host tensors of one load.
#[derive(Debug)]
pub struct HostSlab {
    region: Region,
}

impl HostSlab {
    /// Reserves `len` bytes; nothing is touched yet.
    ///
    /// # Errors
    /// `Memory` where the reservation is refused.
    pub fn reserve(len: usize) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { region: Region::reserve(len)? }))
    }

    /// Hands out the `len` bytes from `start` as one tensor's memory.
    ///
    /// # Safety
    /// No other tensor of this slab may be given any of these bytes.
    ///
    /// # Panics
    /// Where the span does not lie in the slab: a bug of the layout.
    pub unsafe fn tensor(self: &Arc<Self>, start: usize, len: usize) -> HostTensor {
        assert!(
            start.checked_add(len).is_some_and(|end| end <= self.region.len()),
            "tensor outside of its slab"
        );
        HostTensor { slab: Arc::clone(self), start, len }
    }

    /// The address of its first byte.
    pub fn address(&self) -> u64 {
        self.region.as_ptr() as usize as u64
    }
}

/// The memory of one tensor in a [`HostSlab`]: owned, writable, freed on drop.
#[derive(Debug)]
pub struct HostTensor {
    slab: Arc<HostSlab>,
    start: usize,
    len: usize,
}

impl HostTensor {
    /// Where it begins.
    pub fn as_ptr(&self) -> *mut u8 {
        // SAFETY: `start` lies in the region, as checked when the tensor was handed out.
        unsafe { self.slab.region.as_ptr().add(self.start) }
    }

    /// Its bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of it, to be filled.
    pub fn window(&mut self) -> Window<'_> {
        // SAFETY: these bytes belong to this tensor alone, and `&mut self` makes the window exclusive.
        unsafe { Window::from_raw(self.as_ptr(), self.len) }
    }
}

impl Drop for HostTensor {
    fn drop(&mut self) {
        // SAFETY: the pages wholly inside this tensor belong to it alone, and it is going away.
        unsafe { self.slab.region.release_pages(self.start, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PAGE;

    /// Resident bytes of a span, by asking the kernel which of its pages exist.
    fn resident(ptr: *mut u8, len: usize) -> usize {
        let mut pages = vec![0u8; len.div_ceil(PAGE)];
        // SAFETY: the span is mapped by the slab under test and `pages` has one byte for each of its pages.
        let rc = unsafe { libc::mincore(ptr.cast(), len, pages.as_mut_ptr()) };
        assert_eq!(rc, 0);
        pages.iter().filter(|p| *p & 1 == 1).count() * PAGE
    }

    #[test]
    fn dropping_a_tensor_frees_its_memory_while_its_neighbours_stay() {
        let slab = HostSlab::reserve(64 * PAGE).unwrap();
        // SAFETY: the two spans do not overlap.
        let (mut a, mut b) = unsafe { (slab.tensor(0, 32 * PAGE), slab.tensor(32 * PAGE, 32 * PAGE)) };
        a.window().write(0, &vec![1; 32 * PAGE]);
        b.window().write(0, &vec![2; 32 * PAGE]);
        let (a_ptr, b_ptr) = (a.as_ptr(), b.as_ptr());
        assert_eq!(resident(a_ptr, 64 * PAGE), 64 * PAGE);
        drop(a);
        assert_eq!((resident(a_ptr, 32 * PAGE), resident(b_ptr, 32 * PAGE)), (0, 32 * PAGE));
        let filled = b.window();
        // SAFETY: `b` was written in full above.
        assert!(unsafe { filled.assume_filled(0, 32 * PAGE) }.iter().all(|byte| *byte == 2));
    }
}
