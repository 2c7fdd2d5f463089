//! An owned piece of memory, taken from and given back to the operating system whole.

use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::Window;
use crate::error::{Error, ErrorKind, Result};

/// Bytes to which memory and direct reads are aligned: a base page of x86-64, and what satisfies every O_DIRECT device met
/// so far. What is asked of the kernel goes by its own pages, see [`page_bytes`].
pub const PAGE: usize = 4096;
/// Bytes of a transparent huge page on the machines Penstock is for.
pub const HUGE_PAGE: usize = 2 << 20;

/// Bytes of this kernel's base pages: 64 KiB on some arm64 machines.
pub(crate) fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// Memory of our own: reserved at once, backed by pages when first touched, unmapped on drop.
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
        let huge = len >= HUGE_PAGE;
        let align = if huge { HUGE_PAGE } else { PAGE };
        let mapped_len = len
            .max(1)
            .checked_next_multiple_of(PAGE)
            .and_then(|n| n.checked_add(if huge { HUGE_PAGE } else { 0 }))
            .ok_or_else(|| refused(len, "the size overflows"))?;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches no existing memory.
        let mapped = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                mapped_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(|errno| refused(len, &errno.to_string()))?;
        let mapped =
            NonNull::new(mapped.cast::<u8>()).ok_or_else(|| refused(len, "mapped at address zero"))?;
        let skip = mapped.as_ptr().align_offset(align);
        // SAFETY: `skip` is below HUGE_PAGE, by which the mapping is longer than `len`.
        let base = unsafe { mapped.add(skip) };
        if huge {
            // Huge pages are an optimisation: a kernel without them backs the region with base pages.
            // SAFETY: the span lies in the mapping just made; the advice does not change its contents.
            let _ = unsafe { madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        }
        Ok(Self { base, len, mapped, mapped_len })
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

    /// Makes the pages of the `len` bytes from `start` (a multiple of [`PAGE`]) present now, so that no later access has to
    /// wait for the kernel. No byte changes.
    ///
    /// # Errors
    /// `Memory` where the pages cannot be had.
    ///
    /// # Panics
    /// Where the span does not lie in the region: a bug of the caller.
    pub fn touch(&self, start: usize, len: usize) -> Result<()> {
        let inside = start.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside && start.is_multiple_of(PAGE), "a span outside of its region");
        // SAFETY: inside the region, as was just checked.
        let first = unsafe { self.base.as_ptr().add(start) };
        // SAFETY: a part of our own mapping; populating changes no contents.
        match unsafe { madvise(first.cast(), len, Advice::LinuxPopulateWrite) } {
            Err(errno @ (Errno::NOMEM | Errno::FAULT | Errno::HWPOISON)) => {
                Err(refused(len, &errno.to_string()))
            }
            // Kernels before 5.14, and sandboxes, do not know the advice: there pages come at their first use.
            _ => Ok(()),
        }
    }

    /// Leaves this memory out of children that are forked from now on. Returns whether the kernel agreed.
    ///
    /// Private memory that a device reads or writes on its own must not be shared with a child: the first of the two
    /// processes to write to a page gets a copy, and the device may be left with the other's.
    ///
    /// In a child the addresses may be used for something else, so there the region must not be dropped.
    pub fn keep_from_children(&self) -> bool {
        // SAFETY: exactly the mapping of this region; this process's access to it does not change.
        unsafe { madvise(self.mapped.as_ptr().cast(), self.mapped_len, Advice::LinuxDontFork) }.is_ok()
    }

    /// All of it, to be filled.
    pub fn window(&mut self) -> Window<'_> {
        // SAFETY: the region owns these bytes and `&mut self` makes the window exclusive.
        unsafe { Window::from_raw(self.base.as_ptr(), self.len) }
    }

    /// Its bytes: zeros where nothing was written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: private memory of ours, readable from the start, and `&mut self` makes the borrow exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    /// Gives the pages that lie wholly in the `len` bytes from `start` back to the operating system. The addresses
    /// stay reserved and read as zero afterwards.
    ///
    /// # Safety
    /// Nothing may rely on the contents of those pages any more.
    pub unsafe fn release_pages(&self, start: usize, len: usize) {
        // The kernel rounds lengths up to its pages, and would take what lies behind.
        let page = page_bytes();
        let first = start.next_multiple_of(page);
        let end = (start + len).min(self.len) / page * page;
        if first < end {
            // SAFETY: whole pages inside this mapping, given up as the caller promises. A failure only means that the
            // pages stay until the region is dropped.
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

fn refused(len: usize, cause: &str) -> Error {
    Error::new(ErrorKind::Memory, format!("reserving {len} bytes of host memory failed: {cause}"))
        .remedy("Check the memory limit of the process (ulimit -v, cgroup) or load fewer tensors at once")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(region: &Region) -> &[u8] {
        // SAFETY: mapped and never uninitialised: what was not written reads as zero.
        unsafe { std::slice::from_raw_parts(region.as_ptr(), region.len()) }
    }

    /// The bytes of it that are backed by pages.
    fn resident(region: &Region) -> usize {
        let mut pages = vec![0u8; region.len().div_ceil(PAGE)];
        // SAFETY: the region is mapped and `pages` has one byte for each of its pages.
        assert_eq!(unsafe { libc::mincore(region.as_ptr().cast(), region.len(), pages.as_mut_ptr()) }, 0);
        pages.iter().filter(|page| **page & 1 == 1).count() * PAGE
    }

    #[test]
    fn touching_makes_every_page_present_and_changes_no_byte() {
        let mut region = Region::reserve(64 * PAGE).unwrap();
        region.window().write(5, b"penstock");
        assert!(resident(&region) < 64 * PAGE);
        region.touch(0, region.len()).unwrap();
        assert_eq!(resident(&region), 64 * PAGE);
        assert_eq!(&bytes(&region)[5..13], b"penstock");
    }

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
        let bytes = bytes(&region);
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
