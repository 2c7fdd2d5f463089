//! How much of a byte range is in the page cache.
//!
//! `cachestat(2)` (Linux 6.5) answers without touching a page. Where it is missing or forbidden (old kernels, seccomp
//! profiles that do not know it) the answer is unknown, and the caller reads through the cache, which is right in
//! every state and fast in the cached one.
#![allow(unsafe_code)]

use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::memory::PAGE;

/// Where the pages of a range are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Residency {
    /// All of them in the page cache.
    Cached,
    /// Some of them; the share is in 1/256.
    Partly(u8),
    /// None of them.
    Absent,
    /// This kernel does not say.
    Unknown,
}

/// A range with at least this share of its pages cached (in 1/256) is read through the cache.
const MOSTLY: u8 = 192;

impl Residency {
    /// Whether so much is cached that the rest is not worth another way of reading.
    pub(super) fn is_mostly_cached(self) -> bool {
        match self {
            Self::Cached => true,
            Self::Partly(share) => share >= MOSTLY,
            Self::Absent | Self::Unknown => false,
        }
    }
}

#[repr(C)]
struct CachestatRange {
    off: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cache: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// The same number on every architecture.
const SYS_CACHESTAT: libc::c_long = 451;

static MISSING: AtomicBool = AtomicBool::new(false);

/// Asks the kernel about `range` of the file behind `fd`.
pub(super) fn residency(fd: BorrowedFd<'_>, range: &Range<u64>) -> Residency {
    if MISSING.load(Ordering::Relaxed) || range.is_empty() {
        return Residency::Unknown;
    }
    let page = PAGE as u64;
    let asked = CachestatRange { off: range.start, len: range.end - range.start };
    let mut answer = Cachestat::default();
    // SAFETY: both structs have the layout of linux/mman.h, outlive the call, and the flags must be zero.
    let rc = unsafe {
        libc::syscall(SYS_CACHESTAT, fd.as_raw_fd(), &raw const asked, &raw mut answer, 0 as libc::c_uint)
    };
    if rc != 0 {
        // EOPNOTSUPP speaks of this file (hugetlbfs), everything else of the kernel.
        if std::io::Error::last_os_error().raw_os_error() != Some(libc::EOPNOTSUPP) {
            MISSING.store(true, Ordering::Relaxed);
        }
        return Residency::Unknown;
    }
    let pages = range.end.div_ceil(page) - range.start / page;
    match answer.cache {
        0 => Residency::Absent,
        cached if cached >= pages => Residency::Cached,
        cached => Residency::Partly(u8::try_from(cached * 256 / pages).unwrap_or(u8::MAX)),
    }
}
