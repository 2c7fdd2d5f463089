//! The files of a save cut into parts, and the queue that writers take them from.
//!
//! Parts are taken in the order of files and of bytes. A failure ends the queue: no part is taken after it, and the first one
//! is what the save's owner gets to know.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use super::lock;
use crate::device::SourceBytes;
use crate::error::{Error, Result};
use crate::manifest::{BLOCK_BYTES, FileHashes};
use crate::store::sink::SinkObject;

/// A file of the save.
pub(super) struct SavedFile {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) object: Arc<dyn SinkObject>,
    part_bytes: u64,
    pieces: Vec<SourceBytes>,
    /// Where each of the pieces ends in the file.
    ends: Vec<u64>,
    left: AtomicU64,
    done: AtomicBool,
    /// Values of blocks, by their numbers.
    values: Mutex<Vec<[u8; 32]>>,
}

impl SavedFile {
    pub(super) fn new(
        name: &str,
        bytes: u64,
        part_bytes: u64,
        pieces: Vec<SourceBytes>,
        object: Arc<dyn SinkObject>,
    ) -> Self {
        let pieces: Vec<_> = pieces.into_iter().filter(|piece| !piece.is_empty()).collect();
        let ends = pieces.iter().scan(0, |end, piece| {
            *end += piece.len() as u64;
            Some(*end)
        });
        let ends = ends.collect();
        let parts = bytes.div_ceil(part_bytes).max(1);
        let (left, done, values) = (AtomicU64::new(parts), AtomicBool::new(false), Mutex::default());
        Self { name: name.to_owned(), bytes, object, part_bytes, pieces, ends, left, done, values }
    }

    /// How many parts it has: at least one, which may be empty.
    pub(super) fn parts(&self) -> u64 {
        self.bytes.div_ceil(self.part_bytes).max(1)
    }

    fn part(&self, number: u64) -> Range<u64> {
        let start = number * self.part_bytes;
        start..self.bytes.min(start + self.part_bytes)
    }

    /// What of which piece a range of the file is made of.
    pub(super) fn pieces_of(&self, range: &Range<u64>) -> Vec<(&SourceBytes, Range<usize>)> {
        let first = self.ends.partition_point(|end| *end <= range.start);
        let mut found = Vec::new();
        for (piece, end) in self.pieces.iter().zip(&self.ends).skip(first) {
            let start = end - piece.len() as u64;
            if start >= range.end {
                break;
            }
            let of = |at: u64| usize::try_from(at - start).unwrap_or(usize::MAX);
            found.push((piece, of(range.start.max(start))..of(range.end.min(*end))));
        }
        found
    }

    /// Notes the values of the blocks from `offset` on.
    pub(super) fn hashed(&self, offset: u64, of: Vec<[u8; 32]>) {
        let mut values = lock(&self.values);
        let first = usize::try_from(offset / BLOCK_BYTES).unwrap_or(usize::MAX);
        if values.len() < first + of.len() {
            values.resize(first + of.len(), [0; 32]);
        }
        values[first..first + of.len()].copy_from_slice(&of);
    }

    pub(super) fn hashes(&self) -> Result<FileHashes> {
        FileHashes::new(&self.name, self.bytes, BLOCK_BYTES, lock(&self.values).clone())
    }

    /// Notes that a part is written; whether it was the last.
    pub(super) fn part_done(&self) -> bool {
        self.left.fetch_sub(1, Ordering::AcqRel) == 1
    }

    pub(super) fn finished(&self) {
        self.done.store(true, Ordering::Release);
    }

    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }
}

/// A part that a writer has taken.
pub(super) struct Part {
    pub(super) file: Arc<SavedFile>,
    pub(super) range: Range<u64>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<(Arc<SavedFile>, Range<u64>)>,
    closed: bool,
    failure: Option<Error>,
}

/// What is to be written.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    stopped: AtomicBool,
    /// Bytes written.
    pub(super) written: AtomicU64,
}

impl Queue {
    pub(super) fn push(&self, file: &Arc<SavedFile>) {
        lock(&self.state).waiting.push_back((Arc::clone(file), 0..file.parts()));
        self.changed.notify_all();
    }

    /// The next part, waited for; `None` once there will be none.
    pub(super) fn take(&self) -> Option<Part> {
        let mut state = lock(&self.state);
        loop {
            if state.failure.is_some() {
                return None;
            }
            if let Some((file, left)) = state.waiting.front_mut() {
                let number = left.start;
                left.start += 1;
                let (file, is_last) = (Arc::clone(file), left.is_empty());
                if is_last {
                    state.waiting.pop_front();
                }
                let range = file.part(number);
                return Some(Part { file, range });
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }

    /// Nothing is added any more: writers end when nothing is left.
    pub(super) fn close(&self) {
        lock(&self.state).closed = true;
        self.changed.notify_all();
    }

    pub(super) fn reopen(&self) {
        lock(&self.state).closed = false;
    }

    /// Ends the save; the first failure stays.
    pub(super) fn fail(&self, error: Error) {
        let mut state = lock(&self.state);
        state.failure.get_or_insert(error);
        state.waiting.clear();
        self.stopped.store(true, Ordering::Relaxed);
        drop(state);
        self.changed.notify_all();
    }

    pub(super) fn failure(&self) -> Option<Error> {
        lock(&self.state).failure.clone()
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Wakes those who wait in [`Queue::wait_until`].
    pub(super) fn progressed(&self) {
        // Under the lock, so that nobody goes to sleep between having looked and being woken.
        drop(lock(&self.state));
        self.changed.notify_all();
    }

    /// Waits until `is_so`, at most until `end`.
    ///
    /// # Errors
    /// What ended the save.
    pub(super) fn wait_until(&self, end: Instant, is_so: impl Fn() -> bool) -> Result<()> {
        let mut state = lock(&self.state);
        loop {
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            let left = end.saturating_duration_since(Instant::now());
            if is_so() || left.is_zero() {
                return Ok(());
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }
}
