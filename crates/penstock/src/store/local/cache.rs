//! How much of a byte range is in the page cache.
//!
//! `cachestat(2)` (Linux 6.5) answers without touching a page. Where it is missing or forbidden (old kernels, seccomp
//! profiles that do not know it) the answer is unknown, and the caller reads through the cache, which is right in
//! every state and fast in the cached one.
//!
//! Newer kernels answer only the owner of a file and whoever may write to it; `mincore(2)` tells everyone else that all
//! of it is cached. For such a file, and for it alone, a few pages of the range are **sampled**: `preadv2(RWF_NOWAIT)` of
//! one byte succeeds for a cached page. For any other page it has the kernel bring that page in, so sampling ends at the
//! first one that is missing: it costs a range that is not cached one read of a page, and never serves other files.
#![allow(unsafe_code)]

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use rustix::fs::{Access, Advice, AtFlags, accessat, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::memory::{FileMapping, PAGE, page_bytes};

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
pub(super) struct Probe {
    way: ProbeMethod,
    /// Set when the kernel does not tell this user of this file, so that it is sampled.
    forbidden: AtomicBool,
    /// Made at the first use; none where the file cannot be sampled.
    samples: OnceLock<Option<Samples>>,
    /// Set when sampling was refused as well.
    unsampled: AtomicBool,
}

#[derive(Debug)]
enum ProbeMethod {
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
        let way = match rustix::fs::fstatfs(file).map(|answer| answer.f_type.cast_unsigned() & 0xffff_ffff) {
            Ok(0x0102_1994 | 0x8584_58f6) => ProbeMethod::Memory,
            Ok(0x794c_7630) => ProbeMethod::Mincore(OnceLock::new()),
            _ => ProbeMethod::Cachestat,
        };
        let forbidden = matches!(way, ProbeMethod::Mincore(_)) && !is_told(file);
        Self {
            way,
            forbidden: AtomicBool::new(forbidden),
            samples: OnceLock::new(),
            unsampled: AtomicBool::new(false),
        }
    }

    /// Why nothing could be learnt of this file, in a sentence for the load's owner: the same for all files alike.
    pub(super) fn unanswered(&self) -> Option<String> {
        if self.unsampled.load(Ordering::Relaxed) {
            return Some(
                "read through the page cache, as the kernel says what is in it only to the owner of a file and to \
                 those who may write to it"
                    .to_owned(),
            );
        }
        let number = REFUSED.load(Ordering::Relaxed);
        (matches!(self.way, ProbeMethod::Cachestat) && number != 0).then(|| {
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
        if self.forbidden.load(Ordering::Relaxed) {
            return self.sampled(file, range);
        }
        match &self.way {
            ProbeMethod::Memory => Residency::Cached,
            ProbeMethod::Cachestat => match cachestat(file, range) {
                Ok(pages) => Residency::of(pages, range),
                Err(Refusal::OfEverything) => Residency::Unknown,
                Err(Refusal::OfThisFile) => {
                    self.forbidden.store(true, Ordering::Relaxed);
                    self.sampled(file, range)
                }
            },
            ProbeMethod::Mincore(mapping) => {
                let mapping = mapping.get_or_init(|| FileMapping::map(file, bytes).ok());
                let pages = mapping.as_ref().and_then(|mapping| {
                    let start = usize::try_from(range.start).ok()?;
                    mapping.resident_pages(start, usize::try_from(range.end).ok()? - start)
                });
                pages.map_or(Residency::Unknown, |pages| Residency::of(pages as u64, range))
            }
        }
    }

    fn sampled(&self, file: &File, range: &Range<u64>) -> Residency {
        let samples = self.samples.get_or_init(|| Samples::of(file).ok());
        match samples.as_ref().map(|samples| samples.are_cached(range)) {
            Some(Ok(true)) => Residency::Cached,
            Some(Ok(false)) => Residency::Absent,
            // A file system without it, a seccomp profile that does not know it.
            Some(Err(_)) | None => {
                self.unsampled.store(true, Ordering::Relaxed);
                Residency::Unknown
            }
        }
    }
}

/// Whether the kernel tells this user what of `file` is cached: its owner, and whoever may write to it.
fn is_told(file: &File) -> bool {
    let user = rustix::process::geteuid();
    let owns = || file.metadata().is_ok_and(|metadata| metadata.uid() == user.as_raw());
    user.is_root()
        || owns()
        || accessat(file, c"", Access::WRITE_OK, AtFlags::EMPTY_PATH | AtFlags::EACCESS).is_ok()
}

/// Pages of one file, looked at by reading them if they are cached.
#[derive(Debug)]
struct Samples {
    /// Opened once more, so that no other read of the file is taken for a random one.
    file: File,
    /// Other pages every time that the file is opened: those that were missing the last time are cached now.
    places: RandomState,
}

impl Samples {
    /// Pages to look at in one range.
    const MOST: u64 = 8;

    fn of(file: &File) -> std::io::Result<Self> {
        let again = format!("/proc/self/fd/{}", file.as_raw_fd());
        let flags = libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY;
        let file = File::options().read(true).custom_flags(flags).open(again)?;
        // A page that is missing is brought in alone, without those after it.
        fadvise(&file, 0, None, Advice::Random)?;
        Ok(Self { file, places: RandomState::new() })
    }

    /// Whether all pages are cached that are looked at, which are spread over `range`.
    fn are_cached(&self, range: &Range<u64>) -> Result<bool, Errno> {
        let page = PAGE as u64;
        let (first, end) = (range.start / page, range.end.div_ceil(page));
        let samples = Self::MOST.min(end - first);
        for sample in 0..samples {
            let part = |number: u64| first + (end - first) * number / samples;
            let (from, to) = (part(sample), part(sample + 1));
            let place = from + self.places.hash_one(from) % (to - from);
            let mut byte = [0];
            let at = (place * page).max(range.start);
            match preadv2(&self.file, &mut [IoSliceMut::new(&mut byte)], at, ReadWriteFlags::NOWAIT) {
                Ok(1) => {}
                Ok(_) | Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(true)
    }
}

impl Residency {
    /// That of a range of which so many pages are cached.
    fn of(cached: u64, range: &Range<u64>) -> Self {
        let page = page_bytes() as u64;
        let pages = range.end.div_ceil(page) - range.start / page;
        match cached {
            0 => Self::Absent,
            cached if cached >= pages => Self::Cached,
            cached => Self::Partly(u8::try_from(cached * 256 / pages).unwrap_or(u8::MAX)),
        }
    }
}

/// Why the kernel did not say what is cached.
#[derive(Debug, PartialEq, Eq)]
enum Refusal {
    /// It may not be known of this file, to this user.
    OfThisFile,
    /// The kernel lacks the call, or a filter forbids it.
    OfEverything,
}

/// How many pages of `range` are cached.
fn cachestat(file: &File, range: &Range<u64>) -> Result<u64, Refusal> {
    if REFUSED.load(Ordering::Relaxed) != 0 {
        return Err(Refusal::OfEverything);
    }
    let errno = match ask(file.as_raw_fd(), range) {
        Ok(pages) => return Ok(pages),
        Err(errno) => errno,
    };
    // A kernel that has the call looks for the file first; a filter refuses it whatever the file.
    if ask(-1, range) == Err(libc::EBADF) {
        return Err(Refusal::OfThisFile);
    }
    REFUSED.store(errno, Ordering::Relaxed);
    Err(Refusal::OfEverything)
}

fn ask(fd: libc::c_int, range: &Range<u64>) -> Result<u64, libc::c_int> {
    let asked = CachestatRange { off: range.start, len: range.end - range.start };
    let mut answer = Cachestat::default();
    // SAFETY: both structs have the layout of linux/mman.h, outlive the call, and the flags must be zero.
    let rc =
        unsafe { libc::syscall(SYS_CACHESTAT, fd, &raw const asked, &raw mut answer, 0 as libc::c_uint) };
    match rc {
        0 => Ok(answer.cache),
        _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::ENOSYS)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_descriptor_that_is_no_file_is_no_refusal_of_the_kernel() {
        let range = 0..PAGE as u64;
        // What `cachestat` takes for a sign that the kernel has the call, where it has.
        let answer = ask(-1, &range);
        assert!(matches!(answer, Err(libc::EBADF | libc::ENOSYS | libc::EPERM)), "{answer:?}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn samples_tell_a_cached_range_from_one_that_is_not() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("file");
        let bytes = 64 * PAGE as u64 + 5;
        fs::write(&path, vec![7; 64 * PAGE + 5]).unwrap();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        let samples = Samples::of(&file).unwrap();
        match samples.are_cached(&(0..bytes)) {
            // A file system without it.
            Err(Errno::OPNOTSUPP) => return,
            answer => assert_eq!(answer, Ok(true)),
        }
        assert_eq!(samples.are_cached(&(bytes - 2..bytes)), Ok(true));
        // The kernel keeps pages that somebody uses at that moment, such as those that wait to be put on its lists.
        for _ in 0..200 {
            fadvise(&file, 0, None, Advice::DontNeed).unwrap();
            if !ask(file.as_raw_fd(), &(0..bytes)).is_ok_and(|pages| pages > 0) {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(samples.are_cached(&(3..bytes)), Ok(false));
        // One page was brought in to find that out, or a large page of the file system.
        if let Ok(pages) = ask(file.as_raw_fd(), &(0..bytes)) {
            assert!(pages <= 16, "{pages} pages");
        }
    }
}
