//! What the pipeline's tests stand on: files with known bytes, a store that fails on command, and a device whose copies
//! happen late.

#![allow(unreachable_pub, unsafe_code, clippy::unwrap_used)]

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use penstock::checkpoint::Checkpoint;
use penstock::device::{CopyStream, Device, Fence, Mark};
use penstock::memory::{Pinning, Window};
use penstock::store::{Entry, Identity, Lane, LocalStore, Object, Store};
use penstock::{Error, ErrorKind, Result};

/// Writes a file of U8 tensors of those sizes, named `t0`, `t1`, …, and returns their bytes.
pub fn write_file(path: &Path, sizes: &[usize]) -> Vec<Vec<u8>> {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    let mut tensors = Vec::new();
    for (index, size) in sizes.iter().enumerate() {
        let entry = serde_json::json!({"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]});
        header.insert(format!("t{index}"), entry);
        tensors.push(
            (0..*size).map(|i| (i.wrapping_mul(31) ^ (i >> 8) ^ index.wrapping_mul(97)) as u8).collect(),
        );
        end += size;
    }
    let mut json = serde_json::to_vec(&header).unwrap();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json);
    file.extend(tensors.iter().flatten());
    std::fs::write(path, file).unwrap();
    tensors
}

pub fn open(store: Arc<dyn Store>, path: &Path) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(store, &[path.to_str().unwrap().to_owned()]).unwrap())
}

/// Local files, of which the n-th read of data fails, ends early, or waits.
#[derive(Default)]
pub struct FaultyStore {
    pub faults: Arc<Faults>,
}

#[derive(Default)]
pub struct Faults {
    pub reads: AtomicUsize,
    /// Reads from this one on fail with EIO; 0 for none.
    pub fail_from: AtomicUsize,
    /// Every read waits this long first.
    pub delay_ms: AtomicUsize,
}

struct FaultyObject {
    inner: Arc<dyn Object>,
    faults: Arc<Faults>,
}

impl Faults {
    fn before_read(&self) -> Result<()> {
        let number = self.reads.fetch_add(1, Ordering::SeqCst) + 1;
        std::thread::sleep(Duration::from_millis(self.delay_ms.load(Ordering::SeqCst) as u64));
        let from = self.fail_from.load(Ordering::SeqCst);
        if from != 0 && number >= from {
            return Err(Error::from_io("reading", &std::io::Error::from_raw_os_error(libc::EIO)));
        }
        Ok(())
    }
}

impl Store for FaultyStore {
    fn open(&self, location: &str) -> Result<Arc<dyn Object>> {
        let inner = LocalStore::default().open(location)?;
        Ok(Arc::new(FaultyObject { inner, faults: Arc::clone(&self.faults) }))
    }
    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        LocalStore::default().list(prefix)
    }
}

impl Object for FaultyObject {
    fn location(&self) -> &str {
        self.inner.location()
    }
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }
    fn identity(&self) -> Identity {
        self.inner.identity()
    }
    fn read_into(&self, offset: u64, into: Window<'_>, lane: &mut Lane) -> Result<()> {
        self.faults.before_read()?;
        self.inner.read_into(offset, into, lane)
    }
    fn read_to_slot(&self, range: Range<u64>, slot: Window<'_>, lane: &mut Lane) -> Result<usize> {
        self.faults.before_read()?;
        self.inner.read_to_slot(range, slot, lane)
    }
    fn verify_unchanged(&self) -> Result<()> {
        self.inner.verify_unchanged()
    }
}

/// A device whose memory is ordinary memory and whose copies are made by a thread of each stream, late: a slot that is
/// reused before its event would deliver wrong bytes.
#[derive(Default)]
pub struct LateDevice {
    pub state: Arc<DeviceState>,
}

#[derive(Default)]
pub struct DeviceState {
    pub streams: AtomicUsize,
    pub registered: Mutex<HashMap<usize, usize>>,
    pub copies: AtomicUsize,
    /// Copies from this one on fail; 0 for none.
    pub fail_from: AtomicUsize,
    /// While a fence is held, no stream passes it.
    pub fence_held: AtomicBool,
}

enum Job {
    Copy { to: u64, from: usize, len: usize },
    Mark(Arc<Event>),
    WaitForFence,
}

#[derive(Default)]
pub struct Event {
    done: Mutex<bool>,
    happened: Condvar,
}

pub struct LateStream {
    state: Arc<DeviceState>,
    jobs: Option<Sender<Job>>,
    events: HashMap<u64, Arc<Event>>,
    next: u64,
    worker: Option<std::thread::JoinHandle<()>>,
}

impl Device for LateDevice {
    fn name(&self) -> &str {
        "late:0"
    }
    fn pinning(&self) -> Arc<dyn Pinning> {
        Arc::new(Counted(Arc::clone(&self.state)))
    }
    fn stream(&self) -> Result<Box<dyn CopyStream>> {
        self.state.streams.fetch_add(1, Ordering::SeqCst);
        let (jobs, queue) = channel();
        let state = Arc::clone(&self.state);
        let worker = std::thread::spawn(move || work(&queue, &state));
        Ok(Box::new(LateStream {
            state: Arc::clone(&self.state),
            jobs: Some(jobs),
            events: HashMap::new(),
            next: 0,
            worker: Some(worker),
        }))
    }
    fn fence(&self, handle: u64) -> Result<Arc<dyn Fence>> {
        Ok(Arc::new(Handle(handle)))
    }
}

fn work(queue: &Receiver<Job>, state: &DeviceState) {
    while let Ok(job) = queue.recv() {
        match job {
            Job::Copy { to, from, len } => {
                std::thread::sleep(Duration::from_micros(300));
                // SAFETY: the pipeline promises that both ends live until a later event has happened.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, len) };
            }
            Job::Mark(event) => {
                *event.done.lock().unwrap() = true;
                event.happened.notify_all();
            }
            Job::WaitForFence => {
                while state.fence_held.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }
}

struct Handle(u64);

impl Fence for Handle {
    fn handle(&self) -> u64 {
        self.0
    }
}

struct Counted(Arc<DeviceState>);

impl Pinning for Counted {
    fn family(&self) -> &'static str {
        "late"
    }
    unsafe fn register(&self, ptr: *mut u8, len: usize) -> Result<()> {
        self.0.registered.lock().unwrap().insert(ptr as usize, len);
        Ok(())
    }
    unsafe fn unregister(&self, ptr: *mut u8) {
        self.0.registered.lock().unwrap().remove(&(ptr as usize));
    }
}

impl LateStream {
    fn send(&self, job: Job) {
        self.jobs.as_ref().unwrap().send(job).unwrap();
    }
}

impl CopyStream for LateStream {
    fn wait_for(&mut self, _fence: &dyn Fence) -> Result<()> {
        self.send(Job::WaitForFence);
        Ok(())
    }
    unsafe fn copy(&mut self, destination: u64, source: *const u8, len: usize) -> Result<()> {
        let number = self.state.copies.fetch_add(1, Ordering::SeqCst) + 1;
        let from = self.state.fail_from.load(Ordering::SeqCst);
        if from != 0 && number >= from {
            return Err(Error::new(ErrorKind::Device, "copying to the device failed"));
        }
        self.send(Job::Copy { to: destination, from: source as usize, len });
        Ok(())
    }
    fn mark(&mut self) -> Result<Mark> {
        let event = Arc::new(Event::default());
        self.next += 1;
        self.events.insert(self.next, Arc::clone(&event));
        self.send(Job::Mark(event));
        Ok(Mark(self.next))
    }
    fn is_done(&mut self, mark: Mark) -> Result<bool> {
        let done = *self.events[&mark.0].done.lock().unwrap();
        if done {
            self.events.remove(&mark.0);
        }
        Ok(done)
    }
    fn wait(&mut self, mark: Mark) -> Result<()> {
        let event = self.events.remove(&mark.0).unwrap();
        let done = event.done.lock().unwrap();
        drop(event.happened.wait_while(done, |done| !*done).unwrap());
        Ok(())
    }
}

impl Drop for LateStream {
    fn drop(&mut self) {
        // The queue closes, the worker finishes what is in it: copies end before the stream is gone.
        self.jobs = None;
        self.worker.take().unwrap().join().unwrap();
        self.state.streams.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Open descriptors of this process that lead to `path`.
pub fn descriptors_of(path: &Path) -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| entry.ok());
    let path: PathBuf = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    links.filter(|link| std::fs::read_link(link.path()).is_ok_and(|target| target == path)).count()
}

/// Threads of this process that readers are.
pub fn reader_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|entry| entry.ok());
    let name =
        |task: &std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    tasks.filter(|task| name(task).starts_with("penstock-")).count()
}
