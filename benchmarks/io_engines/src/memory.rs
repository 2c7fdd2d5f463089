//! Memory to read to: anonymous, in huge pages where there are any, and touched, so that no read has to wait for it.
//!
//! All workers of a measurement share one mapping, so that memory looks the same to a disk whoever asks for the bytes.

use std::io;
use std::ops::Range;

const HUGE_PAGE: usize = 2 << 20;

/// Equal buffers in one mapping, each aligned to 4 KiB at least.
#[derive(Debug)]
pub struct Buffers {
    base: *mut u8,
    mapped: (*mut libc::c_void, usize),
    each: usize,
    count: usize,
}

// SAFETY: plain memory. `&Buffers` gives out addresses; writing through them is unsafe code of workers, each of which
// keeps to buffers of its own.
unsafe impl Sync for Buffers {}
// SAFETY: nothing in it is tied to a thread.
unsafe impl Send for Buffers {}

impl Buffers {
    /// Maps and touches `count` buffers of `each` bytes, a multiple of 4 KiB.
    pub fn new(count: usize, each: usize) -> io::Result<Self> {
        assert!(each.is_multiple_of(4096), "direct reads need whole sectors");
        let bytes = (count * each).next_multiple_of(HUGE_PAGE);
        let mapped_len = bytes + HUGE_PAGE;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches no existing memory.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = mapped.cast::<u8>();
        // SAFETY: the mapping is a huge page longer than what is used, and the alignment skips less than that.
        let base = unsafe { start.add(start.align_offset(HUGE_PAGE)) };
        // SAFETY: `bytes` from `base` lie in the mapping, which is ours alone. The advice may be refused without harm.
        unsafe {
            libc::madvise(base.cast(), bytes, libc::MADV_HUGEPAGE);
            base.write_bytes(1, bytes);
        }
        Ok(Self { base, mapped: (mapped, mapped_len), each, count })
    }

    /// Where a buffer begins.
    pub fn at(&self, index: usize) -> *mut u8 {
        assert!(index < self.count);
        // SAFETY: the mapping holds `count` buffers of `each` bytes.
        unsafe { self.base.add(index * self.each) }
    }

    /// The word that a buffer begins with.
    pub fn first_word(&self, index: usize) -> u64 {
        // SAFETY: every buffer has at least 4096 bytes, all touched, and is aligned to as many. Its worker asks, after
        // its read has ended.
        unsafe { self.at(index).cast::<u64>().read_volatile() }
    }

    /// Some of them, as the kernel wants them for registration.
    pub fn vectors(&self, which: Range<usize>) -> Vec<libc::iovec> {
        which.map(|index| libc::iovec { iov_base: self.at(index).cast(), iov_len: self.each }).collect()
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new`, and whoever reads to it borrows `self` or has ended.
        unsafe { libc::munmap(self.mapped.0, self.mapped.1) };
    }
}
