//! An owned piece of memory, taken from and given back to the operating system whole.
//!
//! It is anonymous, or a memfd: a file in memory that other processes map too once they are handed its descriptor.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

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

/// What a region's pages belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backing {
    /// This process alone.
    #[default]
    Anonymous,
    /// A memfd of the region's size, which can neither grow nor shrink; see [`Region::shared_file`].
    Memfd,
}

/// Memory of our own: reserved at once, backed by pages when first touched, unmapped on drop.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    mapped: NonNull<u8>,
    mapped_len: usize,
    file: Option<OwnedFd>,
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
        Self::reserve_as(len, Backing::Anonymous)
    }

    /// [`Region::reserve`] with pages of another kind.
    ///
    /// # Errors
    /// `Memory` where the kernel refuses the reservation.
    pub fn reserve_as(len: usize, backing: Backing) -> Result<Self> {
        match backing {
            Backing::Anonymous => Self::map(len, None),
            Backing::Memfd => Self::map(len, Some(memfd(len)?)),
        }
    }

    /// Maps a memfd made by another region, here or in another process: the same bytes at another address.
    ///
    /// # Errors
    /// `Memory` where the kernel refuses, or the descriptor is not of a file whose size is sealed: memory that someone
    /// else may cut short would kill the process that touches it.
    pub fn map_shared(file: OwnedFd) -> Result<Self> {
        let checked = || {
            let seals = rustix::fs::fcntl_get_seals(&file)?;
            if !seals.contains(SealFlags::SHRINK) {
                return Err(Errno::PERM);
            }
            usize::try_from(fstat(&file)?.st_size).map_err(|_| Errno::OVERFLOW)
        };
        let len = checked().map_err(|errno| refused(0, &errno.to_string()))?;
        Self::map(len, Some(file))
    }

    fn map(len: usize, file: Option<OwnedFd>) -> Result<Self> {
        let huge = len >= HUGE_PAGE;
        let align = if huge { HUGE_PAGE } else { PAGE };
        let mapped_len = len
            .max(1)
            .checked_next_multiple_of(PAGE)
            .and_then(|n| n.checked_add(if huge { HUGE_PAGE } else { 0 }))
            .ok_or_else(|| refused(len, "the size overflows"))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches no existing memory.
        let mapped = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                mapped_len,
                if file.is_some() { ProtFlags::empty() } else { access },
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(|errno| refused(len, &errno.to_string()))?;
        let mapped =
            NonNull::new(mapped.cast::<u8>()).ok_or_else(|| refused(len, "mapped at address zero"))?;
        let skip = mapped.as_ptr().align_offset(align);
        // SAFETY: `skip` is below HUGE_PAGE, by which the mapping is longer than `len`.
        let base = unsafe { mapped.add(skip) };
        let region = Self { base, len, mapped, mapped_len, file };
        if let Some(file) = &region.file {
            // SAFETY: replaces pages of the mapping just made, which nobody knows of.
            unsafe {
                mmap(
                    base.as_ptr().cast(),
                    len.max(1).next_multiple_of(PAGE),
                    access,
                    MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE,
                    file,
                    0,
                )
            }
            .map_err(|errno| refused(len, &errno.to_string()))?;
        }
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

    /// The memfd behind it, to be handed to another process; `None` for anonymous memory.
    pub fn shared_file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
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
            Ok(()) => Ok(()),
            Err(errno @ (Errno::NOMEM | Errno::FAULT | Errno::HWPOISON)) => {
                Err(refused(len, &errno.to_string()))
            }
            // Kernels before 5.14, and sandboxes, do not know the advice.
            Err(_) => {
                for at in (0..len).step_by(PAGE) {
                    // SAFETY: inside the region; an atomic addition of nothing leaves the byte as it is even where
                    // another process maps it.
                    unsafe { AtomicU8::from_ptr(first.add(at)) }.fetch_add(0, Ordering::Relaxed);
                }
                Ok(())
            }
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

    /// Its bytes: zeros where nothing was written. Memory that other processes may write to has no such view: empty then.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let len = if self.file.is_some() { 0 } else { self.len };
        // SAFETY: private memory of ours, readable from the start, and `&mut self` makes the borrow exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), len) }
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
            let advice = if self.file.is_some() { Advice::LinuxRemove } else { Advice::LinuxDontNeed };
            // SAFETY: whole pages inside this mapping, given up as the caller promises. A failure only means that the
            // pages stay until the region is dropped.
            let _ = unsafe { madvise(self.base.as_ptr().add(first).cast(), end - first, advice) };
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `map`; the owner is gone, so no borrow of it is left.
        let _ = unsafe { munmap(self.mapped.as_ptr().cast(), self.mapped_len) };
    }
}

fn refused(len: usize, cause: &str) -> Error {
    Error::new(ErrorKind::Memory, format!("reserving {len} bytes of host memory failed: {cause}"))
        .remedy("Check the memory limit of the process (ulimit -v, cgroup) or load fewer tensors at once")
}

/// A file in memory of `len` bytes, closed in programs that this process starts, of a size that stays.
fn memfd(len: usize) -> Result<OwnedFd> {
    let make = || {
        let file = memfd_create("penstock", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(file)
    };
    make().map_err(|errno: Errno| refused(len, &errno.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKINGS: [Backing; 2] = [Backing::Anonymous, Backing::Memfd];

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
        for backing in BACKINGS {
            let mut region = Region::reserve_as(64 * PAGE, backing).unwrap();
            region.window().write(5, b"penstock");
            assert!(resident(&region) < 64 * PAGE);
            region.touch(0, region.len()).unwrap();
            assert_eq!(resident(&region), 64 * PAGE);
            assert_eq!(&bytes(&region)[5..13], b"penstock");
        }
    }

    #[test]
    fn two_mappings_of_a_memfd_are_the_same_bytes() {
        let mut one = Region::reserve_as(HUGE_PAGE + PAGE, Backing::Memfd).unwrap();
        let file = one.shared_file().unwrap().try_clone_to_owned().unwrap();
        let mut other = Region::map_shared(file).unwrap();
        assert_ne!(one.as_ptr(), other.as_ptr());
        assert_eq!((other.len(), other.as_ptr() as usize % HUGE_PAGE), (one.len(), 0));
        one.window().write(HUGE_PAGE, b"from one");
        assert_eq!(&bytes(&other)[HUGE_PAGE..][..8], b"from one");
        other.window().write(0, b"from the other");
        drop(other);
        assert_eq!(&bytes(&one)[..14], b"from the other");
    }

    #[test]
    fn shared_memory_that_someone_else_may_cut_short_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE as u64).unwrap();
        assert_eq!(Region::map_shared(file.into()).unwrap_err().kind(), ErrorKind::Memory);
        let memfd = memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&memfd, PAGE as u64).unwrap();
        assert_eq!(Region::map_shared(memfd).unwrap_err().kind(), ErrorKind::Memory);
    }

    #[test]
    fn small_regions_are_page_aligned_and_large_ones_huge_page_aligned() {
        assert_eq!(Region::reserve(10).unwrap().as_ptr() as usize % PAGE, 0);
        assert_eq!(Region::reserve(5 << 20).unwrap().as_ptr() as usize % HUGE_PAGE, 0);
    }

    #[test]
    fn released_pages_read_as_zero_and_their_neighbours_stay() {
        for backing in BACKINGS {
            let mut region = Region::reserve_as(4 * PAGE, backing).unwrap();
            region.window().write(0, &[9; 4 * PAGE]);
            // SAFETY: only this test uses the region.
            unsafe { region.release_pages(1, 3 * PAGE) };
            let bytes = bytes(&region);
            assert_eq!(
                [bytes[0], bytes[PAGE - 1], bytes[PAGE], bytes[3 * PAGE - 1], bytes[3 * PAGE]],
                [9, 9, 0, 0, 9]
            );
        }
    }

    #[test]
    fn an_impossible_size_is_a_memory_error() {
        assert_eq!(Region::reserve(usize::MAX).unwrap_err().kind(), ErrorKind::Memory);
    }
}
