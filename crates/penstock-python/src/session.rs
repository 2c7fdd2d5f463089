//! Loads under way, and what they did.
//!
//! A session is locked only while the GIL is released, and never the other way round: a thread that waits for landed
//! tensors cannot keep another from running.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use penstock::checkpoint::Dtype;
use penstock::device::CudaDevice;
use penstock::memory::Arena;
use penstock::pipeline::{self, Canceller, Next, Target};
use penstock::plan::Plan;
use penstock::stats::{plural, scaled};
use penstock::tune::{Settings, Storage};
use penstock::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use crate::checkpoint::cuda_ordinal;
use crate::detached::Detached;
use crate::errors::{Failure, Outcome};
use crate::host_array::{HostArray, Owner};
use crate::signals::SIGNAL_CHECK;

/// Names, dtypes, shapes and bytes of tensors.
type Columns<'a, 'py> = (Vec<&'a str>, Vec<Bound<'py, PyString>>, Vec<Bound<'py, PyTuple>>, Vec<u64>);

/// One load: destinations are attached in the order of `tensors`, landed tensors are taken from `wait`.
#[pyclass(frozen, module = "penstock._native")]
pub struct Session {
    inner: Detached<Inner>,
    tensors: Vec<(Arc<str>, Dtype, Vec<u64>, u64)>,
    items: Vec<usize>,
    leaves_a_core: bool,
}

struct Inner {
    session: Mutex<pipeline::Session>,
    canceller: Canceller,
}

/// How long a thread that finds the session with another one leaves it alone.
const CONTENDED: Duration = Duration::from_millis(1);

impl Inner {
    fn lock(&self) -> MutexGuard<'_, pipeline::Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session, once no other thread has it; none where the load is cancelled meanwhile. Whoever cancelled it may have
    /// the session until storage answers, which must not keep others from hearing of it. In a forked child it may be
    /// with a thread of the parent.
    fn lock_unless_cancelled(&self) -> Result<MutexGuard<'_, pipeline::Session>, Error> {
        loop {
            match self.session.try_lock() {
                Ok(session) => return Ok(session),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => {}
            }
            if self.canceller.is_cancelled() || !self.canceller.is_ours() {
                return Err(Error::new(ErrorKind::Cancelled, "the load was cancelled"));
            }
            std::thread::sleep(CONTENDED);
        }
    }
}

impl Session {
    pub fn start(
        checkpoint: Arc<penstock::checkpoint::Checkpoint>,
        plan: Arc<Plan>,
        target: &str,
        settings: &Settings,
        storage: &Storage,
        trace: Option<PathBuf>,
    ) -> Outcome<Self> {
        let target = match target {
            "slab" => Target::Slab,
            "host" => Target::Host,
            device => Target::Device {
                device: CudaDevice::open(cuda_ordinal(device)?)?,
                staging_bytes: usize::try_from(settings.staging_bytes).unwrap_or(usize::MAX),
            },
        };
        let describe = |tensor: &penstock::plan::PlannedTensor| {
            let dtype = checkpoint.require(&tensor.name)?.dtype;
            Ok((Arc::clone(&tensor.name), dtype, tensor.selection.shape().to_vec(), tensor.bytes()))
        };
        let tensors = plan.tensors().iter().map(describe).collect::<Result<_, Error>>()?;
        let items = plan.tensors().iter().map(|tensor| tensor.item).collect();
        let mut inner = pipeline::Session::start(checkpoint, plan, target, settings.readers)?;
        inner.on_storage(storage, settings);
        if let Some(path) = trace {
            inner.trace_to(path);
        }
        let canceller = inner.canceller();
        let inner = Detached::new(Inner { session: Mutex::new(inner), canceller });
        Ok(Self { inner, tensors, items, leaves_a_core: settings.leaves_a_core })
    }

    fn locked<T: Send>(
        &self,
        py: Python<'_>,
        body: impl FnOnce(&mut pipeline::Session) -> Result<T, Error> + Send,
    ) -> Outcome<T> {
        let inner = &*self.inner;
        py.detach(|| body(&mut *inner.lock_unless_cancelled()?)).map_err(Failure)
    }
}

#[pymethods]
impl Session {
    /// Names, dtypes, shapes and bytes of all tensors, in the order in which destinations are attached. In columns, as
    /// a Python object for each of many tensors would take longer than loading them.
    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Columns<'_, 'py>> {
        let tensors = self.tensors.iter();
        // Neighbours often have the same shape, and there are few dtypes: one object serves them all.
        let mut shapes: Vec<Bound<'py, PyTuple>> = Vec::with_capacity(self.tensors.len());
        let mut last: Option<&[u64]> = None;
        for (_, _, shape, _) in tensors.clone() {
            let made = match shapes.last() {
                Some(same) if last == Some(shape) => same.clone(),
                _ => PyTuple::new(py, shape)?,
            };
            shapes.push(made);
            last = Some(shape);
        }
        Ok((
            tensors.clone().map(|(name, ..)| &**name).collect(),
            tensors.clone().map(|(_, dtype, ..)| PyString::intern(py, dtype.name())).collect(),
            shapes,
            tensors.map(|(.., bytes)| *bytes).collect(),
        ))
    }

    /// Of every tensor, in the same order, its place in the list that the session was asked for.
    #[getter]
    fn items(&self) -> Vec<usize> {
        self.items.clone()
    }

    /// Whether readers leave a core to who drives the load, even while all they do is copying from the page cache.
    #[getter]
    fn leaves_a_core(&self) -> bool {
        self.leaves_a_core
    }

    /// For every tensor, how many tensors must have destinations before it can land: neighbours may share a block.
    #[getter]
    fn attached_to_land(&self, py: Python<'_>) -> Outcome<Vec<usize>> {
        self.locked(py, |session| Ok(session.plan().attached_to_land()))
    }

    /// Gives the next tensors their destinations: addresses of memory of the tensors' bytes on the load's target, which
    /// the caller keeps alive until they have landed or the session was stopped. Copies to a device wait for the work
    /// that is queued on the stream `consumer_stream`.
    fn attach(&self, py: Python<'_>, addresses: Vec<u64>, consumer_stream: u64) -> Outcome<()> {
        // SAFETY: there are two callers. `penstock.parts.Places` passes addresses that `Framework.destination` gave for
        // contiguous memory of the planned size on this device, or that `Framework.empties` made; it looks again whether
        // the memory is still there, and holds tensors that own it until the session was stopped. `FreshDevice` of
        // `penstock.loading` does so with what `Framework.empties` made. Parts that `load_parts` is given do not overlap:
        // `load_into` refuses such destinations (`penstock.destinations`), a recorder has read what lies at a place before it
        // notes another write there (`penstock.recording.places`), and ranks that read for each other make buffers. That nobody else resizes or uses the
        // memory meanwhile is what they ask of their callers.
        self.locked(py, |session| unsafe { session.attach(&addresses, consumer_stream) })
    }

    /// Lets the next `tensors` be read to fresh host memory.
    fn attach_slab(&self, py: Python<'_>, tensors: usize) -> Outcome<()> {
        self.locked(py, |session| session.attach_slab(tensors))
    }

    /// Waits until tensors have landed and returns their indices; an empty list when all were returned.
    ///
    /// Looks for signals while it waits, so Ctrl-C raises KeyboardInterrupt from here. Raises LoadCancelledError as soon as
    /// another thread stops the load, however long that takes to end.
    fn wait(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        loop {
            let landed = self.locked(py, |session| {
                let mut landed = Vec::new();
                let mut patience = SIGNAL_CHECK;
                loop {
                    match session.next(patience) {
                        Ok(Next::Landed(tensor)) => landed.push(tensor),
                        Ok(Next::Done) if landed.is_empty() => return Ok(Some(landed)),
                        Ok(_) => return Ok((!landed.is_empty()).then_some(landed)),
                        // What has landed is handed out first; the failure stays and comes with the next call.
                        Err(_) if !landed.is_empty() => return Ok(Some(landed)),
                        Err(error) => return Err(error),
                    }
                    patience = Duration::ZERO;
                }
            })?;
            match landed {
                Some(landed) => return Ok(landed),
                // Not where tensors keep coming: that is the time of the load. What is queued waits for its end.
                None => {
                    crate::logging::emit(py)?;
                    py.check_signals()?;
                }
            }
        }
    }

    /// The memory of landed tensors of a "slab" load; each can be had once.
    fn host(&self, py: Python<'_>, tensors: Vec<u32>) -> Outcome<Vec<HostArray>> {
        self.locked(py, |session| {
            let array = |tensor: u32| {
                let memory = session.take_host(tensor)?;
                let (_, dtype, shape, bytes) = &self.tensors[tensor as usize];
                Ok(HostArray::new(Owner::Tensor(memory), *dtype, shape.clone(), *bytes))
            };
            tensors.into_iter().map(array).collect()
        })
    }

    /// Ends the load after its last tensor; raises LocationChangedError if an object changed while it was read.
    fn finish(&self, py: Python<'_>) -> PyResult<LoadStats> {
        let finished = self.locked(py, pipeline::Session::finish);
        crate::logging::emit(py)?;
        Ok(LoadStats { inner: finished? })
    }

    /// Figures so far, of a load that may have failed. Not before its readers have ended: they hand theirs in then.
    fn figures(&self, py: Python<'_>) -> LoadStats {
        let inner = &*self.inner;
        // In a forked child, a thread of the parent's may have the session.
        let stats = || if inner.canceller.is_ours() { inner.lock().stats() } else { Default::default() };
        LoadStats { inner: py.detach(stats) }
    }

    /// Stops reading and waits until nothing is in flight. May be called at any time, by any thread and more than once.
    fn stop(&self, py: Python<'_>) {
        let inner = &*self.inner;
        py.detach(|| {
            // A forked child has no part in its parent's load.
            if inner.canceller.is_ours() {
                inner.canceller.cancel();
                inner.lock().stop();
            }
        });
    }
}

/// Mapped files, and the tensors in them.
#[pyclass(frozen, module = "penstock._native")]
pub struct Mapped {
    inner: Detached<pipeline::Mapped>,
    checkpoint: Arc<penstock::checkpoint::Checkpoint>,
    tensors: Vec<usize>,
    readers: usize,
}

impl Mapped {
    pub fn new(
        checkpoint: Arc<penstock::checkpoint::Checkpoint>,
        tensors: Vec<usize>,
        readers: usize,
    ) -> Outcome<Self> {
        let inner = Detached::new(pipeline::Mapped::new(Arc::clone(&checkpoint), &tensors)?);
        Ok(Self { inner, checkpoint, tensors, readers })
    }
}

#[pymethods]
impl Mapped {
    /// (name, view) of every tensor, verified where there is a manifest; views of misaligned tensors are `None`: no framework takes those as they are.
    fn views(&self, py: Python<'_>) -> Outcome<Vec<(&str, Option<HostArray>)>> {
        let inner = &*self.inner;
        py.detach(|| inner.verify(&self.tensors, self.readers)).map_err(Failure)?;
        let view = |index: &usize| {
            let info = &self.checkpoint.tensors()[*index];
            let (mapping, range) = self.inner.view(*index)?;
            let aligned = range.start.is_multiple_of((info.dtype.bits() / 8).max(1));
            let owner = Owner::View(mapping, range);
            Ok((
                &*info.name,
                aligned.then(|| HostArray::new(owner, info.dtype, info.shape.clone(), info.bytes())),
            ))
        };
        self.tensors.iter().map(view).collect()
    }

    /// Makes the tensors' pages present, with many threads.
    fn prefault(&self, py: Python<'_>) -> Outcome<()> {
        let inner = &*self.inner;
        py.detach(|| inner.prefault(&self.tensors, self.readers)).map_err(Failure)
    }
}

/// Figures of one load. Seconds of a stage are summed over readers.
#[pyclass(frozen, module = "penstock._native")]
#[derive(Debug)]
pub struct LoadStats {
    inner: penstock::stats::LoadStats,
}

macro_rules! getters {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $value:expr;)*) => {
        #[pymethods]
        impl LoadStats {
            $($(#[$doc])* #[getter] fn $name(&self) -> $type { let of: fn(&penstock::stats::LoadStats) -> $type = $value; of(&self.inner) })*

            /// All figures by name, for JSON.
            fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyDict>> {
                let dict = pyo3::types::PyDict::new(py);
                $(dict.set_item(stringify!($name), self.$name())?;)*
                Ok(dict)
            }

            fn __repr__(&self) -> String {
                summary(&self.inner)
            }

            /// The stages of the load, a line for each, and what follows.
            fn __str__(&self) -> String {
                self.inner.to_string()
            }
        }
    };
}

getters! {
    /// Bytes of the tensors loaded.
    bytes: u64 = |s| s.bytes;
    /// Bytes that left the store.
    read_bytes: u64 = |s| s.read_bytes;
    /// Bytes copied from the page cache.
    cached_bytes: u64 = |s| s.cached_bytes;
    /// Bytes read directly from the device.
    direct_bytes: u64 = |s| s.direct_bytes;
    /// Bytes read through the page cache although not in it.
    buffered_bytes: u64 = |s| s.buffered_bytes;
    /// Bytes that came from an object store or HTTP server.
    network_bytes: u64 = |s| s.network_bytes;
    /// Bytes that were compared with a manifest before they were handed out.
    verified_bytes: u64 = |s| s.verified_bytes;
    /// Bytes read only because blocks are verified whole.
    verification_excess_bytes: u64 = |s| s.verification_excess_bytes;
    /// Calls made to the store.
    calls: u64 = |s| s.calls;
    /// Calls that an object store answered with "too fast".
    throttled: u64 = |s| s.throttled;
    /// Tensors loaded.
    tensors: u64 = |s| s.tensors;
    /// Blocks read.
    blocks: u64 = |s| s.blocks;
    /// The most reader threads that ran at once.
    readers: u64 = |s| s.readers;
    /// (readers, GB per second) of what the tuner tried, in order.
    tried: Vec<(usize, f64)> = |s| s.tried.iter().map(|trial| (trial.readers, trial.rate / 1e9)).collect();
    /// Bytes of a block.
    block_bytes: u64 = |s| s.block_bytes;
    /// Staging memory in bytes.
    staging_bytes: u64 = |s| s.staging_bytes;
    /// What most of the bytes lie on: "ext4 on nvme0n1p2", "nfs4", "tmpfs", "s3".
    storage: String = |s| s.storage.clone();
    /// Its class: "memory", "disk", "nfs", "smb", "parallel", "fuse", "virtiofs", "9p", "image" or "remote".
    storage_kind: &'static str = |s| s.storage_kind;
    /// Whether the staging memory was pinned.
    pinned: bool = |s| s.pinned;
    /// Wall-clock seconds.
    seconds: f64 = |s| s.wall.as_secs_f64();
    /// GB (1e9 bytes) per second.
    gb_per_s: f64 = |s| s.gb_per_s();
    /// Seconds that reader threads had a core.
    cpu_seconds: f64 = |s| s.cpu.as_secs_f64();
    /// Reader seconds in store reads.
    reading_seconds: f64 = |s| s.reading.as_secs_f64();
    /// Of those: copying from the page cache.
    cached_reading_seconds: f64 = |s| s.cached_reading.as_secs_f64();
    /// Reader seconds in host copies and in issuing device copies.
    copying_seconds: f64 = |s| s.copying.as_secs_f64();
    /// Reader seconds waiting for device copies.
    device_wait_seconds: f64 = |s| s.device_wait.as_secs_f64();
    /// Reader seconds waiting for destinations.
    consumer_wait_seconds: f64 = |s| s.consumer_wait.as_secs_f64();
    /// What limited the load: "disk", "network", "cores", "page cache", "pcie", "memory" or "consumer".
    limited_by: &'static str = |s| s.limited_by();
    /// What to do about that, in a sentence; None where nothing was loaded.
    advice: Option<&'static str> = |s| s.advice();
    /// Fallbacks taken and limits met, in words.
    notes: Vec<String> = |s| s.notes.clone();
}

/// The figures that people look at first.
fn summary(stats: &penstock::stats::LoadStats) -> String {
    let seconds = stats.wall.as_secs_f64();
    let speed = if seconds > 0.0 { stats.bytes as f64 / seconds } else { 0.0 };
    format!(
        "<penstock.LoadStats: {}, {} in {seconds:.3} s ({}/s), limited by {}; {}, storage {:?}>",
        plural(stats.tensors, "tensor"),
        scaled(stats.bytes as f64),
        scaled(speed),
        stats.limited_by(),
        plural(stats.readers, "reader"),
        stats.storage,
    )
}

/// Gives staging memory that no load is using back to the system; returns the bytes.
#[pyfunction]
pub fn release_staging(py: Python<'_>) -> usize {
    py.detach(Arena::release_all)
}

/// (bytes, buffers, buffers in use) of the process's staging memory.
#[pyfunction]
pub fn staging_usage() -> (usize, usize, usize) {
    let usage = Arena::usage_all();
    (usage.bytes, usage.buffers, usage.buffers_taken)
}
