//! The threads of a load's readers: started when they are wanted, gone when the load is.
//!
//! A thread costs some 0.1 ms of a core, so a load that begins with few readers has the others started when it wants them,
//! by whichever reader finds that out: the consumer may be busy for long.
//! A limit of the system on threads makes a load slower and is noted; it fails one only where no reader can be started. A
//! reader that panics fails its load and nothing else.
//!
//! Knows neither what readers read nor when a load is over: whoever joins them has told them before.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::shared::Shared;
use crate::error::{Error, ErrorKind, Result};
use crate::threads;
use crate::tune::Readers;

/// What a reader's thread does.
pub(super) type Run = Box<dyn FnOnce(&Arc<Shared>) -> Result<()> + Send>;

type Make = dyn Fn() -> Run + Send + Sync;

/// The threads of a load's readers.
#[derive(Default)]
pub(super) struct ReaderPool(Mutex<Threads>);

#[derive(Default)]
struct Threads {
    threads: Vec<JoinHandle<()>>,
    /// How many are not started yet, and how each is made.
    rest: Option<(usize, Box<Make>)>,
}

impl ReaderPool {
    /// Starts those of `readers` that may be wanted at once.
    ///
    /// # Errors
    /// `Memory` where not even one thread can be started.
    pub(super) fn start(
        &self,
        shared: &Arc<Shared>,
        readers: Readers,
        make: impl Fn() -> Run + Send + Sync + 'static,
    ) -> Result<()> {
        let mut reader_pool = self.lock();
        let (first, most) = (readers.first(), readers.most());
        reader_pool.add(shared, first, most, &make)?;
        if reader_pool.threads.len() == first && first < most {
            reader_pool.rest = Some((most - first, Box::new(make)));
        }
        Ok(())
    }

    /// Starts the others, if there are any. Called by a reader.
    ///
    /// # Errors
    /// None: a reader is running, so a thread that cannot be started is noted.
    pub(super) fn start_rest(&self, shared: &Arc<Shared>) -> Result<()> {
        let mut reader_pool = self.lock();
        let Some((count, make)) = reader_pool.rest.take() else { return Ok(()) };
        let of = reader_pool.threads.len() + count;
        reader_pool.add(shared, count, of, &*make)
    }

    /// Waits until all have ended; none is started from now on.
    pub(super) fn join(&self) {
        let mut reader_pool = self.lock();
        reader_pool.rest = None;
        let threads = std::mem::take(&mut reader_pool.threads);
        // A reader that is about to start others takes the lock before it ends.
        drop(reader_pool);
        for thread in threads {
            // A reader's panic was already turned into the load's failure.
            let _ = thread.join();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Threads> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Threads {
    fn add(&mut self, shared: &Arc<Shared>, count: usize, of: usize, make: &Make) -> Result<()> {
        for index in self.threads.len()..self.threads.len() + count {
            let (run, told) = (make(), Arc::clone(shared));
            let thread = std::thread::Builder::new().name(format!("penstock-{index}"));
            match thread.spawn(move || carry_out(run, &told)) {
                Ok(thread) => self.threads.push(thread),
                // Fewer readers than wished for are a slower load, not a failed one.
                Err(error) if !self.threads.is_empty() => {
                    let note = format!(
                        "{} of {of} reader threads could be started: {error}. {}",
                        self.threads.len(),
                        threads::remedy()
                    );
                    shared.with_stats(|stats| stats.note(note));
                    break;
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
}

/// What reading comes to, in whatever thread. A panic is a bug, but it must neither leave the consumer waiting for ever
/// nor be something else than an error to it.
pub(super) fn guarded(read: impl FnOnce() -> Result<()>) -> Result<()> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| {
        Err(Error::new(ErrorKind::Storage, "a reader panicked; this is a bug of Penstock"))
    })
}
