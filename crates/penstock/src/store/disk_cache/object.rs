//! A remote object, read through the disk cache.
//!
//! What of a range is on disk comes from there, the rest from the remote object, with one request wherever it goes; whole
//! blocks of that are handed to the writers, also of a read that failed or was stopped. A block that two reads share is put
//! together first, up to a limit.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::entry::Entry;
use super::files::BLOCK_BYTES;
use super::writers::{BUFFER_BYTES, Writers};
use crate::error::Result;
use crate::memory::Window;
use crate::store::{Identity, LocalStore, Object, ReadContext, Store, location_of};

/// Blocks of one object that are being put together, at most: 32 MiB.
const MOST_PIECES: usize = 64;

/// Windows of at least this many bytes on average are worth a read of the disk each; smaller ones share one and are copied.
const WORTH_A_READ: u64 = 256 << 10;

/// What part of the time that bytes took to come a reader waits for a buffer at most. Readers come in bursts, and a disk
/// that is fast enough on the whole should not miss any of one.
const PATIENCE: u32 = 25;

/// A remote object whose blocks are kept on disk as they come.
pub(super) struct CachingObject {
    remote: Arc<dyn Object>,
    /// The entry's file; none where it cannot be opened, and then nothing is read from it.
    local: Option<Arc<dyn Object>>,
    entry: Arc<Entry>,
    pieces: Mutex<HashMap<usize, Pieces>>,
}

/// A block of which only parts have come so far.
struct Pieces {
    bytes: Vec<u8>,
    /// What of it has come: disjoint, sorted.
    there: Vec<Range<usize>>,
}

/// Consecutive bytes of the object, in memory in one part or in several.
struct Came<'a>(Vec<(u64, &'a [u8])>);

impl CachingObject {
    pub(super) fn new(remote: Arc<dyn Object>, entry: Arc<Entry>, store: &LocalStore) -> Self {
        let local = store.open(&location_of(entry.data_path())).ok();
        Self { remote, local, entry, pieces: Mutex::default() }
    }

    /// Keeps the first bytes, which opening the remote object has brought.
    pub(super) fn keep_head(&self) {
        let len = to_usize(self.remote.bytes().min(BLOCK_BYTES));
        if len == 0 || self.entry.has(0) {
            return;
        }
        let mut head = vec![0; len];
        if self.remote.read_into(0, Window::from_slice(&mut head), &mut ReadContext::default()).is_ok() {
            self.keep(&Came(vec![(0, &head)]), Duration::ZERO);
        }
    }

    /// Where the run of blocks that are alike (on disk, or not) ends, from the block of `at` on.
    fn run(&self, at: u64, end: u64) -> (bool, u64) {
        let first = to_usize(at / BLOCK_BYTES);
        let local = self.is_here(first);
        // Not of the first block again: it may have come to the disk by now.
        let after =
            (first + 1..to_usize(end.div_ceil(BLOCK_BYTES))).find(|block| self.is_here(*block) != local);
        (local, after.map_or(end, |block| self.entry.range(block).start.min(end)))
    }

    fn is_here(&self, block: usize) -> bool {
        self.local.is_some() && self.entry.has(block)
    }

    /// Reads what is on disk, block by block where bytes must be compared. Says how far it came: not to the end where a
    /// block turned out to be damaged, or could not be read.
    fn read_local(&self, range: Range<u64>, into: &mut Window<'_>, cx: &mut ReadContext) -> u64 {
        let Some(local) = &self.local else { return range.start };
        let mut at = range.start;
        let mut whole = Vec::new();
        while at < range.end {
            let block = to_usize(at / BLOCK_BYTES);
            let verified = |block: &usize| self.entry.is_verified(*block);
            if verified(&block) {
                let mut others = block + 1..to_usize(range.end.div_ceil(BLOCK_BYTES));
                let after = others.find(|block| !verified(block));
                let end = after.map_or(range.end, |block| self.entry.range(block).start.min(range.end));
                let part = into.part(to_usize(at - range.start), to_usize(end - at));
                if let Err(error) = local.read_into(at, part, cx) {
                    // Which of them it was is not known. Those that are intact pass the comparison next time.
                    let last = to_usize(end.div_ceil(BLOCK_BYTES));
                    (block + 1..last).for_each(|block| self.entry.doubt(block));
                    self.entry.unreadable(block, &error);
                    break;
                }
                at = end;
                continue;
            }
            let blocks = self.entry.range(block);
            whole.resize(to_usize(blocks.end - blocks.start), 0);
            let read = local.read_into(blocks.start, Window::from_slice(&mut whole), cx);
            if let Err(error) = read {
                self.entry.unreadable(block, &error);
                break;
            }
            if !self.entry.verify(block, &whole) {
                break;
            }
            let end = blocks.end.min(range.end);
            let part = &whole[to_usize(at - blocks.start)..to_usize(end - blocks.start)];
            into.write(to_usize(at - range.start), part);
            at = end;
        }
        at
    }

    /// Reads what is on disk to windows. Says how far it came, as [`CachingObject::read_local`].
    fn scatter_local(&self, range: Range<u64>, into: &mut [(u64, Window<'_>)], cx: &mut ReadContext) -> u64 {
        let lens: Vec<u64> = parts(&range, into).map(|(_, part)| part.len() as u64).collect();
        if lens.len() == 1 || lens.iter().sum::<u64>() >= lens.len() as u64 * WORTH_A_READ {
            for (at, mut part) in parts(&range, into) {
                let end = at + part.len() as u64;
                let reached = self.read_local(at..end, &mut part, cx);
                if reached < end {
                    return reached;
                }
            }
            return range.end;
        }
        let mut bytes = vec![0; to_usize(range.end - range.start)];
        let reached = self.read_local(range.clone(), &mut Window::from_slice(&mut bytes), cx);
        let read = Came(vec![(range.start, &bytes[..to_usize(reached - range.start)])]);
        for (at, mut part) in parts(&(range.start..reached), into) {
            read.copy(at..at + part.len() as u64, |start, bytes| part.write(start, bytes));
        }
        reached
    }

    /// Asks for all of `range` at once, to windows, and keeps it with what lies between them. Of a read that fails, what
    /// came before is kept.
    #[allow(unsafe_code)]
    fn read_remote(
        &self,
        range: Range<u64>,
        into: &mut [(u64, Window<'_>)],
        cx: &mut ReadContext,
    ) -> Result<()> {
        let mut between = gaps(&range, into);
        // The writers take it from there.
        let mut all: Vec<_> = parts(&range, into).map(|(at, part)| (at, part.temporal())).collect();
        all.extend(between.iter_mut().map(|(at, gap)| (*at, Window::from_slice(gap))));
        all.sort_by_key(|(at, _)| *at);
        let began = Instant::now();
        cx.reached = None;
        let done = self.remote.read_scattered(&mut all, cx);
        let (reached, patience) = match done {
            Ok(()) => (range.end, began.elapsed() / PATIENCE),
            // Whoever has stopped the load waits for it.
            Err(_) => (cx.reached.take().unwrap_or(range.start), Duration::ZERO),
        };
        let came = all.iter().take_while(|(at, _)| *at < reached).map(|(at, part)| {
            let len = part.len().min(to_usize(reached - at));
            // SAFETY: these windows, which are still ours alone, are `range` without gaps, and the read has just filled them:
            // all of them, or up to where the remote object has said.
            (*at, unsafe { part.assume_filled(0, len) })
        });
        self.keep(&Came(came.collect()), patience);
        done
    }

    /// Hands what came to the writers: whole blocks at once, others when they are whole.
    fn keep(&self, came: &Came<'_>, patience: Duration) {
        let Range { start: mut at, end } = came.range();
        while at < end {
            let block = to_usize(at / BLOCK_BYTES);
            let range = self.entry.range(block);
            if range.start < at || range.end > end {
                let stop = range.end.min(end);
                self.piece(block, at..stop, came, patience);
                at = stop;
                continue;
            }
            // As many whole blocks as fit a buffer and are not there yet.
            let mut last = block;
            while last < self.entry.blocks() && self.entry.range(last).end <= end {
                let fits = self.entry.range(last).end - range.start <= BUFFER_BYTES as u64;
                if !fits || !self.entry.claim(last) {
                    break;
                }
                last += 1;
            }
            if last == block {
                at = range.end;
                continue;
            }
            self.write(block..last, came, patience);
            at = self.entry.range(last - 1).end;
        }
    }

    /// A part of a block.
    fn piece(&self, block: usize, part: Range<u64>, came: &Came<'_>, patience: Duration) {
        if self.entry.has(block) {
            return;
        }
        let range = self.entry.range(block);
        let len = to_usize(range.end - range.start);
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        if pieces.len() >= MOST_PIECES && !pieces.contains_key(&block) {
            return;
        }
        let held = pieces.entry(block).or_insert_with(|| Pieces { bytes: vec![0; len], there: Vec::new() });
        let (start, end) = (to_usize(part.start - range.start), to_usize(part.end - range.start));
        came.copy(part, |at, bytes| held.bytes[start + at..start + at + bytes.len()].copy_from_slice(bytes));
        held.add(start..end);
        if held.there != [0..len] {
            return;
        }
        let Some(held) = pieces.remove(&block) else { return };
        drop(pieces);
        if self.entry.claim(block) {
            self.write(block..block + 1, &Came(vec![(range.start, &held.bytes)]), patience);
        }
    }

    /// Blocks that were claimed, and came.
    fn write(&self, blocks: Range<usize>, came: &Came<'_>, patience: Duration) {
        let range = self.entry.range(blocks.start).start..self.entry.range(blocks.end - 1).end;
        let len = to_usize(range.end - range.start);
        let fill = |mut buffer: Window<'_>| came.copy(range, |at, bytes| buffer.write(at, bytes));
        Writers::of_process().write(&self.entry, blocks, len, fill, patience);
    }
}

impl Came<'_> {
    fn range(&self) -> Range<u64> {
        let end = self.0.last().map_or(0, |(at, bytes)| at + bytes.len() as u64);
        self.0.first().map_or(end, |(at, _)| *at)..end
    }

    /// Hands on the bytes of `range`, with their positions in it.
    fn copy(&self, range: Range<u64>, mut to: impl FnMut(usize, &[u8])) {
        let first = self.0.partition_point(|(at, bytes)| at + bytes.len() as u64 <= range.start);
        for (at, bytes) in self.0[first..].iter().take_while(|(at, _)| *at < range.end) {
            let (from, end) = (range.start.max(*at), range.end.min(at + bytes.len() as u64));
            to(to_usize(from - range.start), &bytes[to_usize(from - at)..to_usize(end - at)]);
        }
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

impl Pieces {
    /// Adds a range, and joins what touches.
    fn add(&mut self, range: Range<usize>) {
        self.there.push(range);
        self.there.sort_by_key(|range| range.start);
        let mut joined: Vec<Range<usize>> = Vec::with_capacity(self.there.len());
        for range in self.there.drain(..) {
            match joined.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => joined.push(range),
            }
        }
        self.there = joined;
    }
}

impl Drop for CachingObject {
    fn drop(&mut self) {
        Writers::of_process().leave(&self.entry);
    }
}

impl Object for CachingObject {
    fn location(&self) -> &str {
        self.remote.location()
    }

    fn bytes(&self) -> u64 {
        self.remote.bytes()
    }

    fn identity(&self) -> Identity {
        self.remote.identity()
    }

    fn read_into(&self, offset: u64, into: Window<'_>, cx: &mut ReadContext) -> Result<()> {
        self.read_scattered(&mut [(offset, into)], cx)
    }

    fn read_scattered(&self, into: &mut [(u64, Window<'_>)], cx: &mut ReadContext) -> Result<()> {
        let (Some((begin, _)), Some((last, window))) = (into.first(), into.last()) else { return Ok(()) };
        let Some(end) = last.checked_add(window.len() as u64).filter(|end| *end <= self.bytes()) else {
            // It says what is wrong.
            return self.remote.read_scattered(into, cx);
        };
        let (begin, end_of) =
            (*begin, |(at, window): &(u64, Window<'_>)| at.saturating_add(window.len() as u64));
        if !into.is_sorted_by(|one, next| end_of(one) <= next.0) {
            // Not as was promised: one by one.
            return into.iter_mut().try_for_each(|(at, window)| {
                let len = window.len();
                self.read_into(*at, window.part(0, len), cx)
            });
        }
        // What was said of the remote object does not hold for the file.
        cx.cached = None;
        let mut at = begin;
        while at < end {
            let (local, until) = self.run(at, end);
            let is_wanted = parts(&(at..until), into).next().is_some();
            let reached = match (is_wanted, local) {
                (false, _) => until,
                (true, true) => self.scatter_local(at..until, into, cx),
                (true, false) => at,
            };
            if reached == at {
                // Not on disk, or damaged there.
                let until =
                    if local { self.entry.range(to_usize(at / BLOCK_BYTES)).end.min(until) } else { until };
                self.read_remote(at..until, into, cx)?;
                at = until;
            } else {
                at = reached;
            }
        }
        Ok(())
    }

    fn scatters(&self) -> bool {
        self.remote.scatters()
    }

    fn read_to_staging(
        &self,
        range: Range<u64>,
        mut buffer: Window<'_>,
        cx: &mut ReadContext,
    ) -> Result<usize> {
        let len = to_usize(range.end - range.start);
        self.read_into(range.start, buffer.part(0, len), cx).map(|()| 0)
    }

    fn is_cached(&self, range: &Range<u64>) -> Option<bool> {
        self.remote.is_cached(range)
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = self.remote.notes();
        notes.extend(self.entry.notes());
        notes
    }

    fn verify_unchanged(&self) -> Result<()> {
        self.remote.verify_unchanged()
    }
}

/// A remote object that is not cached, and why.
pub(super) struct Noted {
    remote: Arc<dyn Object>,
    note: String,
}

impl Noted {
    pub(super) fn new(remote: Arc<dyn Object>, note: String) -> Self {
        Self { remote, note }
    }
}

impl Object for Noted {
    fn location(&self) -> &str {
        self.remote.location()
    }

    fn bytes(&self) -> u64 {
        self.remote.bytes()
    }

    fn identity(&self) -> Identity {
        self.remote.identity()
    }

    fn read_into(&self, offset: u64, into: Window<'_>, cx: &mut ReadContext) -> Result<()> {
        self.remote.read_into(offset, into, cx)
    }

    fn read_scattered(&self, into: &mut [(u64, Window<'_>)], cx: &mut ReadContext) -> Result<()> {
        self.remote.read_scattered(into, cx)
    }

    fn scatters(&self) -> bool {
        self.remote.scatters()
    }

    fn read_to_staging(&self, range: Range<u64>, buffer: Window<'_>, cx: &mut ReadContext) -> Result<usize> {
        self.remote.read_to_staging(range, buffer, cx)
    }

    fn is_cached(&self, range: &Range<u64>) -> Option<bool> {
        self.remote.is_cached(range)
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = self.remote.notes();
        notes.push(self.note.clone());
        notes
    }

    fn verify_unchanged(&self) -> Result<()> {
        self.remote.verify_unchanged()
    }
}

/// Lengths here are lengths of memory that exists, so they fit.
fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
