//! What the owner and the readers of a load share: the queue of blocks, what has landed, how it ended.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;

use super::landing::Destinations;
use super::meter::Meter;
use super::objects::Objects;
use super::queue::{Found, Kind, Queue, Room};
use crate::checkpoint::Checkpoint;
use crate::device::Fence;
use crate::error::Error;
use crate::plan::{Block, Plan};
use crate::stats::LoadStats;
use crate::tune::Readers;

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
    work: Mutex<Work>,
    wake: Condvar,
    meter: Meter,
    copies: usize,
    cancelled: AtomicBool,
    failure: Mutex<Option<Error>>,
    stats: Mutex<LoadStats>,
    messages: Sender<Message>,
}

/// Who works on what, under one lock.
struct Work {
    queue: Queue,
    /// Readers that sleep.
    asleep: usize,
    /// How many fences there were, and the last one, which covers those before it.
    fence: Option<(u64, Arc<dyn Fence>)>,
}

/// What a reader is to do.
pub(super) enum Take {
    /// Bring in this block.
    Block(usize, Kind),
    /// Wait: the next blocks lack destinations, so this is the consumer's time.
    NotYet,
    /// Wait: enough readers are at work.
    Enough,
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
        Self {
            objects: Objects::of(checkpoint),
            destinations: Destinations::new(tensors.len(), slab),
            remaining: tensors.iter().map(|tensor| AtomicU64::new(tensor.bytes())).collect(),
            work: Mutex::new(Work { queue: Queue::new(plan.blocks().len()), asleep: 0, fence: None }),
            wake: Condvar::new(),
            meter: Meter::new(readers.fetches, plan.block_bytes()),
            copies: readers.copies,
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
        let mut work = lock(&self.work);
        work.queue.set_ready(self.plan.blocks_ready(tensors.end));
        if let Some(fence) = fence {
            let number = work.fence.as_ref().map_or(0, |(number, _)| *number) + 1;
            work.fence = Some((number, fence));
        }
        self.wake_one(&work);
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

    /// What a reader is to do next, having ended its work of the kind `done`.
    pub(super) fn take(&self, done: Option<Kind>) -> Take {
        let mut work = lock(&self.work);
        if let Some(kind) = done {
            work.queue.done(kind);
        }
        loop {
            if self.is_cancelled() {
                return Take::Over;
            }
            match work.queue.take(self.room(), |block| self.is_cached(block)) {
                Found::Block(block, kind) => {
                    if work.queue.is_over() {
                        self.wake.notify_all();
                    } else {
                        self.wake_one(&work);
                    }
                    return Take::Block(block, kind);
                }
                Found::Closed(block) => {
                    // Opening may take long, on a file server say. A failure is met again by who reads the block.
                    drop(work);
                    let _ = self.objects.get(self.plan.blocks()[block].object);
                    work = lock(&self.work);
                }
                Found::NotYet => return Take::NotYet,
                Found::Enough => return Take::Enough,
                Found::Over => return Take::Over,
            }
        }
    }

    /// Waits until there is something to do or the load is over; returns the time that took.
    pub(super) fn wait_for_work(&self) -> Duration {
        let began = Instant::now();
        let mut work = lock(&self.work);
        work.asleep += 1;
        let nothing_to_do = |work: &mut Work| {
            !work.queue.is_over() && !self.is_cancelled() && !work.queue.wants_more(self.room())
        };
        let mut work = self.wake.wait_while(work, nothing_to_do).unwrap_or_else(PoisonError::into_inner);
        work.asleep -= 1;
        began.elapsed()
    }

    /// Wakes a reader if there is something to do for one more. It will do the same, so that as many wake as find work.
    fn wake_one(&self, work: &Work) {
        if work.asleep > 0 && work.queue.wants_more(self.room()) {
            self.wake.notify_one();
        }
    }

    fn room(&self) -> Room {
        Room { copies: self.copies, fetches: self.meter.active() }
    }

    fn is_cached(&self, block: usize) -> Option<bool> {
        let block = &self.plan.blocks()[block];
        let object = self.objects.if_open(block.object)?;
        // What the store cannot tell, and what will fail, is fetched.
        Some(object.ok().and_then(|object| object.is_cached(&block.range)).unwrap_or(false))
    }

    /// Counts what a reader fetched, and wakes another if more of them are wanted now.
    pub(super) fn fetched(&self, block: &Block, reading: Duration) {
        if self.meter.count(block.range.end - block.range.start, reading) {
            self.wake_one(&lock(&self.work));
        }
    }

    /// The load's figures so far.
    pub(super) fn stats(&self) -> LoadStats {
        let mut stats = lock(&self.stats).clone();
        stats.readers = lock(&self.work).queue.most_at_work() as u64;
        stats.tried = self.meter.tried();
        stats
    }

    /// The consumer's latest fence, if it is later than number `seen`.
    pub(super) fn fence_after(&self, seen: u64) -> Option<(u64, Arc<dyn Fence>)> {
        lock(&self.work).fence.clone().filter(|(number, _)| *number > seen)
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
        let work = lock(&self.work);
        self.cancelled.store(true, Ordering::Release);
        drop(work);
        self.wake.notify_all();
        self.objects.interrupt();
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
