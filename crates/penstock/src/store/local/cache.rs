//! How much of a byte range is in the page cache.
//!
//! `cachestat(2)` (Linux 6.5) answers without touching a page. Where it is missing or forbidden (old kernels, seccomp
//! profiles that do not know it) the answer is unknown, and the caller reads through the cache, which is right in
//! every state and fast in the cached one.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::memory::{FileMapping, PAGE};

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

/// The error number with which the kernel, or a filter before it, refused to say anything of any file; else 0.
static REFUSED: AtomicI32 = AtomicI32::new(0);

/// How to learn what of one file is cached.
#[derive(Debug)]
pub(super) enum Probe {
    /// The file is in memory: tmpfs, ramfs.
    Memory,
    /// `cachestat(2)`.
    Cachestat,
    /// `mincore(2)` of a mapping: on overlayfs (the root of a container), `cachestat` asks the overlay's own inode, which
    /// never has a page, while a mapping is of the file below. Made at the first use; none where mapping is refused.
    Mincore(OnceLock<Option<FileMapping>>),
}

impl Probe {
    /// The way that suits the file's file system.
    pub(super) fn of(file: &File) -> Self {
        // Magic numbers of linux/magic.h.
        match rustix::fs::fstatfs(file).map(|answer| answer.f_type.cast_unsigned() & 0xffff_ffff) {
            Ok(0x0102_1994 | 0x8584_58f6) => Self::Memory,
            Ok(0x794c_7630) => Self::Mincore(OnceLock::new()),
            _ => Self::Cachestat,
        }
    }

    /// Why nothing could be learnt of any file, in a sentence for the load's owner.
    pub(super) fn unanswered(&self) -> Option<String> {
        let number = REFUSED.load(Ordering::Relaxed);
        (matches!(self, Self::Cachestat) && number != 0).then(|| {
            let error = std::io::Error::from_raw_os_error(number);
            format!(
                "read through the page cache, as the kernel does not say what is in it (cachestat, Linux 6.5: {error})"
            )
        })
    }

    /// What is known of `range` of `file`, which is `bytes` long.
    pub(super) fn residency(&self, file: &File, bytes: u64, range: &Range<u64>) -> Residency {
        if range.is_empty() {
            return Residency::Unknown;
        }
        match self {
            Self::Memory => Residency::Cached,
            Self::Cachestat => cachestat(file.as_fd(), range),
            Self::Mincore(mapping) => {
                let mapping = mapping.get_or_init(|| FileMapping::map(file, bytes).ok());
                let pages = mapping.as_ref().and_then(|mapping| {
                    let start = usize::try_from(range.start).ok()?;
                    mapping.resident_pages(start, usize::try_from(range.end).ok()? - start)
                });
                pages.map_or(Residency::Unknown, |pages| Residency::of(pages as u64, range))
            }
        }
    }
}

impl Residency {
    /// That of a range of which so many pages are cached.
    fn of(cached: u64, range: &Range<u64>) -> Self {
        let pages = range.end.div_ceil(PAGE as u64) - range.start / PAGE as u64;
        match cached {
            0 => Self::Absent,
            cached if cached >= pages => Self::Cached,
            cached => Self::Partly(u8::try_from(cached * 256 / pages).unwrap_or(u8::MAX)),
        }
    }
}

fn cachestat(fd: BorrowedFd<'_>, range: &Range<u64>) -> Residency {
    if REFUSED.load(Ordering::Relaxed) != 0 {
        return Residency::Unknown;
    }
    let asked = CachestatRange { off: range.start, len: range.end - range.start };
    let mut answer = Cachestat::default();
    // SAFETY: both structs have the layout of linux/mman.h, outlive the call, and the flags must be zero.
    let rc = unsafe {
        libc::syscall(SYS_CACHESTAT, fd.as_raw_fd(), &raw const asked, &raw mut answer, 0 as libc::c_uint)
    };
    if rc != 0 {
        // EOPNOTSUPP speaks of this file (hugetlbfs), everything else of the kernel.
        match std::io::Error::last_os_error().raw_os_error() {
            None | Some(libc::EOPNOTSUPP) => {}
            Some(number) => REFUSED.store(number, Ordering::Relaxed),
        }
        return Residency::Unknown;
    }
    Residency::of(answer.cache, range)
}
