//! The threads of the process that write to disk caches.
//!
//! Whoever reads copies its bytes to a buffer and goes on. There are so many buffers and no more; where none becomes free in
//! the moment that a reader may wait, the bytes are not kept. Threads come with the work, and go with the buffers when there
//! has been none for a moment: work comes in bursts, and new memory costs more than what is copied to it. They belong to the
//! process: a child after `fork` has none of them, and begins anew.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::entry::Entry;
use crate::memory::{PerProcess, Region};

/// Bytes of a buffer: what a load asks an object store for at once.
pub(super) const BUFFER_BYTES: usize = 8 << 20;
/// Buffers of the process: 256 MiB wait for the disk at most.
const MOST_BUFFERS: usize = 32;
/// Threads that write at once: enough for any disk, with writes of this size.
const MOST_THREADS: usize = 4;
/// How long a thread waits for more to do.
const IDLE: Duration = Duration::from_millis(200);

/// Bytes of consecutive blocks, or none. After the last use of an entry it is made complete, which takes its time.
struct Job {
    entry: Arc<Entry>,
    first: usize,
    len: usize,
    buffer: Option<Buffer>,
}

/// One of the buffers, which is free again when it is dropped.
pub(super) struct Buffer {
    writers: &'static Writers,
    region: Option<Region>,
}

impl Buffer {
    /// Its first `len` bytes. (Only `drop` leaves none.)
    pub(super) fn bytes(&mut self, len: usize) -> &mut [u8] {
        self.region.as_mut().map_or(&mut [], |region| &mut region.as_mut_slice()[..len])
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut state = self.writers.lock();
        state.free.extend(self.region.take());
        state.rest();
        self.writers.changed.notify_all();
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
}

impl State {
    /// Gives the memory back once nothing is read or written.
    fn rest(&mut self) {
        if self.threads == 0 && self.free.len() == self.buffers {
            self.buffers = 0;
            self.free.clear();
        }
    }
}

/// The writing threads of the process, and the buffers that they write.
#[derive(Default)]
pub(super) struct Writers {
    state: Mutex<State>,
    /// Notified when there is a job.
    more: Condvar,
    /// Notified when a buffer becomes free, and when a thread has nothing to do.
    changed: Condvar,
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

    /// A buffer, if one becomes free within `patience`.
    pub(super) fn buffer(&'static self, patience: Duration) -> Option<Buffer> {
        let none = |state: &mut State| state.free.is_empty() && state.buffers == MOST_BUFFERS;
        let waited = self.changed.wait_timeout_while(self.lock(), patience, none);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let mut free = state.free.pop();
        if free.is_none() && state.buffers < MOST_BUFFERS {
            free = Region::reserve(BUFFER_BYTES).ok();
            state.buffers += usize::from(free.is_some());
        }
        free.map(|region| Buffer { writers: self, region: Some(region) })
    }

    /// Has consecutive blocks written, of which the first `len` bytes of `buffer` are all bytes.
    pub(super) fn write(&'static self, entry: &Arc<Entry>, first: usize, buffer: Buffer, len: usize) {
        self.add(Job { entry: Arc::clone(entry), first, len, buffer: Some(buffer) });
    }

    /// Has one use of an entry ended. After the last it is made complete, if all of it is there.
    pub(super) fn leave(&'static self, entry: Arc<Entry>) {
        self.add(Job { entry, first: 0, len: 0, buffer: None });
    }

    fn add(&'static self, job: Job) {
        let mut state = self.lock();
        state.jobs.push_back(job);
        if state.idle >= state.jobs.len() || state.threads == MOST_THREADS {
            self.more.notify_one();
            return;
        }
        state.threads += 1;
        drop(state);
        let started = std::thread::Builder::new().name("cache-penstock".into()).spawn(|| self.run());
        if started.is_err() {
            let mut state = self.lock();
            state.threads -= 1;
            // Where there is no other thread, no one will ever do it. What was not written is not on the map.
            let jobs = if state.threads == 0 { std::mem::take(&mut state.jobs) } else { VecDeque::new() };
            drop(state);
            drop(jobs);
            self.changed.notify_all();
        }
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            let Some(job) = state.jobs.pop_front() else {
                state.idle += 1;
                self.changed.notify_all();
                let none = |state: &mut State| state.jobs.is_empty();
                let waited = self.more.wait_timeout_while(state, IDLE, none);
                let (woken, waited) = waited.unwrap_or_else(PoisonError::into_inner);
                state = woken;
                state.idle -= 1;
                match waited.timed_out() {
                    true => break,
                    false => continue,
                }
            };
            drop(state);
            // A panic is a bug, which costs what was to be kept, and must not leave `flush` waiting.
            let _ = catch_unwind(AssertUnwindSafe(|| {
                let Job { entry, first, len, buffer } = job;
                if let Some(mut buffer) = buffer {
                    entry.write(first, buffer.bytes(len));
                }
                if let Some(entry) = Arc::into_inner(entry) {
                    entry.close();
                }
            }));
            state = self.lock();
        }
        state.threads -= 1;
        state.rest();
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until nothing is left to do; false where that takes longer.
    pub(super) fn flush(&self, timeout: Duration) -> bool {
        let is_busy = |state: &mut State| state.threads > state.idle || !state.jobs.is_empty();
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, is_busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}
