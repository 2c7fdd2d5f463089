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

use rustix::fs::{Access, Advice, AtFlags, accessat, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::memory::{FileMapping, PAGE, page_bytes};

/// With at least this share of its pages cached, a range is read through the cache: the rest is not worth another way.
pub(super) const MOSTLY: f64 = 0.75;

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

/// How to learn what of one file is cached.
#[derive(Debug)]
pub(super) struct Probe {
    way: ProbeMethod,
    /// What is done instead, once the kernel has refused to say.
    fallback: OnceLock<Fallback>,
}

#[derive(Debug)]
enum ProbeMethod {
    /// The file is in memory: tmpfs, ramfs.
    Memory,
    /// `cachestat(2)`.
    Cachestat,
    /// `mincore(2)` of a mapping: on overlayfs (the root of a container), `cachestat` asks the overlay's own inode, which
    /// never has a page, while a mapping is of the file below. Made at the first use; none where that may not be known.
    Mincore(OnceLock<Option<FileMapping>>),
}

#[derive(Debug)]
enum Fallback {
    /// It may not be known of this file, to this user.
    Sample(Samples),
    /// It cannot be known: a sentence for the load's owner, which is the same for all files alike.
    Unknown(String),
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
        Self { way, fallback: OnceLock::new() }
    }

    /// Why nothing could be learnt of this file.
    pub(super) fn unanswered(&self) -> Option<String> {
        match self.fallback.get() {
            Some(Fallback::Unknown(because)) => Some(because.clone()),
            Some(Fallback::Sample(_)) | None => None,
        }
    }

    /// The share of the pages of `range` of `file`, which is `bytes` long, that are cached; nothing where it is not known.
    pub(super) fn cached_share(&self, file: &File, bytes: u64, range: &Range<u64>) -> Option<f64> {
        if range.is_empty() {
            return None;
        }
        if self.fallback.get().is_none() {
            match self.ask(file, bytes, range) {
                Ok(share) => return Some(share),
                Err(errno) => drop(self.fallback.set(Fallback::of(file, errno))),
            }
        }
        match self.fallback.get() {
            Some(Fallback::Sample(samples)) => {
                samples.are_cached(range).ok().map(|cached| if cached { 1.0 } else { 0.0 })
            }
            Some(Fallback::Unknown(_)) | None => None,
        }
    }

    fn ask(&self, file: &File, bytes: u64, range: &Range<u64>) -> Result<f64, Errno> {
        let cached = match &self.way {
            ProbeMethod::Memory => return Ok(1.0),
            ProbeMethod::Cachestat => cachestat(file.as_raw_fd(), range)?,
            ProbeMethod::Mincore(mapping) => {
                let map = || is_told(file).then(|| FileMapping::map(file, bytes).ok()).flatten();
                let mapping = mapping.get_or_init(map).as_ref().ok_or(Errno::PERM)?;
                let start = usize::try_from(range.start).map_err(|_| Errno::OVERFLOW)?;
                let len = usize::try_from(range.end - range.start).map_err(|_| Errno::OVERFLOW)?;
                mapping.resident_pages(start, len).ok_or(Errno::NOSYS)? as u64
            }
        };
        let page = page_bytes() as u64;
        let pages = range.end.div_ceil(page) - range.start / page;
        Ok(cached as f64 / pages as f64)
    }
}

impl Fallback {
    /// What is left where the kernel did not say what of `file` is cached, but `errno`.
    fn of(file: &File, errno: Errno) -> Self {
        // A kernel that has the call looks for the file first; a filter refuses it whatever the file.
        if cachestat(-1, &(0..1)) != Err(Errno::BADF) {
            let error = std::io::Error::from(errno);
            return Self::Unknown(format!(
                "read through the page cache, as the kernel does not say what is in it (cachestat, Linux 6.5: {error})"
            ));
        }
        match Samples::of(file) {
            Ok(samples) if samples.are_cached(&(0..1)).is_ok() => Self::Sample(samples),
            // A file system without it, a seccomp profile that does not know it.
            _ => Self::Unknown(
                "read through the page cache, as the kernel says what is in it only to the owner of a file and to \
                 those who may write to it"
                    .to_owned(),
            ),
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

/// How many pages of `range` of that file are cached.
fn cachestat(fd: libc::c_int, range: &Range<u64>) -> Result<u64, Errno> {
    let asked = CachestatRange { off: range.start, len: range.end - range.start };
    let mut answer = Cachestat::default();
    // SAFETY: both structs have the layout of linux/mman.h, outlive the call, and the flags must be zero.
    let rc =
        unsafe { libc::syscall(SYS_CACHESTAT, fd, &raw const asked, &raw mut answer, 0 as libc::c_uint) };
    match rc {
        0 => Ok(answer.cache),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::NOSYS)),
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
        // What is taken for a sign that the kernel has the call, where it has.
        let answer = cachestat(-1, &range);
        assert!(matches!(answer, Err(Errno::BADF | Errno::NOSYS | Errno::PERM)), "{answer:?}");
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
            if !cachestat(file.as_raw_fd(), &(0..bytes)).is_ok_and(|pages| pages > 0) {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(samples.are_cached(&(3..bytes)), Ok(false));
        // One page was brought in to find that out, or a large page of the file system.
        if let Ok(pages) = cachestat(file.as_raw_fd(), &(0..bytes)) {
            assert!(pages <= 16, "{pages} pages");
        }
    }
}
