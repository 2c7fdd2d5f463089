//! A remote object, read through the disk cache.
//!
//! Of a complete entry all is read from its file, as from any local one. Of another, blocks that are on disk come from
//! there, and the others from the remote object, with one request wherever they lie side by side. What comes, whole
//! blocks always, is handed to the writers.

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::entry::{BLOCK_BYTES, Entry};
use super::writers::{BUFFER_BYTES, Writers};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{FileMapping, Window};
use crate::store::block_map::to_usize;
use crate::store::{Identity, Object, ReadContext, RemoteStore, Store};

/// What part of the time that bytes took to come a reader waits for a buffer at most. Readers come in bursts, and a disk
/// that is fast enough on the whole should not miss any of one.
const PATIENCE: u32 = 25;
/// Blocks of the largest request.
const MOST_BLOCKS: usize = BUFFER_BYTES / BLOCK_BYTES as usize;

/// An object of which the cache may have something.
pub(super) struct CachedObject {
    location: String,
    identity: Identity,
    bytes: u64,
    /// Where the object comes from: its store and its full location.
    store: RemoteStore,
    url: String,
    /// The object there, once something was asked of it.
    remote: OnceLock<Arc<dyn Object>>,
    /// What is kept of it, or why nothing is.
    entry: Result<Arc<Entry>, String>,
    /// The file of a complete entry.
    file: Option<Arc<dyn Object>>,
    /// Set once that could not be read. From then on it is an entry like others.
    file_failed: OnceLock<()>,
}

impl CachedObject {
    /// The object at `url` that errors call `location`, of which nothing was asked yet, in a complete entry with this file.
    pub(super) fn complete(
        store: RemoteStore,
        (url, location): (&str, &str),
        identity: Identity,
        entry: Arc<Entry>,
        file: Arc<dyn Object>,
    ) -> Self {
        Self {
            location: location.to_owned(),
            identity,
            bytes: entry.bytes,
            store,
            url: url.to_owned(),
            remote: OnceLock::new(),
            entry: Ok(entry),
            file: Some(file),
            file_failed: OnceLock::new(),
        }
    }

    /// The object `remote` at `url`, of which `entry` says what is kept, or why nothing is.
    pub(super) fn partial(
        store: RemoteStore,
        url: &str,
        remote: Arc<dyn Object>,
        entry: Result<Arc<Entry>, String>,
    ) -> Self {
        Self {
            location: remote.location().to_owned(),
            identity: remote.identity(),
            bytes: remote.bytes(),
            store,
            url: url.to_owned(),
            remote: remote.into(),
            entry,
            file: None,
            file_failed: OnceLock::new(),
        }
    }

    /// Keeps the first bytes, which opening the remote object has brought.
    pub(super) fn keep_head(&self) {
        if let Ok(entry) = &self.entry
            && self.bytes > 0
            && !entry.has(0)
        {
            let _ = self.fetch(entry, 0..1, &mut [], &mut ReadContext::default());
        }
    }

    fn remote(&self) -> Result<&Arc<dyn Object>> {
        if let Some(remote) = self.remote.get() {
            return Ok(remote);
        }
        let remote = self.store.reopen(&self.url, &self.identity)?;
        Ok(self.remote.get_or_init(|| remote))
    }

    /// The file that is read in place of the object.
    fn file(&self) -> Option<&Arc<dyn Object>> {
        self.file.as_ref().filter(|_| self.file_failed.get().is_none())
    }

    /// What `read` reads from the file, where there is one that can be read.
    fn read_file<T>(&self, read: impl FnOnce(&dyn Object) -> Result<T>) -> Option<T> {
        let done = read(&**self.file()?);
        done.inspect_err(|error| {
            let _ = self.file_failed.set(());
            if let Ok(entry) = &self.entry {
                entry.doubt();
                entry.unreadable(&error.cause());
            }
        })
        .ok()
    }

    /// Reads block by block what is on disk, and the rest from the remote object.
    fn read_blocks(
        &self,
        entry: &Arc<Entry>,
        blocks: Range<usize>,
        into: &mut [(u64, Window<'_>)],
        cx: &mut ReadContext,
    ) -> Result<()> {
        let mut buffer = vec![0; BLOCK_BYTES as usize];
        let mut missing = blocks.start..blocks.start;
        for block in blocks {
            let range = entry.range(&(block..block + 1));
            let is_wanted = parts(&range, into).next().is_some();
            let kept = if is_wanted { entry.read(block, &mut buffer) } else { None };
            if let Some(bytes) = kept {
                copy(range.start, bytes, into);
                cx.buffered_bytes += bytes.len() as u64;
                cx.calls += 1;
            }
            if kept.is_some() || (!is_wanted && entry.has(block)) {
                self.fetch(entry, missing, into, cx)?;
                missing = block + 1..block + 1;
                continue;
            }
            missing.end = block + 1;
            if missing.len() == MOST_BLOCKS {
                self.fetch(entry, missing, into, cx)?;
                missing = block + 1..block + 1;
            }
        }
        self.fetch(entry, missing, into, cx)
    }

    /// Asks for blocks with one request, to the windows, and has them written with what lies between those.
    #[allow(unsafe_code)]
    fn fetch(
        &self,
        entry: &Arc<Entry>,
        blocks: Range<usize>,
        into: &mut [(u64, Window<'_>)],
        cx: &mut ReadContext,
    ) -> Result<()> {
        if blocks.is_empty() {
            return Ok(());
        }
        let range = entry.range(&blocks);
        let mut between = gaps(&range, into);
        // They are read again right after.
        let mut all: Vec<_> = parts(&range, into).map(|(at, part)| (at, part.temporal())).collect();
        all.extend(between.iter_mut().map(|(at, gap)| (*at, Window::from_slice(gap))));
        all.sort_by_key(|(at, _)| *at);
        let began = Instant::now();
        self.remote()?.read_scattered(&mut all, cx)?;
        if !entry.is_writable() {
            entry.note("the disk cache cannot be written to: what it lacks is not kept".into());
            return Ok(());
        }
        let writers = Writers::of_process();
        let Some(mut buffer) = writers.buffer(began.elapsed() / PATIENCE) else {
            entry.note("the disk cache could not keep up: what it left out is kept by the next load".into());
            return Ok(());
        };
        let len = to_usize(range.end - range.start);
        for (at, part) in &all {
            // SAFETY: the read has just filled this window, which is still ours alone.
            let came = unsafe { part.assume_filled(0, part.len()) };
            let from = to_usize(at - range.start);
            buffer.bytes(len)[from..from + came.len()].copy_from_slice(came);
        }
        writers.write(entry, blocks.start, buffer, len);
        Ok(())
    }
}

/// What of the windows is filled from `range`.
fn parts<'a>(
    range: &Range<u64>,
    into: &'a mut [(u64, Window<'_>)],
) -> impl Iterator<Item = (u64, Window<'a>)> {
    let Range { start, end } = *range;
    into.iter_mut().filter_map(move |(offset, window)| {
        let (from, to) = (start.max(*offset), end.min(*offset + window.len() as u64));
        (from < to).then(|| (from, window.part(to_usize(from - *offset), to_usize(to - from))))
    })
}

/// Room for what of `range` no window is filled from.
fn gaps(range: &Range<u64>, into: &mut [(u64, Window<'_>)]) -> Vec<(u64, Vec<u8>)> {
    let mut at = range.start;
    let mut ends: Vec<_> = parts(range, into).map(|(at, part)| at..at + part.len() as u64).collect();
    ends.push(range.end..range.end);
    let between = ends.into_iter().filter_map(|part| {
        let gap = at..part.start;
        at = part.end;
        (!gap.is_empty()).then(|| (gap.start, vec![0; to_usize(gap.end - gap.start)]))
    });
    between.collect()
}

/// Copies to the windows what they want of `bytes`, which begin at `start`.
fn copy(start: u64, bytes: &[u8], into: &mut [(u64, Window<'_>)]) {
    for (at, mut part) in parts(&(start..start + bytes.len() as u64), into) {
        let (from, len) = (to_usize(at - start), part.len());
        part.write(0, &bytes[from..from + len]);
    }
}

impl Drop for CachedObject {
    fn drop(&mut self) {
        if let Ok(entry) = std::mem::replace(&mut self.entry, Err(String::new()))
            && entry.is_writable()
        {
            Writers::of_process().leave(entry);
        }
    }
}

impl Object for CachedObject {
    fn location(&self) -> &str {
        &self.location
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn identity(&self) -> Identity {
        self.identity.clone()
    }

    fn read_into(&self, offset: u64, into: Window<'_>, cx: &mut ReadContext) -> Result<()> {
        self.read_scattered(&mut [(offset, into)], cx)
    }

    fn read_scattered(&self, into: &mut [(u64, Window<'_>)], cx: &mut ReadContext) -> Result<()> {
        if cx.afresh {
            return self.remote()?.read_scattered(into, cx);
        }
        if self.read_file(|file| file.read_scattered(into, cx)).is_some() {
            return Ok(());
        }
        // What was said of the remote object does not hold for the file.
        cx.cached = None;
        let end = |(at, window): &(u64, Window<'_>)| at.saturating_add(window.len() as u64);
        let (Some((begin, _)), Some(last)) = (into.first(), into.last()) else { return Ok(()) };
        let (begin, last) = (*begin, end(last));
        match &self.entry {
            // Where windows lie outside of the object, or are not as was promised, that says what is wrong.
            Ok(entry) if last <= self.bytes && into.is_sorted_by(|one, next| end(one) <= next.0) => {
                let blocks = to_usize(begin / BLOCK_BYTES)..to_usize(last.div_ceil(BLOCK_BYTES));
                self.read_blocks(entry, blocks, into, cx)
            }
            _ => self.remote()?.read_scattered(into, cx),
        }
    }

    fn scatters(&self) -> bool {
        self.file().is_none()
    }

    fn read_to_staging(
        &self,
        range: Range<u64>,
        mut buffer: Window<'_>,
        cx: &mut ReadContext,
    ) -> Result<usize> {
        let len = buffer.len();
        let whole = buffer.part(0, len);
        if let Some(start) = self.read_file(|file| file.read_to_staging(range.clone(), whole, cx)) {
            return Ok(start);
        }
        let len = to_usize(range.end - range.start);
        self.read_into(range.start, buffer.part(0, len), cx).map(|()| 0)
    }

    fn map(&self) -> Result<FileMapping> {
        self.file.as_ref().map_or_else(|| self.remote()?.map(), |file| file.map())
    }

    fn may_come_better(&self) -> bool {
        true
    }

    fn is_cached(&self, range: &Range<u64>) -> Option<bool> {
        self.file().map_or(Some(false), |file| file.is_cached(range))
    }

    fn prefetch(&self, range: Range<u64>) -> bool {
        self.file().is_some_and(|file| file.prefetch(range))
    }

    fn avoid_direct(&self) {
        if let Some(file) = &self.file {
            file.avoid_direct();
        }
    }

    fn notes(&self) -> Vec<String> {
        let file = self.file.iter().flat_map(|file| file.notes());
        let remote = self.remote.get().into_iter().flat_map(|remote| remote.notes());
        let own = self.entry.as_ref().map_or_else(|why| Some(why.clone()), |entry| entry.said());
        file.chain(remote).chain(own).collect()
    }

    fn verify_unchanged(&self) -> Result<()> {
        if let Ok(entry) = &self.entry
            && !entry.is_unchanged()
        {
            entry.doubt();
            return Err(Error::new(
                ErrorKind::Changed,
                "its entry in the disk cache was written to by another program while it was being loaded",
            )
            .object(entry.data_path().display().to_string())
            .remedy("Load again: the entry's bytes are compared with their checksums"));
        }
        self.remote.get().map_or(Ok(()), |remote| remote.verify_unchanged())
    }
}
