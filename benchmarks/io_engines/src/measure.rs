//! One measurement, in a process of its own: an engine reads a pattern, and the outcome is printed as JSON.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::memory::Buffers;
use crate::plan::{Engine, Pattern, Request, State, requests};
use crate::{files, ring, threads, usage};

/// What to measure.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Task {
    pub paths: Vec<PathBuf>,
    /// Bytes of each file.
    pub each: u64,
    pub pattern: Pattern,
    pub engine: Engine,
    pub seed: u64,
    pub cap: Duration,
}

/// What came of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    Measured(Figures),
    /// The kernel or the file system has no such thing, or forbids it.
    Refused(String),
}

/// The figures of one measurement. All CPU times are in seconds, within the timed part.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figures {
    pub gb: f64,
    pub seconds: f64,
    /// Of the process, by `getrusage`: ours and the kernel's threads for the rings.
    pub cpu_s: f64,
    /// Of our own threads.
    pub own_cpu_s: f64,
    /// Of the kernel's threads for the rings.
    pub kernel_threads_cpu_s: f64,
    pub kernel_threads: usize,
    /// Of the machine, with interrupts and whatever else was running.
    pub machine_cpu_s: f64,
    /// Whether others took so much of the machine that this tells little.
    pub disturbed: bool,
    /// Making threads or rings and registering buffers, which exist: before the clock starts.
    pub setup_ms: f64,
    pub p50_us: f64,
    pub p99_us: f64,
}

/// Hands out requests to all workers until there are none left or the time is over.
pub struct Work {
    pub pattern: Pattern,
    pub files: Vec<File>,
    /// One for each read in flight: the first worker has the first ones, and so on.
    pub buffers: Buffers,
    requests: Vec<Request>,
    next: AtomicUsize,
    cap: Duration,
}

impl Work {
    /// The next request, if one is to be made by a worker that began at `began`.
    pub fn take(&self, began: Instant) -> Option<Request> {
        if began.elapsed() > self.cap {
            return None;
        }
        self.requests.get(self.next.fetch_add(1, Ordering::Relaxed)).copied()
    }

    /// Fails unless `found` is what `request` begins with.
    pub fn check(&self, request: Request, found: u64) -> io::Result<()> {
        if found == files::word(request.file, request.offset) {
            Ok(())
        } else {
            Err(io::Error::other(format!("wrong bytes were read at {request:?}")))
        }
    }
}

/// Someone who reads: made ready before the clock starts, kept until it has stopped.
pub trait Worker {
    /// Reads until nothing is left to do, and notes how long each request took.
    fn run(&mut self, work: &Work, took: &mut Vec<Duration>) -> io::Result<()>;
}

/// Measures what `task` (JSON) says, and prints an [`Outcome`].
pub fn in_this_process(task: &str) -> Result<(), Box<dyn std::error::Error>> {
    let task: Task = serde_json::from_str(task)?;
    let outcome = match measure(&task) {
        Ok(figures) => Outcome::Measured(figures),
        Err(error) if is_refusal(&error) => Outcome::Refused(error.to_string()),
        Err(error) => return Err(error.into()),
    };
    println!("{}", serde_json::to_string(&outcome)?);
    Ok(())
}

/// Whether a failure says that something is not to be had here, rather than that something broke.
fn is_refusal(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, OutOfMemory, PermissionDenied, Unsupported};
    matches!(error.kind(), InvalidInput | OutOfMemory | PermissionDenied | Unsupported)
}

fn measure(task: &Task) -> io::Result<Figures> {
    let flags = if task.pattern.state == State::Direct { libc::O_DIRECT } else { 0 };
    let open = |path| File::options().read(true).custom_flags(flags).open(path);
    let in_flight = match task.engine {
        Engine::Threads(count) => count,
        Engine::Rings { rings, depth, .. } => rings * depth,
    };
    let work = Work {
        pattern: task.pattern,
        files: task.paths.iter().map(open).collect::<io::Result<_>>()?,
        buffers: Buffers::new(in_flight, task.pattern.bytes as usize)?,
        requests: requests(task.pattern, task.paths.len(), task.each, task.seed),
        next: AtomicUsize::new(0),
        cap: task.cap,
    };
    match task.engine {
        Engine::Threads(count) => timed(&work, count, |number| Ok(threads::Reader::new(number))),
        Engine::Rings { rings, depth, how } => {
            timed(&work, rings, |number| ring::Driver::new(&work, number, depth, how))
        }
    }
}

/// Runs `count` workers, each made and driven by a thread of its own.
fn timed<W: Worker>(
    work: &Work,
    count: usize,
    make: impl Fn(usize) -> io::Result<W> + Sync,
) -> io::Result<Figures> {
    // Everybody meets here when workers are ready, when the clock was started, when they are done, and when it was read.
    let meet = Barrier::new(count + 1);
    let setup = Instant::now();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..count)
            .map(|number| {
                let (make, meet) = (&make, &meet);
                scope.spawn(move || {
                    let mut worker = make(number);
                    let mut took = Vec::with_capacity(work.requests.len());
                    meet.wait();
                    meet.wait();
                    let cpu = usage::thread();
                    let outcome = worker.as_mut().map(|worker| worker.run(work, &mut took));
                    let outcome = outcome.unwrap_or(Ok(()));
                    let cpu = usage::thread() - cpu;
                    meet.wait();
                    meet.wait();
                    worker.and(outcome).map(|()| (took, cpu))
                })
            })
            .collect();
        meet.wait();
        let setup_ms = setup.elapsed().as_secs_f64() * 1e3;
        let before = (usage::everybody(), usage::kernel_threads(), usage::process());
        let began = Instant::now();
        meet.wait();
        meet.wait();
        let seconds = began.elapsed().as_secs_f64();
        let cpu = usage::process() - before.2;
        let kernel = usage::kernel_threads();
        let machine = usage::everybody().saturating_sub(before.0);
        meet.wait();

        let (mut all, mut own) = (Vec::new(), Duration::ZERO);
        for worker in workers {
            let (took, cpu) = worker.join().map_err(|_| io::Error::other("a worker panicked"))??;
            all.extend(took);
            own += cpu;
        }
        all.sort_unstable();
        let at = |share: f64| {
            let index = (all.len() as f64 * share) as usize;
            all.get(index.min(all.len().saturating_sub(1))).map_or(0.0, |took| took.as_secs_f64() * 1e6)
        };
        Ok(Figures {
            gb: (all.len() as u64 * work.pattern.bytes) as f64 / 1e9,
            seconds,
            cpu_s: cpu.as_secs_f64(),
            own_cpu_s: own.as_secs_f64(),
            kernel_threads_cpu_s: kernel.1.saturating_sub(before.1.1).as_secs_f64(),
            kernel_threads: kernel.0,
            disturbed: usage::is_busy(machine.saturating_sub(cpu), seconds),
            machine_cpu_s: machine.as_secs_f64(),
            setup_ms,
            p50_us: at(0.50),
            p99_us: at(0.99),
        })
    })
}
