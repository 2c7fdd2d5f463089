//! What the owner and the readers of a load share: the queue of blocks, what has landed, how it ended.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;

use super::landing::Destinations;
use super::objects::Objects;
use super::queue::{Next, Queue, ReadKind, Room};
use super::reader_pool::ReaderPool;
use super::sampler::ThroughputSampler;
use crate::checkpoint::Checkpoint;
use crate::device::Fence;
use crate::error::Error;
use crate::memory::{Owner, PAGE};
use crate::plan::{Block, Plan};
use crate::stats::LoadStats;
use crate::store::{ReadContext, Store};
use crate::trace::Trace;
use crate::tune::{Readers, available_cores};

/// What readers tell the owner.
pub(super) enum Message {
    /// A tensor has landed.
    Landed(u32),
    /// The load has failed, as [`Shared::failure`] says, or was cancelled.
    Ended,
}

/// What the owner and the readers of a load share.
pub(super) struct Shared {
    pub(super) plan: Arc<Plan>,
    pub(super) objects: Objects,
    pub(super) destinations: Destinations,
    pub(super) reader_pool: ReaderPool,
    remaining: Box<[AtomicU64]>,
    work: Mutex<Work>,
    wake: Condvar,
    copies: usize,
    /// The most readers.
    most: usize,
    per_reader_fd: bool,
    request_bytes: AtomicU64,
    canceller: Canceller,
    failure: Mutex<Option<Error>>,
    stats: Mutex<LoadStats>,
    trace: OnceLock<Trace>,
}

/// A point in one of the consumer's streams that copies wait for.
struct StreamFence {
    number: u64,
    stream: u64,
    fence: Arc<dyn Fence>,
}

/// Who works on what, under one lock.
struct Work {
    queue: Queue,
    sampler: ThroughputSampler,
    /// Readers that sleep.
    asleep: usize,
    /// Since when there has been nothing to read for want of destinations, and for how long there was before.
    starved_since: Option<Instant>,
    starved: Duration,
    /// Of each of the consumer's streams the last fence, which covers those before it in the same stream, and no other.
    fences: Vec<StreamFence>,
    /// Fences so far.
    fence_count: u64,
}

impl Work {
    /// How long readers had nothing to read for want of destinations.
    fn starved(&self) -> Duration {
        self.starved + self.starved_since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// What a reader is to do.
pub(super) enum Take {
    /// Bring in this block.
    Block(usize, ReadKind),
    /// Wait for work.
    Nothing,
    /// End.
    Over,
}

impl Shared {
    pub(super) fn new(
        checkpoint: Arc<Checkpoint>,
        plan: Arc<Plan>,
        slab: bool,
        readers: Readers,
        messages: Sender<Message>,
    ) -> Self {
        let tensors = plan.tensors();
        let objects = Objects::of(checkpoint);
        Self {
            canceller: Canceller {
                owner: Owner::current(),
                cancelled: Arc::default(),
                store: objects.store(),
                messages,
            },
            objects,
            destinations: Destinations::new(tensors.len(), slab),
            reader_pool: ReaderPool::default(),
            remaining: tensors.iter().map(|tensor| AtomicU64::new(tensor.bytes())).collect(),
            work: Mutex::new(Work {
                queue: Queue::new(plan.blocks().len(), readers.per_reader_ranges),
                sampler: ThroughputSampler::new(readers.fetches, plan.block_bytes()),
                asleep: 0,
                starved_since: None,
                starved: Duration::ZERO,
                fences: Vec::new(),
                fence_count: 0,
            }),
            wake: Condvar::new(),
            copies: readers.copies,
            most: readers.most(),
            per_reader_fd: readers.per_reader_ranges,
            request_bytes: AtomicU64::new(u64::MAX),
            failure: Mutex::new(None),
            stats: Mutex::new(LoadStats {
                bytes: plan.bytes(),
                tensors: tensors.len() as u64,
                blocks: plan.blocks().len() as u64,
                block_bytes: plan.block_bytes(),
                cores: available_cores() as u64,
                ..LoadStats::default()
            }),
            plan,
            trace: OnceLock::new(),
        }
    }

    /// Tells readers that these tensors have destinations now, and from when on copies to them may run.
    pub(super) fn attached(&self, tensors: Range<usize>, fence: Option<(u64, Arc<dyn Fence>)>) {
        for tensor in tensors.clone().filter(|tensor| self.has_landed(*tensor)) {
            // Nothing is to be read for an empty one.
            self.send(Message::Landed(u32::try_from(tensor).unwrap_or(u32::MAX)));
        }
        let mut work = lock(&self.work);
        work.queue.set_ready(self.plan.blocks_ready(tensors.end));
        work.starved = work.starved();
        work.starved_since = None;
        if let Some((stream, fence)) = fence {
            work.fence_count += 1;
            let number = work.fence_count;
            work.fences.retain(|earlier| earlier.stream != stream);
            work.fences.push(StreamFence { number, stream, fence });
        }
        self.wake_one(&work);
    }

    /// The most bytes to ask of the storage at once.
    pub(super) fn request_bytes(&self) -> u64 {
        self.request_bytes.load(Ordering::Relaxed)
    }

    /// Sets that, for blocks that are not begun.
    pub(super) fn set_request_bytes(&self, bytes: u64) {
        self.request_bytes.store(bytes.max(PAGE as u64), Ordering::Relaxed);
    }

    /// Whether every byte of the tensor is in its final memory.
    pub(super) fn has_landed(&self, tensor: usize) -> bool {
        self.remaining[tensor].load(Ordering::Acquire) == 0
    }

    /// The first failure of the load, if it has failed.
    pub(super) fn failure(&self) -> Option<Error> {
        lock(&self.failure).clone()
    }

    /// Reads or changes the statistics.
    pub(super) fn with_stats<T>(&self, body: impl FnOnce(&mut LoadStats) -> T) -> T {
        body(&mut lock(&self.stats))
    }

    /// Where readers record what they do, if they are to.
    pub(super) fn trace(&self) -> Option<&Trace> {
        self.trace.get()
    }

    /// Has readers record from their next block on.
    pub(super) fn record(&self) {
        self.trace.get_or_init(Trace::default);
    }

    /// The context of one reader.
    pub(super) fn cx(&self) -> ReadContext {
        ReadContext { per_reader_fd: self.per_reader_fd, ..ReadContext::default() }
    }

    /// What a reader is to do next, having ended its work on the block `done`.
    pub(super) fn take(&self, done: Option<(usize, ReadKind)>) -> Take {
        let mut work = lock(&self.work);
        let mut after = None;
        if let Some((block, kind)) = done {
            work.queue.done(block, kind);
            after = (kind == ReadKind::Fetch).then_some(block);
        }
        loop {
            if self.is_cancelled() {
                return Take::Over;
            }
            let room = self.room(&work);
            match work.queue.take(room, after) {
                Next::Block(block, kind) => {
                    if work.queue.is_over() {
                        self.wake.notify_all();
                    } else {
                        self.wake_one(&work);
                    }
                    return Take::Block(block, kind);
                }
                Next::Probe(blocks) => {
                    // Another may look on meanwhile, or copy.
                    self.wake_one(&work);
                    drop(work);
                    let kinds: Vec<_> = blocks.map(|block| (block, self.classify(block))).collect();
                    work = lock(&self.work);
                    work.queue.enqueue(kinds);
                }
                Next::NotYet => {
                    work.starved_since.get_or_insert_with(Instant::now);
                    return Take::Nothing;
                }
                Next::Enough => return Take::Nothing,
                Next::Over => return Take::Over,
            }
        }
    }

    /// Waits until there is something to do or the load is over.
    pub(super) fn wait_for_work(&self) {
        let mut work = lock(&self.work);
        work.asleep += 1;
        while !work.queue.is_over() && !self.is_cancelled() && !work.queue.wants_more(self.room(&work)) {
            work = self.wake.wait(work).unwrap_or_else(PoisonError::into_inner);
        }
        work.asleep -= 1;
    }

    /// Wakes a reader if there is something to do for one more. It will do the same, so that as many wake as find work.
    fn wake_one(&self, work: &Work) {
        if work.asleep > 0 && work.queue.wants_more(self.room(work)) {
            self.wake.notify_one();
        }
    }

    fn room(&self, work: &Work) -> Room {
        Room { copies: self.copies, fetches: work.sampler.active() }
    }

    fn classify(&self, block: usize) -> ReadKind {
        let block = &self.plan.blocks()[block];
        // What the store cannot tell is fetched, and so is what cannot be opened: its reader meets the failure again.
        match self.objects.is_cached(block) {
            Some(true) => ReadKind::Copy,
            _ => ReadKind::Fetch,
        }
    }

    /// Counts what a reader fetched, and wakes another if more of them are wanted now.
    pub(super) fn fetched(self: &Arc<Self>, block: &Block, reading: Duration) {
        let mut work = lock(&self.work);
        if work.sampler.count(block.range.end - block.range.start, reading) {
            let wanted = self.most.min(self.copies + work.sampler.active());
            self.wake_one(&work);
            drop(work);
            self.reader_pool.grow(self, wanted);
        }
    }

    /// Has fewer readers fetch: the store says that it is asked too often.
    pub(super) fn on_throttle(&self) {
        lock(&self.work).sampler.on_throttle();
    }

    /// The load's figures so far.
    pub(super) fn stats(&self) -> LoadStats {
        let mut stats = lock(&self.stats).clone();
        let work = lock(&self.work);
        stats.readers = work.queue.most_at_work() as u64;
        // In readers' time, as the other stages are.
        stats.consumer_wait = work.starved() * u32::try_from(stats.readers).unwrap_or(u32::MAX);
        stats.tried = work.sampler.tried().to_vec();
        stats
    }

    /// The consumer's fences that are later than number `seen`, in order.
    pub(super) fn fences_after(&self, seen: u64) -> Vec<(u64, Arc<dyn Fence>)> {
        let work = lock(&self.work);
        let later = work.fences.iter().filter(|fence| fence.number > seen);
        later.map(|fence| (fence.number, Arc::clone(&fence.fence))).collect()
    }

    /// Counts a block's bytes as landed and tells of the tensors that are complete with it.
    pub(super) fn landed(&self, block: &Block) {
        for segment in self.plan.segments(block) {
            let before = self.remaining[segment.tensor as usize].fetch_sub(segment.bytes(), Ordering::AcqRel);
            if before == segment.bytes() {
                self.send(Message::Landed(segment.tensor));
            }
        }
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.canceller.is_cancelled()
    }

    /// What ends this load from elsewhere.
    pub(super) fn canceller(&self) -> Canceller {
        self.canceller.clone()
    }

    /// Stops readers at their next block, and wakes the owner if it waits for a tensor.
    pub(super) fn cancel(&self) {
        // Under the lock, so that no reader misses it between looking and going to sleep.
        let work = lock(&self.work);
        self.canceller.cancelled.store(true, Ordering::Release);
        drop(work);
        self.wake.notify_all();
        self.canceller.cancel();
    }

    /// Ends the load with `error`, unless it has failed already. What a reader of a cancelled load ends with is no failure
    /// of the load: it was interrupted.
    pub(super) fn fail(&self, error: Error) {
        let mut failure = lock(&self.failure);
        if !self.is_cancelled() {
            failure.get_or_insert(error);
        }
        drop(failure);
        self.cancel();
    }

    fn send(&self, message: Message) {
        // The receiver lives as long as the session, which outlives its readers.
        let _ = self.canceller.messages.send(message);
    }
}

/// Cancels one load from any thread, without waiting for anything: neither for its readers nor for whoever holds its
/// [`Session`](super::Session). Afterwards [`Session::next`](super::Session::next) fails with `Cancelled`, and the
/// session's owner ends it.
#[derive(Clone)]
pub struct Canceller {
    owner: Owner,
    cancelled: Arc<AtomicBool>,
    store: Arc<dyn Store>,
    messages: Sender<Message>,
}

impl Canceller {
    /// Cancels the load. Does nothing in a forked child, whose parent the load belongs to.
    pub fn cancel(&self) {
        if !self.is_ours() {
            return;
        }
        // Readers that sleep have nothing to read; they are woken when the session ends.
        self.cancelled.store(true, Ordering::Release);
        self.store.interrupt();
        let _ = self.messages.send(Message::Ended);
    }

    /// Whether the load was cancelled, has failed or was ended.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Whether the load belongs to this process, not to the one that it was forked from.
    pub fn is_ours(&self) -> bool {
        self.owner.is_current()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every update under these locks is a single step, so a panic elsewhere leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
