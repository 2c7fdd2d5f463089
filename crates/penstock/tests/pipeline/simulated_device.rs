//! A device made of ordinary memory, whose copies are executed late, by another thread, from wherever the bytes lie
//! by then: a buffer that is reused or freed too early makes wrong bytes.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

use penstock::device::{CopyEvent, CopyRegion, CopyStream, Device, Fence, ReadBackRegion};
use penstock::memory::Pinning;
use penstock::{Error, ErrorKind, Result};

/// What happened on the device, and what shall happen.
#[derive(Default)]
pub struct Account {
    /// Copies enqueued, and copies executed or given up.
    pub enqueued: AtomicUsize,
    pub ended: AtomicUsize,
    /// The copy, counted from 1, that is refused at once.
    pub refuse_at: AtomicUsize,
    /// The copy, counted from 1, that fails when it is executed, as its stream finds out later.
    pub fail_at: AtomicUsize,
    /// How late copies are.
    pub delay_us: AtomicU64,
    /// Streams made, and streams there are.
    pub streams_made: AtomicUsize,
    pub streams: AtomicUsize,
    /// Fences made, and fences there are.
    pub fences_made: AtomicUsize,
    pub fences: AtomicUsize,
    /// Whether streams are refused.
    pub refuse_streams: AtomicBool,
    /// Threads on which the device was made current.
    pub bound: Mutex<HashSet<ThreadId>>,
    points: Mutex<HashMap<u64, Arc<Gate>>>,
    consumer: Mutex<Option<Arc<Gate>>>,
}

/// A point that is passed once it is open.
#[derive(Default)]
pub struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    pub fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn pass(&self) {
        drop(self.opened.wait_while(self.open.lock().unwrap(), |open| !*open).unwrap());
    }
}

/// The device.
pub struct SimulatedDevice {
    pub account: Arc<Account>,
    pub pinning: Arc<SimulatedPinning>,
}

/// Counts registrations.
pub struct SimulatedPinning {
    family: &'static str,
    pub made: AtomicUsize,
    pub registered: Mutex<HashSet<usize>>,
    pub unregistered: AtomicUsize,
    pub refuse: AtomicBool,
}

impl SimulatedDevice {
    /// A device of a kind of its own, so that it shares its staging memory with no other test's.
    pub fn new() -> Arc<Self> {
        // Names for good, but not lost: a search for leaks finds them here.
        static KINDS: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());
        let mut kinds = KINDS.lock().unwrap();
        let family: &'static str = Box::leak(format!("simulated-{}", kinds.len()).into_boxed_str());
        kinds.push(family);
        let pinning = SimulatedPinning {
            family,
            made: AtomicUsize::new(0),
            registered: Mutex::default(),
            unregistered: AtomicUsize::new(0),
            refuse: AtomicBool::new(false),
        };
        let account = Account::default();
        account.delay_us.store(100, SeqCst);
        Arc::new(Self { account: Arc::new(account), pinning: Arc::new(pinning) })
    }

    /// Gives the consumer's stream work that does not end: fences from now on are not passed until the gate is opened.
    pub fn keep_consumer_busy(&self) -> Arc<Gate> {
        let work = Arc::<Gate>::default();
        *self.account.consumer.lock().unwrap() = Some(Arc::clone(&work));
        work
    }

    /// Ends that work.
    pub fn let_consumer_end(&self) {
        if let Some(work) = self.account.consumer.lock().unwrap().take() {
            work.open();
        }
    }
}

impl Device for SimulatedDevice {
    fn name(&self) -> &str {
        "simulated:0"
    }

    fn pinning(&self) -> Arc<dyn Pinning> {
        Arc::clone(&self.pinning) as _
    }

    fn bind_thread(&self) -> Result<()> {
        self.account.bound.lock().unwrap().insert(std::thread::current().id());
        Ok(())
    }

    fn stream(&self) -> Result<Box<dyn CopyStream>> {
        if self.account.refuse_streams.load(SeqCst) {
            return Err(Error::new(ErrorKind::Device, "no streams today"));
        }
        self.account.streams_made.fetch_add(1, SeqCst);
        self.account.streams.fetch_add(1, SeqCst);
        Ok(Box::new(SimulatedStream::new(Arc::clone(&self.account))))
    }

    fn fence(&self, _handle: u64) -> Result<Arc<dyn Fence>> {
        let number = self.account.fences_made.fetch_add(1, SeqCst) as u64 + 1;
        self.account.fences.fetch_add(1, SeqCst);
        let point = self.account.consumer.lock().unwrap().clone();
        if let Some(point) = point {
            self.account.points.lock().unwrap().insert(number, point);
        }
        Ok(Arc::new(SimulatedFence { number, account: Arc::clone(&self.account) }))
    }
}

impl Pinning for SimulatedPinning {
    fn family(&self) -> &'static str {
        self.family
    }

    unsafe fn register(&self, ptr: *mut u8, _len: usize) -> Result<()> {
        if self.refuse.load(SeqCst) {
            return Err(Error::new(ErrorKind::Memory, "RLIMIT_MEMLOCK is too low"));
        }
        self.made.fetch_add(1, SeqCst);
        assert!(self.registered.lock().unwrap().insert(ptr as usize), "registered twice");
        Ok(())
    }

    unsafe fn unregister(&self, ptr: *mut u8) {
        self.unregistered.fetch_add(1, SeqCst);
        assert!(self.registered.lock().unwrap().remove(&(ptr as usize)), "unregistered but not registered");
    }
}

struct SimulatedFence {
    number: u64,
    account: Arc<Account>,
}

impl Fence for SimulatedFence {
    fn handle(&self) -> u64 {
        self.number
    }
}

impl Drop for SimulatedFence {
    fn drop(&mut self) {
        self.account.fences.fetch_sub(1, SeqCst);
        self.account.points.lock().unwrap().remove(&self.number);
    }
}

enum Job {
    Copy { number: usize, destination: usize, source: usize, len: usize },
    Pass(Arc<Gate>),
    CopyEvent(u64),
}

/// How far a stream has come.
#[derive(Default)]
struct Progress {
    done: u64,
    failed: Option<usize>,
}

struct SimulatedStream {
    account: Arc<Account>,
    jobs: Option<Sender<Job>>,
    worker: Option<JoinHandle<()>>,
    progress: Arc<(Mutex<Progress>, Condvar)>,
    marks: u64,
    open_marks: HashSet<u64>,
}

impl SimulatedStream {
    fn new(account: Arc<Account>) -> Self {
        let (jobs, queue) = channel();
        let progress = Arc::<(Mutex<Progress>, Condvar)>::default();
        let (told, own) = (Arc::clone(&progress), Arc::clone(&account));
        let worker = std::thread::Builder::new().name("simulated".into()).spawn(move || {
            for job in queue {
                match job {
                    Job::Pass(gate) => gate.pass(),
                    Job::Copy { number, destination, source, len } => {
                        std::thread::sleep(Duration::from_micros(own.delay_us.load(SeqCst)));
                        if own.fail_at.load(SeqCst) == number {
                            told.0.lock().unwrap().failed = Some(number);
                            told.1.notify_all();
                        } else {
                            // SAFETY: what `CopyStream::copy` demands of its caller, which is what is tested here.
                            unsafe {
                                std::ptr::copy_nonoverlapping(
                                    source as *const u8,
                                    destination as *mut u8,
                                    len,
                                );
                            }
                        }
                        own.ended.fetch_add(1, SeqCst);
                    }
                    Job::CopyEvent(mark) => {
                        told.0.lock().unwrap().done = mark;
                        told.1.notify_all();
                    }
                }
            }
        });
        let (jobs, worker) = (Some(jobs), Some(worker.unwrap()));
        Self { account, jobs, worker, progress, marks: 0, open_marks: HashSet::new() }
    }

    fn send(&self, job: Job) {
        self.jobs.as_ref().unwrap().send(job).unwrap();
    }

    /// Copies from and to these places, late.
    fn enqueue(&self, pieces: impl Iterator<Item = ((usize, usize), usize)>) -> Result<()> {
        let here = std::thread::current().id();
        assert!(
            self.account.bound.lock().unwrap().contains(&here),
            "the device is not current on this thread"
        );
        for ((source, destination), len) in pieces {
            let number = self.account.enqueued.fetch_add(1, SeqCst) + 1;
            if self.account.refuse_at.load(SeqCst) == number {
                self.account.ended.fetch_add(1, SeqCst);
                return Err(Error::new(ErrorKind::Device, format!("copy {number} was refused")));
            }
            self.send(Job::Copy { number, destination, source, len });
        }
        Ok(())
    }

    fn failure(progress: &Progress) -> Result<()> {
        match progress.failed {
            Some(copy) => Err(Error::new(ErrorKind::Device, format!("copy {copy} failed"))),
            None => Ok(()),
        }
    }
}

impl CopyStream for SimulatedStream {
    fn wait_for(&mut self, fence: &dyn Fence) -> Result<()> {
        let gate = self.account.points.lock().unwrap().get(&fence.handle()).cloned();
        if let Some(gate) = gate {
            self.send(Job::Pass(gate));
        }
        Ok(())
    }

    unsafe fn copy(&mut self, pieces: &[CopyRegion]) -> Result<()> {
        let place = |piece: &CopyRegion| (piece.source as usize, usize::try_from(piece.destination).unwrap());
        self.enqueue(pieces.iter().map(|piece| (place(piece), piece.len)))
    }

    unsafe fn read_back(&mut self, pieces: &[ReadBackRegion]) -> Result<()> {
        let place =
            |piece: &ReadBackRegion| (usize::try_from(piece.source).unwrap(), piece.destination as usize);
        self.enqueue(pieces.iter().map(|piece| (place(piece), piece.len)))
    }

    fn mark(&mut self) -> Result<CopyEvent> {
        self.marks += 1;
        self.open_marks.insert(self.marks);
        self.send(Job::CopyEvent(self.marks));
        Ok(CopyEvent(self.marks))
    }

    fn is_done(&mut self, mark: CopyEvent) -> Result<bool> {
        let progress = self.progress.0.lock().unwrap();
        Self::failure(&progress)?;
        let done = progress.done >= mark.0;
        if done {
            assert!(self.open_marks.remove(&mark.0), "a mark was taken back twice");
        }
        Ok(done)
    }

    fn wait(&mut self, mark: CopyEvent) -> Result<()> {
        assert!(self.open_marks.remove(&mark.0), "a mark was taken back twice");
        let (state, changed) = &*self.progress;
        let waiting = |progress: &mut Progress| progress.done < mark.0 && progress.failed.is_none();
        let progress = changed.wait_while(state.lock().unwrap(), waiting).unwrap();
        Self::failure(&progress)
    }
}

impl Drop for SimulatedStream {
    fn drop(&mut self) {
        drop(self.jobs.take());
        let _ = self.worker.take().unwrap().join();
        self.account.streams.fetch_sub(1, SeqCst);
    }
}
