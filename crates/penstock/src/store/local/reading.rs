//! The two ways a range comes in, and the choice between them.
//!
//! **Through the page cache** (`pread`): one copy, at memory speed when the pages are there. **Directly** (`O_DIRECT`):
//! no copy, the device's own speed, no page-cache pollution, but in whole sectors and to aligned addresses. The choice
//! is made for every block from what the cache holds, so a half-cached file gets both at once. Whoever has asked what of
//! the block is cached says so in the context, and it is not asked again for every request.
//!
//! Copies: a buffered read copies once, kernel to destination. A direct read copies nothing, except the unaligned ends
//! of a range (less than a page each) and destinations whose address does not match their offset, which go through
//! the context's scratch memory.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::cache::MOSTLY;
use super::failure::failed;
use super::handle::DirectFile;
use super::{CachePolicy, LocalFile};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{PAGE, Region, Window};
use crate::store::block_map::to_usize;
use crate::store::{Object, ReadContext, checked_range};

/// Bytes read at once to scratch memory, where a direct read cannot go to its destination.
const SCRATCH_BYTES: usize = 1 << 20;

/// The most one `read` call transfers on Linux, rounded down to whole pages.
const MOST_PER_CALL: usize = 0x7fff_f000;

enum Route {
    Cached,
    Buffered,
    Direct(Arc<DirectFile>),
}

impl LocalFile {
    fn route(&self, range: &Range<u64>, cx: &mut ReadContext) -> Route {
        let cached = cx.cached.or_else(|| self.would_copy(range));
        match (self.cache, cached) {
            (_, Some(true)) => Route::Cached,
            (CachePolicy::Use | CachePolicy::Populate, _) | (CachePolicy::Auto, None) => Route::Buffered,
            _ if self.direct_refused.load(Ordering::Relaxed) => Route::Buffered,
            _ => self.direct(cx).map_or(Route::Buffered, Route::Direct),
        }
    }

    /// Whether a read of `range` would be a copy from the page cache; nothing where this kernel does not say.
    pub(super) fn would_copy(&self, range: &Range<u64>) -> Option<bool> {
        if self.cache == CachePolicy::Bypass {
            return Some(false);
        }
        self.cached_share(range).map(|share| share >= MOSTLY)
    }

    pub(super) fn read_exactly(&self, offset: u64, mut into: Window<'_>, cx: &mut ReadContext) -> Result<()> {
        let range = checked_range(self, offset, into.len())?;
        let cached = match self.route(&range, cx) {
            Route::Direct(direct) => {
                match self.read_directly(&direct, offset, into.part(0, into.len()), cx) {
                    Err(error) if is_refusal(&error) => self.refuse_direct(&error),
                    done => return done,
                }
                false
            }
            route => matches!(route, Route::Cached),
        };
        self.read_buffered(offset, into, cx, cached)
    }

    pub(super) fn read_aligned(
        &self,
        range: Range<u64>,
        mut buffer: Window<'_>,
        cx: &mut ReadContext,
    ) -> Result<usize> {
        let len = to_usize(range.end - range.start);
        checked_range(self, range.start, len)?;
        let cached = match self.route(&range, cx) {
            Route::Direct(direct) if (buffer.as_ptr() as usize).is_multiple_of(direct.memory_align) => {
                let start = range.start / PAGE as u64 * PAGE as u64;
                let lead = to_usize(range.start - start);
                let aligned_len = (lead + len).next_multiple_of(PAGE);
                if aligned_len <= buffer.len() {
                    match self.read_sectors(&direct, start, buffer.part(0, aligned_len), lead + len, cx) {
                        Err(error) if is_refusal(&error) => self.refuse_direct(&error),
                        done => return done.map(|()| lead),
                    }
                }
                false
            }
            route => matches!(route, Route::Cached),
        };
        self.read_buffered(range.start, buffer.part(0, len), cx, cached).map(|()| 0)
    }

    /// A range must lie in the file as it was opened; anything else is a bug of the plan, not a short file.
    fn read_buffered(&self, offset: u64, into: Window<'_>, cx: &mut ReadContext, cached: bool) -> Result<()> {
        let wanted = into.len();
        if self.cache == CachePolicy::Populate && !cached {
            self.ask_for(&(offset..offset + wanted as u64));
        }
        let got = self.fill(&self.file, offset, into, cx)?;
        *(if cached { &mut cx.cached_bytes } else { &mut cx.buffered_bytes }) += got as u64;
        self.complete(offset, got, wanted)
    }

    fn read_directly(
        &self,
        direct: &DirectFile,
        offset: u64,
        mut into: Window<'_>,
        cx: &mut ReadContext,
    ) -> Result<()> {
        let page = PAGE as u64;
        let end = offset + into.len() as u64;
        let (first, last) = (offset.next_multiple_of(page), end / page * page);
        let address = into.as_ptr() as usize as u64;
        let aligned = (address + (first - offset)).is_multiple_of(direct.memory_align as u64);
        if !aligned || first >= last {
            return self.read_through_scratch(direct, offset, into, cx);
        }
        let (head, body) = (to_usize(first - offset), to_usize(last - first));
        self.read_through_scratch(direct, offset, into.part(0, head), cx)?;
        self.read_sectors(direct, first, into.part(head, body), body, cx)?;
        let tail = into.len() - head - body;
        self.read_through_scratch(direct, last, into.part(head + body, tail), cx)
    }

    /// Reads whole sectors to scratch memory and copies what was asked for.
    fn read_through_scratch(
        &self,
        direct: &DirectFile,
        offset: u64,
        mut into: Window<'_>,
        cx: &mut ReadContext,
    ) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let start = at / PAGE as u64 * PAGE as u64;
            let lead = to_usize(at - start);
            let take = (into.len() - done).min(SCRATCH_BYTES - lead);
            let mut scratch = match cx.scratch.take() {
                Some(region) => region,
                None => Region::reserve(SCRATCH_BYTES)?,
            };
            let sectors = (lead + take).next_multiple_of(PAGE);
            let read = self.read_sectors(direct, start, scratch.window().part(0, sectors), lead + take, cx);
            if read.is_ok() {
                let filled = scratch.window();
                // SAFETY: `read_sectors` filled the first `lead + take` bytes.
                into.write(done, unsafe { filled.assume_filled(lead, take) });
            }
            cx.scratch = Some(scratch);
            read?;
            done += take;
        }
        Ok(())
    }

    /// Fills the first `wanted` bytes of `into` (whole pages at an aligned address) from the aligned offset `start`.
    fn read_sectors(
        &self,
        direct: &DirectFile,
        start: u64,
        mut into: Window<'_>,
        wanted: usize,
        cx: &mut ReadContext,
    ) -> Result<()> {
        let mut got = self.fill(&direct.file, start, into.part(0, into.len()), cx)?;
        cx.direct_bytes += got.min(wanted) as u64;
        if got < wanted && !got.is_multiple_of(PAGE) {
            // A direct read that ends inside a sector has met the end of the file, or a file system that splits reads
            // where it likes. The page cache can read on from there; if it is the end, it will say so.
            let rest = wanted - got;
            let more = self.fill(&self.file, start + got as u64, into.part(got, rest), cx)?;
            cx.buffered_bytes += more as u64;
            got += more;
        }
        self.complete(start, got.min(wanted), wanted)
    }

    /// Reads until the window is full, the file ends, or a direct read stops between sectors.
    fn fill(&self, file: &File, offset: u64, into: Window<'_>, cx: &mut ReadContext) -> Result<usize> {
        let mut done = 0;
        while done < into.len() {
            cx.calls += 1;
            let at = offset + done as u64;
            let count = (into.len() - done).min(MOST_PER_CALL);
            // SAFETY: the window is exclusive, writable memory of `into.len()` bytes, and `done + count` is within it.
            let n = unsafe {
                libc::pread64(file.as_raw_fd(), into.as_ptr().add(done).cast(), count, at.cast_signed())
            };
            match usize::try_from(n) {
                Ok(0) => break,
                Ok(n) => {
                    done += n;
                    if done < into.len()
                        && !done.is_multiple_of(PAGE)
                        && !std::ptr::eq(file, &raw const self.file)
                    {
                        break;
                    }
                }
                Err(_) => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        // What came before is there: the range says where it went wrong, and so which tensor is hit.
                        let range = at..at + count as u64;
                        return Err(failed("reading", &error).object(&self.location).range(range));
                    }
                }
            }
        }
        Ok(done)
    }

    fn complete(&self, offset: u64, got: usize, wanted: usize) -> Result<()> {
        if got >= wanted {
            return Ok(());
        }
        let range = offset + got as u64..offset + wanted as u64;
        if self.file.metadata().is_ok_and(|now| now.len() >= self.bytes()) {
            let cause = "the storage gave no bytes here, although the file is as long as it was";
            return Err(Error::new(ErrorKind::Storage, cause)
                .object(&self.location)
                .range(range)
                .remedy("Load it again; if it stays so, the file system or its server is at fault"));
        }
        Err(self.changed("the file ended early: it was truncated after it was opened", Some(range)))
    }
}

/// Whether the kernel refused the direct way itself (and nothing was wrong with the bytes). Where something was, the
/// other way will say so.
fn is_refusal(error: &Error) -> bool {
    matches!(error.os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS | libc::EPERM))
}
