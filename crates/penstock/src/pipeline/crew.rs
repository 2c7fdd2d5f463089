//! The threads of a load's readers: started when they are wanted, gone when the load is.
//!
//! A thread costs some 0.1 ms of a core, so a load that begins with few readers has the others started when it wants them.
//! A limit of the system on threads makes a load slower and is noted; it fails one only where no reader can be started. A
//! reader that panics fails its load and nothing else.
//!
//! Knows neither what readers read nor when a load is over: whoever joins them has told them before.

use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use super::shared::Shared;
use crate::error::{Error, ErrorKind, Result};
use crate::threads;
use crate::tune::Readers;

/// What a reader's thread does.
pub(super) type Run = Box<dyn FnOnce(&Shared) -> Result<()> + Send>;

type Make = dyn Fn() -> Run + Send + Sync;

/// See the module.
#[derive(Default)]
pub(super) struct Crew {
    threads: Vec<JoinHandle<()>>,
    /// How many are not started yet, and how each is made.
    rest: Option<(usize, Box<Make>)>,
}

impl Crew {
    /// Starts those of `readers` that may be wanted at once.
    ///
    /// # Errors
    /// `Memory` where not even one thread can be started.
    pub(super) fn start(
        shared: &Arc<Shared>,
        readers: Readers,
        make: impl Fn() -> Run + Send + Sync + 'static,
    ) -> Result<Self> {
        let mut crew = Self::default();
        let (first, most) = (readers.first(), readers.most());
        crew.add(shared, first, most, &make)?;
        if crew.threads.len() == first && first < most {
            crew.rest = Some((most - first, Box::new(make)));
        }
        Ok(crew)
    }

    /// Starts the others, if there are any.
    ///
    /// # Errors
    /// As [`Crew::start`].
    pub(super) fn start_rest(&mut self, shared: &Arc<Shared>) -> Result<()> {
        let Some((count, make)) = self.rest.take() else { return Ok(()) };
        self.add(shared, count, self.threads.len() + count, &*make)
    }

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

    /// Waits until all have ended; none is started from now on.
    pub(super) fn join(&mut self) {
        self.rest = None;
        for thread in self.threads.drain(..) {
            // A reader's panic was already turned into the load's failure.
            let _ = thread.join();
        }
    }

    /// Neither joins them nor lets them go: to a forked child's C library they do not exist.
    pub(super) fn forget(&mut self) {
        let _ = ManuallyDrop::new(std::mem::take(self));
    }
}

fn carry_out(run: Run, shared: &Shared) {
    // A panic is a bug, but it must not leave the consumer waiting for ever.
    let done = catch_unwind(AssertUnwindSafe(|| run(shared))).unwrap_or_else(|_| {
        Err(Error::new(ErrorKind::Storage, "a reader panicked; this is a bug of Penstock"))
    });
    if let Err(error) = done {
        shared.fail(error);
    }
}
