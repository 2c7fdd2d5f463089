//! The threads of a load's readers: started when they are wanted, gone when the load is.
//!
//! A thread costs some 0.1 ms of a core, so those that the tuner may want later are started when it does, by the reader
//! that learns it: the consumer may be busy for long.
//! A limit of the system on threads makes a load slower and is noted; it fails one only where no reader can be started. A
//! reader that panics fails its load and nothing else.
//!
//! Knows neither what readers read nor when a load is over: whoever joins them has told them before.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::shared::Shared;
use crate::error::{Error, ErrorKind, Result};
use crate::threads;

/// What a reader's thread does.
pub(super) type Run = Box<dyn FnOnce(&Arc<Shared>) -> Result<()> + Send>;

/// Makes what one more reader does.
type Make = Box<dyn Fn() -> Run + Send>;

/// The threads of a load's readers.
#[derive(Default)]
pub(super) struct ReaderPool(Mutex<Threads>);

#[derive(Default)]
struct Threads {
    running: Vec<JoinHandle<()>>,
    /// None before the first are started, and once no more are to be.
    make: Option<Make>,
}

impl ReaderPool {
    /// Starts the first `count` readers.
    ///
    /// # Errors
    /// `Memory` where not even one thread can be started.
    pub(super) fn start(
        &self,
        shared: &Arc<Shared>,
        count: usize,
        make: impl Fn() -> Run + Send + 'static,
    ) -> Result<()> {
        let mut threads = self.lock();
        threads.make = Some(Box::new(make));
        threads.grow(shared, count)
    }

    /// Starts readers until `count` run, as far as the system allows.
    pub(super) fn grow(&self, shared: &Arc<Shared>, count: usize) {
        // No error: the reader that asks is one that was started.
        let _ = self.lock().grow(shared, count);
    }

    /// Waits until all have ended; none is started from now on.
    pub(super) fn join(&self) {
        let running = {
            let mut threads = self.lock();
            threads.make = None;
            std::mem::take(&mut threads.running)
        };
        for thread in running {
            // A reader's panic was already turned into the load's failure.
            let _ = thread.join();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Threads> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Threads {
    fn grow(&mut self, shared: &Arc<Shared>, count: usize) -> Result<()> {
        while self.running.len() < count
            && let Some(make) = &self.make
        {
            let (run, shared_by_run, started) = (make(), Arc::clone(shared), self.running.len());
            let thread = std::thread::Builder::new().name(format!("penstock-{started}"));
            match thread.spawn(move || carry_out(run, &shared_by_run)) {
                Ok(thread) => self.running.push(thread),
                // Fewer readers than wished for are a slower load, not a failed one.
                Err(error) if started > 0 => {
                    let remedy = threads::remedy();
                    let note =
                        format!("{started} of {count} reader threads could be started: {error}. {remedy}");
                    shared.with_stats(|stats| stats.note(note));
                    self.make = None;
                }
                Err(error) => return Err(threads::not_started(&error)),
            }
        }
        Ok(())
    }
}

fn carry_out(run: Run, shared: &Arc<Shared>) {
    if let Err(error) = guarded(|| run(shared)) {
        shared.fail(error);
    }
    let cpu = clock_gettime(ClockId::ThreadCPUTime);
    let nanos = u32::try_from(cpu.tv_nsec).unwrap_or(0);
    shared.with_stats(|stats| stats.cpu += Duration::new(cpu.tv_sec.unsigned_abs(), nanos));
}

/// What reading comes to, in whatever thread. A panic is a bug, but it must neither leave the consumer waiting for ever
/// nor be something else than an error to it.
pub(super) fn guarded<T>(read: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| {
        Err(Error::new(ErrorKind::Storage, "a reader panicked; this is a bug of Penstock"))
    })
}
