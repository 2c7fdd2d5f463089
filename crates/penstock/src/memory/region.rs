//! An owned piece of anonymous memory, taken from and given back to the operating system whole.

use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::Window;
use crate::error::{Error, ErrorKind, Result};

/// Bytes of a base page; also the alignment that satisfies every O_DIRECT device met so far.
pub const PAGE: usize = 4096;
/// Bytes of a transparent huge page on the machines Penstock is for.
pub const HUGE_PAGE: usize = 2 << 20;

/// Anonymous memory of our own: reserved at once, backed by pages when first touched, unmapped on drop.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    mapped: NonNull<u8>,
    mapped_len: usize,
}

// SAFETY: a region is plain memory owned through a unique pointer; nothing in it is tied to a thread.
unsafe impl Send for Region {}
// SAFETY: `&Region` gives out only its address and length; access to the bytes goes through unsafe code that says why.
unsafe impl Sync for Region {}

impl Region {
    /// Reserves `len` bytes (at least one page), aligned to [`HUGE_PAGE`] and backed by huge pages where the kernel
    /// allows when `len` is at least one of them, else aligned to [`PAGE`].
    ///
    /// # Errors
    /// `Memory` where the kernel refuses the reservation.
    pub fn reserve(len: usize) -> Result<Self> {
        let refused = |cause: String| {
            Error::new(ErrorKind::Memory, format!("reserving {len} bytes of host memory failed: {cause}"))
                .remedy(
                    "Check the memory limit of the process (ulimit -v, cgroup) or load fewer tensors at once",
                )
        };
        let huge = len >= HUGE_PAGE;
        let align = if huge { HUGE_PAGE } else { PAGE };
        let mapped_len = len
            .max(1)
            .checked_next_multiple_of(PAGE)
            .and_then(|n| n.checked_add(if huge { HUGE_PAGE } else { 0 }))
            .ok_or_else(|| refused("the size overflows".into()))?;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches no existing memory.
        let mapped = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                mapped_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(|errno| refused(errno.to_string()))?;
        let mapped =
            NonNull::new(mapped.cast::<u8>()).ok_or_else(|| refused("mapped at address zero".into()))?;
        let skip = mapped.as_ptr().align_offset(align);
        // SAFETY: `skip` is below HUGE_PAGE, by which the mapping is longer than `len`.
        let base = unsafe { mapped.add(skip) };
        let region = Self { base, len, mapped, mapped_len };
        if huge {
            // Huge pages are an optimisation: a kernel without them backs the region with base pages.
            // SAFETY: the span lies in the mapping just made; the advice does not change its contents.
            let _ = unsafe { madvise(region.base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        }
        Ok(region)
    }

    /// Where it begins.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of it, to be filled.
    pub fn window(&mut self) -> Window<'_> {
        // SAFETY: the region owns these bytes and `&mut self` makes the window exclusive.
        unsafe { Window::from_raw(self.base.as_ptr(), self.len) }
    }

    /// Gives the pages that lie wholly in the `len` bytes from `start` back to the operating system. The addresses
    /// stay reserved and read as zero afterwards.
    ///
    /// # Safety
    /// Nothing may rely on the contents of those pages any more.
    pub unsafe fn release_pages(&self, start: usize, len: usize) {
        let first = start.next_multiple_of(PAGE);
        let end = (start + len).min(self.len) / PAGE * PAGE;
        if first < end {
            // SAFETY: whole pages inside this private anonymous mapping, given up as the caller promises. A failure
            // only means that the pages stay until the region is dropped.
            let _ =
                unsafe { madvise(self.base.as_ptr().add(first).cast(), end - first, Advice::LinuxDontNeed) };
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `reserve`; the owner is gone, so no borrow of it is left.
        let _ = unsafe { munmap(self.mapped.as_ptr().cast(), self.mapped_len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_regions_are_page_aligned_and_large_ones_huge_page_aligned() {
        assert_eq!(Region::reserve(10).unwrap().as_ptr() as usize % PAGE, 0);
        assert_eq!(Region::reserve(5 << 20).unwrap().as_ptr() as usize % HUGE_PAGE, 0);
    }

    #[test]
    fn released_pages_read_as_zero_and_their_neighbours_stay() {
        let mut region = Region::reserve(4 * PAGE).unwrap();
        region.window().write(0, &[9; 4 * PAGE]);
        // SAFETY: only this test uses the region.
        unsafe { region.release_pages(1, 3 * PAGE) };
        // SAFETY: the whole region was written above; released pages read as zero.
        let bytes = unsafe { std::slice::from_raw_parts(region.as_ptr(), region.len()) };
        assert_eq!(
            [bytes[0], bytes[PAGE - 1], bytes[PAGE], bytes[3 * PAGE - 1], bytes[3 * PAGE]],
            [9, 9, 0, 0, 9]
        );
    }

    #[test]
    fn an_impossible_size_is_a_memory_error() {
        assert_eq!(Region::reserve(usize::MAX).unwrap_err().kind(), ErrorKind::Memory);
    }
}
