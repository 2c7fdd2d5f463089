//! One load, from the first destination attached to the last tensor taken.
//!
//! A child after `fork` has a copy of the session but none of its threads. Its copy can be dropped and refuses to be
//! used; it must not wait for those threads, nor for a lock that one of them held.

use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, never, unbounded};

use super::landing::host_tensor;
use super::reader::{DEPTH, DeviceReader, HostReader};
use super::shared::{Canceller, Message, Shared};
use crate::checkpoint::Checkpoint;
use crate::device::{Device, Fence};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{HostSlab, HostTensor, Lease, Owner, PAGE};
use crate::plan::{Layout, Plan};
use crate::stats::LoadStats;
use crate::store::{ALIGNMENT_PADDING, shown};
use crate::trace;
use crate::tune::{Readers, Settings, Storage};

/// Where a load's tensors go.
pub enum Target {
    /// Fresh host memory, one slab for the whole load, from which [`Session::take_host`] hands out each tensor.
    Slab,
    /// Host memory of the caller.
    Host,
    /// Memory of a device, allocated by the caller; staging buffers come from an arena of at most `staging_bytes`.
    Device {
        /// The device.
        device: Arc<dyn Device>,
        /// The budget of the staging arena in bytes.
        staging_bytes: usize,
    },
}

/// What [`Session::next`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// This tensor (an index into the plan's tensors) has landed.
    Landed(u32),
    /// Nothing landed in the time given.
    Waiting,
    /// Every tensor of the plan has landed and was taken from here.
    Done,
}

/// One load. Dropping it cancels what is left of it; after that, no thread, file or buffer of it remains.
pub struct Session {
    shared: Arc<Shared>,
    owner: Owner,
    landed: Receiver<Message>,
    device: Option<Arc<dyn Device>>,
    slab: Option<(Arc<HostSlab>, Layout)>,
    given: Vec<bool>,
    attached: usize,
    delivered: usize,
    began: Instant,
    ended: Option<Duration>,
    /// Where the load's trace is to be written.
    trace: Option<PathBuf>,
}

impl Session {
    /// Begins to load `plan` from `checkpoint` with as many threads as pay, within `readers`. Nothing is read before destinations
    /// are attached.
    ///
    /// # Errors
    /// `Memory` where the slab cannot be reserved or threads cannot be started, `Device` where the device refuses.
    pub fn start(
        checkpoint: Arc<Checkpoint>,
        plan: Arc<Plan>,
        target: Target,
        readers: Readers,
    ) -> Result<Self> {
        let began = Instant::now();
        let tensors = plan.tensors().len();
        let (messages, landed) = unbounded();
        let slab = match target {
            Target::Slab => {
                let layout = Layout::of(&plan);
                let bytes = usize::try_from(layout.bytes()).unwrap_or(usize::MAX);
                Some((HostSlab::reserve(bytes)?, layout))
            }
            Target::Host | Target::Device { .. } => None,
        };
        // A reader more pays only where it has blocks to read.
        let readers = readers.at_most(plan.blocks().len());
        let shared = Arc::new(Shared::new(checkpoint, plan, slab.is_some(), readers, messages));
        let mut session = Self {
            shared,
            owner: Owner::current(),
            landed,
            device: None,
            slab,
            given: vec![false; tensors],
            attached: 0,
            delivered: 0,
            began,
            ended: None,
            trace: None,
        };
        match target {
            Target::Device { device, staging_bytes } => {
                session.start_device_readers(readers, &device, staging_bytes)?;
            }
            Target::Slab | Target::Host => {
                session.shared.reader_pool.start(&session.shared, readers.initial(), || {
                    Box::new(|shared: &Arc<Shared>| HostReader::new(shared).run(shared))
                })?;
            }
        }
        Ok(session)
    }

    fn start_device_readers(
        &mut self,
        readers: Readers,
        device: &Arc<dyn Device>,
        staging: usize,
    ) -> Result<()> {
        let buffer_bytes = usize::try_from(self.shared.plan.block_bytes())
            .unwrap_or(usize::MAX)
            .saturating_add(ALIGNMENT_PADDING);
        // A failing device fails here, not in a thread.
        drop(device.stream()?);
        let buffers = readers.buffers(DEPTH).min(self.shared.plan.blocks().len());
        let lease = Arc::new(Lease::begin(buffer_bytes, staging, buffers, device.pinning()));
        self.device = Some(Arc::clone(device));
        let device = Arc::clone(device);
        self.shared.reader_pool.start(&self.shared, readers.initial(), move || {
            let (device, lease) = (Arc::clone(&device), Arc::clone(&lease));
            Box::new(move |shared: &Arc<Shared>| {
                let done = DeviceReader::new(shared, device, Arc::clone(&lease)).run(shared);
                let usage = lease.usage();
                shared.with_stats(|stats| {
                    stats.staging_bytes = stats.staging_bytes.max(usage.bytes as u64);
                    stats.pinned = usage.unpinned_because.is_none();
                    lease.notes().into_iter().for_each(|note| stats.note(note));
                });
                done
            })
        })
    }

    /// Says where the objects lie, for the statistics, and how they are read: whether reading them directly can gain
    /// anything, and the most bytes to ask for at once. To be called before destinations are attached.
    pub fn on_storage(&self, storage: &Storage, settings: &Settings) {
        if !settings.direct {
            self.shared.objects.avoid_direct();
        }
        self.shared.set_request_bytes(settings.request_bytes);
        self.shared.with_stats(|stats| {
            stats.storage.clone_from(&storage.name);
            stats.storage_kind = storage.kind.name();
            stats.network = storage.is_network();
            storage.notes.iter().for_each(|note| stats.note(note.clone()));
        });
    }

    /// Records what readers do and adds it to the trace at `path` when the load ends, however it ends. To be called before
    /// destinations are attached. A trace that cannot be written is logged and fails nothing.
    pub fn trace_to(&mut self, path: PathBuf) {
        self.trace = Some(path);
        self.shared.record();
    }

    /// Writes the trace, once, after the readers have ended.
    fn write_trace(&mut self) {
        if let Some(traces) = self.shared.trace()
            && let Some(path) = self.trace.take().filter(|_| self.owner.is_current())
        {
            let outcome = match (self.shared.failure(), self.ended) {
                (Some(_), _) => trace::Outcome::Failed,
                (None, Some(_)) => trace::Outcome::Complete,
                (None, None) => trace::Outcome::Cancelled,
            };
            let checkpoint = self.shared.objects.checkpoint();
            let block = |number: u32| {
                let block = &self.shared.plan.blocks()[number as usize];
                let location = shown(&checkpoint.objects()[block.object as usize].location).into_owned();
                let file = location.rsplit('/').next().unwrap_or_default().to_owned();
                trace::BlockShown { file, range: block.range.clone() }
            };
            let mut traces = traces.take();
            traces.sort_by_key(|reader| reader.thread);
            if let Err(error) = trace::write(&path, self.began, &self.stats(), outcome, &traces, block) {
                tracing::warn!(path = %path.display(), %error, "the trace of a load could not be written");
            }
        }
    }

    /// What is loaded.
    pub fn plan(&self) -> &Plan {
        &self.shared.plan
    }

    /// What cancels this load from another thread, whoever has the session.
    pub fn canceller(&self) -> Canceller {
        self.shared.canceller()
    }

    /// Why the load ended before its last tensor was taken, if it did: its first failure, or `Cancelled`.
    pub fn ended_early(&self) -> Option<Error> {
        if !self.shared.is_cancelled() {
            return None;
        }
        let unfinished = self.delivered < self.given.len();
        self.shared.failure().or_else(|| unfinished.then(cancelled))
    }

    /// How many tensors have destinations.
    pub fn attached(&self) -> usize {
        self.attached
    }

    /// Gives the next `addresses.len()` tensors of the plan their destinations. Copies to a device wait for what is
    /// queued now on the consumer's stream `consumer_stream`.
    ///
    /// # Safety
    /// Each address must be that of memory as long as its tensor's planned bytes, on the load's target, that overlaps no
    /// other tensor's, stays allocated, and is neither read nor written by anyone else until the tensor has landed or the
    /// session is dropped.
    ///
    /// # Errors
    /// `Destination` where there are more addresses than tensors left, for an address that no memory of the tensor's
    /// length can have (null, or past the end of the address space), or for a session that has a slab of its own;
    /// `Device` where the driver refuses; once the load has failed or was cancelled, as [`Session::next`]. None of the
    /// addresses is used then.
    #[allow(unsafe_code)]
    pub unsafe fn attach(&mut self, addresses: &[u64], consumer_stream: u64) -> Result<()> {
        self.check_running()?;
        if self.slab.is_some() {
            return Err(Error::new(ErrorKind::Destination, "this load brings its own memory"));
        }
        let fence = self.device.as_ref().map(|device| device.fence(consumer_stream)).transpose()?;
        self.attach_all(addresses, fence.map(|fence| (consumer_stream, fence)))
    }

    /// Lets the next `tensors` of the plan be read to the session's slab.
    ///
    /// # Errors
    /// `Destination` where fewer tensors are left, or for a session without a slab; once the load has failed or was
    /// cancelled, as [`Session::next`].
    pub fn attach_slab(&mut self, tensors: usize) -> Result<()> {
        self.check_running()?;
        let Some((slab, layout)) = &self.slab else {
            return Err(Error::new(
                ErrorKind::Destination,
                "this load was started without memory of its own",
            ));
        };
        let end = (self.attached + tensors).min(self.given.len());
        let addresses: Vec<_> = (self.attached..end).map(|i| slab.address() + layout.offset(i)).collect();
        self.attach_all(&addresses, None)
    }

    fn attach_all(&mut self, addresses: &[u64], fence: Option<(u64, Arc<dyn Fence>)>) -> Result<()> {
        let end = self.attached + addresses.len();
        if end > self.given.len() {
            return Err(Error::new(
                ErrorKind::Destination,
                format!("{end} destinations for {} tensors", self.given.len()),
            ));
        }
        for (tensor, address) in (self.attached..end).zip(addresses) {
            self.check_address(tensor, *address)?;
        }
        for (tensor, address) in (self.attached..end).zip(addresses) {
            self.shared.destinations.set(tensor, *address);
        }
        self.shared.attached(self.attached..end, fence);
        self.attached = end;
        Ok(())
    }

    /// Refuses addresses where no memory can be. No other can be told from good ones: those are the caller's promise.
    fn check_address(&self, tensor: usize, address: u64) -> Result<()> {
        let planned = &self.shared.plan.tensors()[tensor];
        let bytes = planned.bytes();
        let cause = match address.checked_add(bytes) {
            _ if bytes == 0 => return Ok(()),
            // No system maps the first page, and what lies there is an offset into a tensor without memory.
            _ if address < PAGE as u64 => "has no memory",
            // Objects in memory are shorter than half of the address space.
            Some(end) if end <= i64::MAX as u64 => return Ok(()),
            _ => "reaches past the end of the address space",
        };
        Err(Error::new(
            ErrorKind::Destination,
            format!("its destination of {bytes} bytes at address {address:#x} {cause}"),
        )
        .tensor(&*planned.name)
        .remedy("Give a tensor with memory of its own"))
    }

    /// The next tensor that has landed, waiting for at most `timeout`.
    ///
    /// # Errors
    /// The first failure of the load, or `Cancelled` where it was cancelled or stopped; after it, the session only ends.
    pub fn next(&mut self, timeout: Duration) -> Result<Next> {
        self.check_running().inspect_err(|_| self.stop_failed())?;
        if self.delivered == self.given.len() {
            return Ok(Next::Done);
        }
        let since = Instant::now();
        loop {
            match self.landed.recv_timeout(timeout.saturating_sub(since.elapsed())) {
                Ok(Message::Landed(tensor)) => {
                    self.delivered += 1;
                    if self.delivered == self.given.len() {
                        self.ended = Some(self.began.elapsed());
                    }
                    return Ok(Next::Landed(tensor));
                }
                Ok(Message::Ended) => self.check_running().inspect_err(|_| self.stop_failed())?,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(Next::Waiting),
            }
        }
    }

    /// The memory of a landed tensor of a [`Target::Slab`] load, which can be had once.
    ///
    /// # Errors
    /// `Destination` the second time, or before it has landed. Once the load has ended, its failure or `Cancelled`: by
    /// then its memory may be gone, however many tensors were delivered.
    pub fn take_host(&mut self, tensor: u32) -> Result<HostTensor> {
        let index = tensor as usize;
        let landed = index < self.attached && self.shared.has_landed(index);
        let taken = match &self.slab {
            Some(slab) if landed && !std::mem::replace(&mut self.given[index], true) => slab,
            _ if self.shared.is_cancelled() => {
                return Err(self.shared.failure().unwrap_or_else(cancelled));
            }
            _ => {
                let cause = format!("tensor number {tensor} has not landed or was taken already");
                return Err(Error::new(ErrorKind::Destination, cause));
            }
        };
        let (slab, layout) = taken;
        let bytes = self.shared.plan.tensors()[index].bytes();
        Ok(host_tensor(slab, layout.offset(index), bytes))
    }

    /// Ends the load after its last tensor: checks that no object changed meanwhile, and says what was done.
    ///
    /// # Errors
    /// `Changed` where an object was written to or replaced during the load: its tensors may be a mixture.
    pub fn finish(&mut self) -> Result<LoadStats> {
        self.check_owner()?;
        self.stop_reading();
        let unchanged = self.shared.objects.verify_unchanged();
        let notes = self.shared.objects.notes();
        self.shared.with_stats(|stats| notes.into_iter().for_each(|note| stats.note(note)));
        self.stop();
        unchanged.map(|()| self.stats())
    }

    /// What was done so far; complete after [`Session::finish`].
    pub fn stats(&self) -> LoadStats {
        let mut stats = self.shared.stats();
        stats.wall = self.ended.unwrap_or_else(|| self.began.elapsed());
        stats
    }

    /// Ends the load, however far it is. Returns when readers have stopped, copies have ended, files are closed, and
    /// memory that was not taken is given back; what has not landed never will.
    pub fn stop(&mut self) {
        self.stop_reading();
        self.write_trace();
        self.close_objects();
        self.slab = None;
    }

    fn close_objects(&mut self) {
        // Readers have dropped their shares by the time they were joined.
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.objects.close();
        }
    }

    /// Ends a load that has failed. What landed before can still be taken. One that was cancelled is ended by its owner: a
    /// reader may be waiting for storage, which must not delay the answer.
    fn stop_failed(&mut self) {
        if self.owner.is_current() && self.shared.failure().is_some() {
            self.stop_reading();
            self.close_objects();
        }
    }

    /// # Errors
    /// As [`Session::next`], and as [`Session::check_owner`].
    fn check_running(&self) -> Result<()> {
        self.check_owner()?;
        self.ended_early().map_or(Ok(()), Err)
    }

    /// # Errors
    /// `Cancelled` in a child of the process that began the load.
    fn check_owner(&self) -> Result<()> {
        if self.owner.is_current() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Cancelled, "the load belongs to the process that this one was forked from")
            .remedy("Begin a load of its own in the child"))
    }

    fn stop_reading(&mut self) {
        if !self.owner.is_current() {
            // To a child's C library its parent's threads do not exist: they are neither joined nor let go.
            let _ = ManuallyDrop::new(Arc::clone(&self.shared));
            let _ = ManuallyDrop::new(std::mem::replace(&mut self.landed, never()));
            return;
        }
        self.shared.cancel();
        self.shared.reader_pool.join();
    }

    /// The checkpoint that is loaded from.
    pub fn checkpoint(&self) -> &Checkpoint {
        self.shared.objects.checkpoint()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop();
    }
}

fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, "the load was cancelled")
}
