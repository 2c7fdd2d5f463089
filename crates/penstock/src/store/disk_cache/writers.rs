//! The threads of the process that write to disk caches.
//!
//! Whoever reads copies its bytes to a buffer and goes on. There are so many buffers and no more; where none becomes free
//! in the moment that a reader may wait, the bytes are not kept. Threads come with the work and go when there has been none for a moment. They belong to the
//! process: a child after `fork` has none of them, and begins anew.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::entry::Entry;
use crate::memory::{PerProcess, Region, Window};

/// Bytes of a buffer: what a load asks an object store for at once.
pub(super) const BUFFER_BYTES: usize = 8 << 20;
/// Buffers of the process: 256 MiB wait for the disk at most, what all readers of a load may bring at the same moment.
const MOST_BUFFERS: usize = 32;
/// Threads that write at once: enough for any disk, with direct writes of this size.
const MOST_THREADS: usize = 4;
/// How long a thread waits for more to do.
const IDLE: Duration = Duration::from_millis(200);

enum Job {
    Write(Write),
    /// See whether all of it is there.
    Close(Arc<Entry>),
}

/// Blocks that are to be written, and a use of their entry: however it ends, it counts no longer, and what was not written
/// may be written by others.
struct Write {
    entry: Arc<Entry>,
    blocks: Range<usize>,
    len: usize,
    buffer: Buffer,
}

impl Write {
    fn carry_out(mut self) {
        self.entry.write(self.blocks.start, self.buffer.bytes(self.len));
        self.blocks = 0..0;
    }
}

impl Drop for Write {
    fn drop(&mut self) {
        self.entry.leave_out(self.blocks.clone());
        self.buffer.writers.leave(&self.entry);
    }
}

/// One of the buffers, which is free again when it is dropped.
struct Buffer {
    writers: &'static Writers,
    region: Option<Region>,
}

impl Buffer {
    /// Its first `len` bytes. (Only `drop` leaves none.)
    fn bytes(&mut self, len: usize) -> &mut [u8] {
        self.region.as_mut().map_or(&mut [], |region| &mut region.as_mut_slice()[..len])
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.writers.lock().free.extend(self.region.take());
        self.writers.freed.notify_one();
    }
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    free: Vec<Region>,
    /// Buffers that exist.
    buffers: usize,
    threads: usize,
    /// Threads that wait for a job.
    idle: usize,
    busy: usize,
}

/// The writing threads of the process, and the buffers that they write.
#[derive(Default)]
pub(super) struct Writers {
    state: Mutex<State>,
    more: Condvar,
    freed: Condvar,
    done: Condvar,
}

static WRITERS: PerProcess<Writers> = PerProcess::new();

impl Writers {
    /// This process's.
    pub(super) fn of_process() -> &'static Self {
        WRITERS.get_or_init(Self::default)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has consecutive blocks written that were claimed, whose `len` bytes `fill` copies to a buffer. Where none becomes free
    /// within `patience`, they are left out.
    pub(super) fn write(
        &'static self,
        entry: &Arc<Entry>,
        blocks: Range<usize>,
        len: usize,
        fill: impl FnOnce(Window<'_>),
        patience: Duration,
    ) {
        let Some(buffer) = self.buffer(patience) else { return entry.leave_out(blocks) };
        entry.enter();
        let mut write = Write { entry: Arc::clone(entry), blocks, len, buffer };
        fill(Window::from_slice(write.buffer.bytes(len)));
        self.add(Job::Write(write));
    }

    /// Ends one use of an entry; after the last it is made complete, if all of it is there.
    pub(super) fn leave(&'static self, entry: &Arc<Entry>) {
        if entry.leave() {
            self.add(Job::Close(Arc::clone(entry)));
        }
    }

    fn buffer(&'static self, patience: Duration) -> Option<Buffer> {
        let region = self.region(patience)?;
        Some(Buffer { writers: self, region: Some(region) })
    }

    fn region(&self, patience: Duration) -> Option<Region> {
        let none = |state: &mut State| state.free.is_empty() && state.buffers == MOST_BUFFERS;
        let waited = self.freed.wait_timeout_while(self.lock(), patience, none);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if let Some(buffer) = state.free.pop() {
            return Some(buffer);
        }
        if state.buffers == MOST_BUFFERS {
            return None;
        }
        state.buffers += 1;
        drop(state);
        let made = Region::reserve(BUFFER_BYTES).ok();
        if made.is_none() {
            self.lock().buffers -= 1;
        }
        made
    }

    fn add(&'static self, job: Job) {
        let mut state = self.lock();
        state.jobs.push_back(job);
        if state.idle > 0 || state.threads == MOST_THREADS {
            drop(state);
            self.more.notify_one();
            return;
        }
        state.threads += 1;
        drop(state);
        let started = std::thread::Builder::new().name("cache-penstock".into()).spawn(|| self.run());
        if started.is_err() {
            let mut state = self.lock();
            state.threads -= 1;
            if state.threads == 0 {
                // No one will ever do it. What was not written is not on the map.
                let jobs = std::mem::take(&mut state.jobs);
                drop(state);
                drop(jobs);
                self.done.notify_all();
            }
        }
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                state.busy += 1;
                drop(state);
                // A panic is a bug, which costs what was to be kept, and must not leave `flush` waiting.
                let _ = catch_unwind(AssertUnwindSafe(|| match job {
                    Job::Write(write) => write.carry_out(),
                    Job::Close(entry) => entry.close(),
                }));
                state = self.lock();
                state.busy -= 1;
                if state.busy == 0 && state.jobs.is_empty() {
                    self.done.notify_all();
                }
                continue;
            }
            state.idle += 1;
            let (woken, waited) = self.more.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if waited.timed_out() && state.jobs.is_empty() {
                state.threads -= 1;
                if state.threads == 0 {
                    state.buffers -= state.free.len();
                    state.free.clear();
                }
                return;
            }
        }
    }

    /// Waits until nothing is left to do; false where that takes longer.
    pub(super) fn flush(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        let mut state = self.lock();
        while state.busy > 0 || !state.jobs.is_empty() {
            let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                return false;
            };
            state = self.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;

    use super::super::files::BLOCK_BYTES;
    use super::*;
    use crate::store::block_map::BlockMap;
    use crate::store::locked_file::LockedFile;

    fn entry(directory: &Path, bytes: u64) -> Arc<Entry> {
        let file = |name| {
            let how = File::options().read(true).write(true).create(true).truncate(false).to_owned();
            LockedFile::new(how.open(directory.join(name)).unwrap())
        };
        let data = file("data");
        data.set_len(bytes).unwrap();
        let (map, _) = BlockMap::open(file("map"), "an object", bytes, BLOCK_BYTES).unwrap();
        Arc::new(Entry::new(directory.to_owned(), data, map, false))
    }

    #[test]
    fn a_panic_while_a_buffer_is_filled_costs_neither_buffers_nor_blocks_nor_the_entry() {
        let directory = tempfile::tempdir().unwrap();
        let entry = entry(directory.path(), 1000);
        let writers: &'static Writers = Box::leak(Box::default());
        for _ in 0..=MOST_BUFFERS {
            assert!(entry.claim(0));
            let filled = catch_unwind(AssertUnwindSafe(|| {
                writers.write(&entry, 0..1, 1000, |_| panic!("a bug"), Duration::ZERO);
            }));
            assert!(filled.is_err());
        }
        assert!(entry.claim(0));
        writers.write(&entry, 0..1, 1000, |mut buffer| buffer.write(0, &[7; 1000]), Duration::ZERO);
        assert!(writers.flush(Duration::from_secs(60)));
        assert!(entry.has(0));
        writers.leave(&entry);
        assert!(writers.flush(Duration::from_secs(60)));
        assert!(directory.path().join("complete").exists());
    }
}
