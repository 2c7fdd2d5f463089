//! A remote object, read through the disk cache.
//!
//! What of a range is on disk comes from there, the rest from the remote object; whole blocks of that are handed to the
//! writers. A block that two reads share is put together first, up to a limit.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::directory::BLOCK_BYTES;
use super::entry::Entry;
use super::writers::{BUFFER_BYTES, Writers};
use crate::error::Result;
use crate::memory::Window;
use crate::store::{Identity, Lane, LocalStore, Object, Store, location_of};

/// Blocks of one object that are being put together, at most: 32 MiB.
const MOST_PIECES: usize = 64;

/// What part of the time that bytes took to come a reader waits for a buffer at most. Readers come in bursts, and a disk
/// that is fast enough on the whole should not miss any of one.
const PATIENCE: u32 = 25;

/// See the module.
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
        if self.remote.read_into(0, Window::from_slice(&mut head), &mut Lane::default()).is_ok() {
            self.keep(0, &head, Duration::ZERO);
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
    fn read_local(&self, range: Range<u64>, into: &mut Window<'_>, lane: &mut Lane) -> u64 {
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
                if let Err(error) = local.read_into(at, part, lane) {
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
            let read = local.read_into(blocks.start, Window::from_slice(&mut whole), lane);
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

    #[allow(unsafe_code)]
    fn read_remote(&self, range: Range<u64>, mut into: Window<'_>, lane: &mut Lane) -> Result<()> {
        let len = into.len();
        let began = Instant::now();
        // The writers take it from there.
        self.remote.read_into(range.start, into.part(0, len).passing(), lane)?;
        let patience = began.elapsed() / PATIENCE;
        // SAFETY: the read has just filled all of it, and `into` is still ours alone.
        let came = unsafe { into.assume_filled(0, len) };
        self.keep(range.start, came, patience);
        Ok(())
    }

    /// Hands what came to the writers: whole blocks at once, others when they are whole.
    fn keep(&self, offset: u64, bytes: &[u8], patience: Duration) {
        let end = offset + bytes.len() as u64;
        let part = |range: Range<u64>| &bytes[to_usize(range.start - offset)..to_usize(range.end - offset)];
        let mut at = offset;
        while at < end {
            let block = to_usize(at / BLOCK_BYTES);
            let range = self.entry.range(block);
            if range.start < at || range.end > end {
                let stop = range.end.min(end);
                self.piece(block, to_usize(at - range.start), part(at..stop), patience);
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
            let stop = self.entry.range(last - 1).end;
            self.write(block..last, part(range.start..stop), patience);
            at = stop;
        }
    }

    /// A part of a block.
    fn piece(&self, block: usize, start: usize, bytes: &[u8], patience: Duration) {
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
        held.bytes[start..start + bytes.len()].copy_from_slice(bytes);
        held.add(start..start + bytes.len());
        if held.there != [0..len] {
            return;
        }
        let Some(held) = pieces.remove(&block) else { return };
        drop(pieces);
        if self.entry.claim(block) {
            self.write(block..block + 1, &held.bytes, patience);
        }
    }

    fn write(&self, blocks: Range<usize>, bytes: &[u8], patience: Duration) {
        if !Writers::of_process().write(&self.entry, blocks.start, bytes, patience) {
            self.entry.leave_out(blocks);
        }
    }
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

    fn read_into(&self, offset: u64, mut into: Window<'_>, lane: &mut Lane) -> Result<()> {
        let Some(end) = offset.checked_add(into.len() as u64).filter(|end| *end <= self.bytes()) else {
            // It says what is wrong.
            return self.remote.read_into(offset, into, lane);
        };
        // What was said of the remote object does not hold for the file.
        lane.cached = None;
        let mut at = offset;
        while at < end {
            let (local, until) = self.run(at, end);
            let mut part = into.part(to_usize(at - offset), to_usize(until - at));
            let reached = if local { self.read_local(at..until, &mut part, lane) } else { at };
            if reached == at {
                // Not on disk, or damaged there.
                let until =
                    if local { self.entry.range(to_usize(at / BLOCK_BYTES)).end.min(until) } else { until };
                self.read_remote(at..until, into.part(to_usize(at - offset), to_usize(until - at)), lane)?;
                at = until;
            } else {
                at = reached;
            }
        }
        Ok(())
    }

    fn read_to_slot(&self, range: Range<u64>, mut slot: Window<'_>, lane: &mut Lane) -> Result<usize> {
        let len = to_usize(range.end - range.start);
        self.read_into(range.start, slot.part(0, len), lane).map(|()| 0)
    }

    fn is_cached(&self, range: &Range<u64>) -> Option<bool> {
        self.remote.is_cached(range)
    }

    fn remarks(&self) -> Vec<String> {
        let mut remarks = self.remote.remarks();
        remarks.extend(self.entry.remarks());
        remarks
    }

    fn verify_unchanged(&self) -> Result<()> {
        self.remote.verify_unchanged()
    }
}

/// A remote object that is not cached, and why.
pub(super) struct Noted {
    remote: Arc<dyn Object>,
    remark: String,
}

impl Noted {
    pub(super) fn new(remote: Arc<dyn Object>, remark: String) -> Self {
        Self { remote, remark }
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

    fn read_into(&self, offset: u64, into: Window<'_>, lane: &mut Lane) -> Result<()> {
        self.remote.read_into(offset, into, lane)
    }

    fn read_scattered(&self, into: &mut [(u64, Window<'_>)], lane: &mut Lane) -> Result<()> {
        self.remote.read_scattered(into, lane)
    }

    fn scatters(&self) -> bool {
        self.remote.scatters()
    }

    fn read_to_slot(&self, range: Range<u64>, slot: Window<'_>, lane: &mut Lane) -> Result<usize> {
        self.remote.read_to_slot(range, slot, lane)
    }

    fn is_cached(&self, range: &Range<u64>) -> Option<bool> {
        self.remote.is_cached(range)
    }

    fn remarks(&self) -> Vec<String> {
        let mut remarks = self.remote.remarks();
        remarks.push(self.remark.clone());
        remarks
    }

    fn verify_unchanged(&self) -> Result<()> {
        self.remote.verify_unchanged()
    }
}

/// Lengths here are lengths of memory that exists, so they fit.
fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
