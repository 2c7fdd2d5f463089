//! The threads of the process that write to disk caches.
//!
//! Whoever reads copies its bytes to a buffer and goes on. There are so many buffers and no more; where none becomes free
//! in the moment that a reader may wait, the bytes are not kept. Threads come with the work and go when there has been none for a moment. They belong to the
//! process: a child after `fork` has none of them, and begins anew.

use std::collections::VecDeque;
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
    /// Write so many bytes of the buffer, from the block of that number on.
    Write(Arc<Entry>, usize, usize, Region),
    /// See whether all of it is there.
    Close(Arc<Entry>),
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

    /// Has consecutive blocks written, whose `len` bytes `fill` copies to a buffer; false where none becomes free within
    /// `patience`.
    pub(super) fn write(
        &'static self,
        entry: &Arc<Entry>,
        first: usize,
        len: usize,
        fill: impl FnOnce(Window<'_>),
        patience: Duration,
    ) -> bool {
        let Some(mut buffer) = self.buffer(patience) else { return false };
        fill(buffer.window().part(0, len));
        entry.enter();
        self.add(Job::Write(Arc::clone(entry), first, len, buffer));
        true
    }

    /// Ends one use of an entry; after the last it is made complete, if all of it is there.
    pub(super) fn leave(&'static self, entry: &Arc<Entry>) {
        if entry.leave() {
            self.add(Job::Close(Arc::clone(entry)));
        }
    }

    fn buffer(&self, patience: Duration) -> Option<Region> {
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
                let State { jobs, free, buffers, .. } = &mut *state;
                for job in jobs.drain(..) {
                    if let Job::Write(_, _, _, buffer) = job {
                        free.push(buffer);
                    }
                }
                *buffers = free.len();
                drop(state);
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
                let wrote = matches!(job, Job::Write(..));
                // A panic is a bug, which costs what was to be kept, and must not leave `flush` waiting.
                let buffer = catch_unwind(AssertUnwindSafe(|| Self::work(job))).unwrap_or_default();
                state = self.lock();
                state.busy -= 1;
                state.buffers -= usize::from(wrote && buffer.is_none());
                state.free.extend(buffer);
                self.freed.notify_one();
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

    fn work(job: Job) -> Option<Region> {
        match job {
            Job::Write(entry, first, len, mut buffer) => {
                entry.write(first, &buffer.as_mut_slice()[..len]);
                if entry.leave() {
                    entry.close();
                }
                Some(buffer)
            }
            Job::Close(entry) => {
                entry.close();
                None
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
