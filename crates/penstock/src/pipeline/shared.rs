//! What the owner and the readers of a load share: the queue of blocks, what has landed, how it ended.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;

use super::landing::Destinations;
use super::meter::Meter;
use super::objects::Objects;
use crate::checkpoint::Checkpoint;
use crate::device::Fence;
use crate::error::Error;
use crate::plan::{Block, Plan};
use crate::stats::LoadStats;
use crate::tune::Bounds;

/// What readers tell the owner.
pub(super) enum Message {
    /// A tensor has landed.
    Landed(u32),
    /// The load has failed; [`Shared::failure`] says how.
    Failed,
}

/// What the owner and the readers of a load share.
pub(super) struct Shared {
    pub(super) plan: Arc<Plan>,
    pub(super) objects: Objects,
    pub(super) destinations: Destinations,
    remaining: Box<[AtomicU64]>,
    queue: Mutex<Queue>,
    wake: Condvar,
    meter: Meter,
    cancelled: AtomicBool,
    failure: Mutex<Option<Error>>,
    stats: Mutex<LoadStats>,
    messages: Sender<Message>,
}

#[derive(Default)]
struct Queue {
    /// Blocks handed to readers.
    taken: usize,
    /// Blocks whose destinations are all attached.
    ready: usize,
    /// How many fences there were, and the last one, which covers those before it.
    fence: Option<(u64, Arc<dyn Fence>)>,
}

/// What a reader finds in the queue.
pub(super) enum Take {
    Block(usize),
    /// The next blocks lack destinations.
    NotYet,
    /// Fewer readers are wanted than there are.
    Parked,
    Over,
}

impl Shared {
    pub(super) fn new(
        checkpoint: Arc<Checkpoint>,
        plan: Arc<Plan>,
        slab: bool,
        readers: Bounds,
        messages: Sender<Message>,
    ) -> Self {
        let tensors = plan.tensors();
        Self {
            objects: Objects::of(checkpoint),
            destinations: Destinations::new(tensors.len(), slab),
            remaining: tensors.iter().map(|tensor| AtomicU64::new(tensor.bytes())).collect(),
            queue: Mutex::default(),
            wake: Condvar::new(),
            meter: Meter::new(readers, plan.block_bytes()),
            cancelled: AtomicBool::new(false),
            failure: Mutex::new(None),
            stats: Mutex::new(LoadStats {
                bytes: plan.bytes(),
                tensors: tensors.len() as u64,
                blocks: plan.blocks().len() as u64,
                block_bytes: plan.block_bytes(),
                ..LoadStats::default()
            }),
            messages,
            plan,
        }
    }

    /// Tells readers that these tensors have destinations now, and from when on copies to them may run.
    pub(super) fn attached(&self, tensors: Range<usize>, fence: Option<Arc<dyn Fence>>) {
        for tensor in tensors.clone().filter(|tensor| self.has_landed(*tensor)) {
            // Nothing is to be read for an empty one.
            self.send(Message::Landed(u32::try_from(tensor).unwrap_or(u32::MAX)));
        }
        let mut queue = lock(&self.queue);
        queue.ready = self.plan.blocks_ready(tensors.end);
        if let Some(fence) = fence {
            let number = queue.fence.as_ref().map_or(0, |(number, _)| *number) + 1;
            queue.fence = Some((number, fence));
        }
        drop(queue);
        self.wake.notify_all();
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

    /// The next block for reader number `reader`, if one is ready and so many readers are wanted.
    pub(super) fn take(&self, reader: usize) -> Take {
        if self.is_cancelled() {
            return Take::Over;
        }
        let mut queue = lock(&self.queue);
        match queue.taken {
            taken if taken == self.plan.blocks().len() => Take::Over,
            _ if reader >= self.meter.active() => Take::Parked,
            taken if taken < queue.ready => {
                queue.taken += 1;
                if queue.taken == self.plan.blocks().len() {
                    // Nobody waits for more.
                    self.wake.notify_all();
                }
                Take::Block(taken)
            }
            _ => Take::NotYet,
        }
    }

    /// Waits until there is a block for this reader or the load is over; returns the time that took.
    pub(super) fn wait_for_blocks(&self, reader: usize) -> Duration {
        let began = Instant::now();
        self.wait_while(|queue| queue.taken >= queue.ready || reader >= self.meter.active());
        began.elapsed()
    }

    /// Waits until so many readers are wanted or the load is over.
    pub(super) fn wait_until_wanted(&self, reader: usize) {
        self.wait_while(|_| reader >= self.meter.active());
    }

    fn wait_while(&self, idle: impl Fn(&Queue) -> bool) {
        let blocks = self.plan.blocks().len();
        let waits = |queue: &mut Queue| queue.taken < blocks && !self.is_cancelled() && idle(queue);
        drop(self.wake.wait_while(lock(&self.queue), waits).unwrap_or_else(PoisonError::into_inner));
    }

    /// Counts what a reader brought in and wakes others if more are wanted now.
    pub(super) fn count(&self, block: &Block, reading: Duration) {
        if self.meter.count(block.range.end - block.range.start, reading) {
            // Under the lock, so that no reader misses it between looking and going to sleep.
            drop(lock(&self.queue));
            self.wake.notify_all();
        }
    }

    /// The load's figures so far.
    pub(super) fn stats(&self) -> LoadStats {
        let mut stats = lock(&self.stats).clone();
        let (readers, tried) = self.meter.decisions();
        stats.readers = (readers as u64).min(stats.readers);
        stats.tried = tried;
        stats
    }

    /// The consumer's latest fence, if it is later than number `seen`.
    pub(super) fn fence_after(&self, seen: u64) -> Option<(u64, Arc<dyn Fence>)> {
        lock(&self.queue).fence.clone().filter(|(number, _)| *number > seen)
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
        self.cancelled.load(Ordering::Acquire)
    }

    /// Stops readers at their next block.
    pub(super) fn cancel(&self) {
        // Under the lock, so that no reader misses it between looking and going to sleep.
        let queue = lock(&self.queue);
        self.cancelled.store(true, Ordering::Release);
        drop(queue);
        self.wake.notify_all();
    }

    /// Ends the load with `error`, unless it has failed already.
    pub(super) fn fail(&self, error: Error) {
        lock(&self.failure).get_or_insert(error);
        self.cancel();
        self.send(Message::Failed);
    }

    fn send(&self, message: Message) {
        // The receiver lives as long as the session, which outlives its readers.
        let _ = self.messages.send(message);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every update under these locks is a single step, so a panic elsewhere leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
