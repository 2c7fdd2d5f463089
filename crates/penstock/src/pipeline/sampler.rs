//! The load's gauge: what readers fetch, told to the tuner in epochs, and how many of them may fetch at once.
//!
//! Counting is two relaxed additions for a block. Whichever reader finds an epoch full closes it; the others go on.
//!
//! Where the tuner asks what the first few readers spend their time on, their clocks are watched, and whoever has nothing to
//! do looks at them when a window is over. Blocks say too little, too late: over a slow connection the first takes longer
//! than the whole question may.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::watch::{ThreadClock, Watch};
use crate::tune::{Bounds, Epoch, Trial, Tuner};

/// An epoch takes at least this long: shorter ones are noise.
const EPOCH: Duration = Duration::from_millis(20);
/// And this many blocks for each reader, so that every one of them had a part in it.
const BLOCKS_OF_AN_EPOCH: u64 = 2;

pub(super) struct ThroughputSampler {
    bytes: AtomicU64,
    reading: AtomicU64,
    active: AtomicUsize,
    block_bytes: u64,
    /// Whether there is anything to find; if not, nothing is measured.
    tunes: bool,
    epoch: Mutex<OpenEpoch>,
    /// Whether clocks are watched.
    watches: AtomicBool,
    watch: Mutex<Watched>,
    first: usize,
}

struct Watched {
    watch: Option<Watch<ThreadClock>>,
    /// What the last look said.
    share: Option<f64>,
}

struct OpenEpoch {
    tuner: Tuner,
    /// Whether the store pushed back in it. What it says in the same epoch again was asked before that.
    pushed_back: bool,
    began: Instant,
    bytes: u64,
    reading: u64,
}

impl ThroughputSampler {
    pub(super) fn new(bounds: Bounds, block_bytes: u64) -> Self {
        let tuner = Tuner::new(bounds);
        Self {
            bytes: AtomicU64::new(0),
            reading: AtomicU64::new(0),
            active: AtomicUsize::new(tuner.readers()),
            block_bytes,
            tunes: !tuner.is_fixed(),
            watches: AtomicBool::new(tuner.asks_for_cores()),
            watch: Mutex::new(Watched {
                watch: tuner.asks_for_cores().then(|| Watch::new(Instant::now())),
                share: None,
            }),
            first: tuner.readers(),
            epoch: Mutex::new(OpenEpoch {
                tuner,
                pushed_back: false,
                began: Instant::now(),
                bytes: 0,
                reading: 0,
            }),
        }
    }

    /// How many readers may fetch at once now.
    pub(super) fn active(&self) -> usize {
        self.active.load(Ordering::Acquire)
    }

    /// Counts a block. Returns whether more readers may fetch than before.
    pub(super) fn count(&self, bytes: u64, reading: Duration) -> bool {
        if !self.tunes {
            return false;
        }
        let nanos = u64::try_from(reading.as_nanos()).unwrap_or(u64::MAX);
        let reading = self.reading.fetch_add(nanos, Ordering::Relaxed) + nanos;
        let bytes = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let Ok(mut open) = self.epoch.try_lock() else { return false };
        let active = self.active();
        let came = bytes.saturating_sub(open.bytes);
        let took = open.began.elapsed();
        if came < active as u64 * self.block_bytes * BLOCKS_OF_AN_EPOCH || took < EPOCH {
            return false;
        }
        let seconds = took.as_secs_f64();
        let busy = Duration::from_nanos(reading.saturating_sub(open.reading)).as_secs_f64();
        let now =
            open.tuner.observe(Epoch { bytes: came, seconds, reading: busy / (seconds * active as f64) });
        (open.began, open.bytes, open.reading, open.pushed_back) = (Instant::now(), bytes, reading, false);
        self.active.store(now, Ordering::Release);
        now > active
    }

    /// The store says that it is asked too often. That ends the epoch.
    pub(super) fn on_throttle(&self) {
        let Ok(mut open) = self.epoch.lock() else { return };
        if self.tunes && !open.pushed_back {
            let now = open.tuner.on_throttle();
            self.go_on(&mut open, now);
            open.pushed_back = true;
        }
    }

    /// Ends an epoch before its time: it was begun with another number of readers.
    fn go_on(&self, open: &mut OpenEpoch, readers: usize) {
        self.active.store(readers, Ordering::Release);
        (open.began, open.pushed_back) = (Instant::now(), false);
        open.bytes = self.bytes.load(Ordering::Relaxed);
        open.reading = self.reading.load(Ordering::Relaxed);
        if !open.tuner.asks_for_cores() {
            self.end_watch();
        }
    }

    /// Whether the clocks of readers that fetch are watched.
    pub(super) fn watches(&self) -> bool {
        self.watches.load(Ordering::Acquire)
    }

    /// Has the clock of this thread watched. Returns whether more readers may fetch than before: as many as there may be,
    /// where the kernel has no such clocks.
    pub(super) fn join_watch(&self) -> bool {
        let clock = ThreadClock::of_this_thread();
        let mut watched = lock(&self.watch);
        match (&mut watched.watch, clock) {
            (Some(watch), Some(clock)) => watch.join(clock),
            (Some(_), None) => {
                drop(watched);
                return self.learn(0.0);
            }
            (None, _) => {}
        }
        false
    }

    /// Says that readers have something to read from `now` on.
    pub(super) fn begin_watch(&self, now: Instant) {
        if let Some(watch) = &mut lock(&self.watch).watch {
            watch.begin_anew(now);
        }
    }

    /// How long it is until the next look.
    pub(super) fn until_look(&self, now: Instant) -> Duration {
        lock(&self.watch).watch.as_ref().map_or(Duration::ZERO, |watch| watch.rest(now))
    }

    /// Looks at the clocks, if it is time to. Returns whether more readers may fetch than before.
    pub(super) fn look(&self, now: Instant) -> bool {
        let mut watched = lock(&self.watch);
        let share = watched.watch.as_mut().and_then(|watch| watch.look(now));
        watched.share = share.or(watched.share);
        drop(watched);
        share.is_some_and(|share| self.learn(share))
    }

    fn learn(&self, share: f64) -> bool {
        let mut open = lock(&self.epoch);
        let before = self.active();
        let now = open.tuner.cores(share);
        if !open.tuner.asks_for_cores() {
            self.go_on(&mut open, now);
        }
        now > before
    }

    /// Lets go of the clocks.
    pub(super) fn end_watch(&self) {
        if self.watches.swap(false, Ordering::AcqRel) {
            lock(&self.watch).watch = None;
        }
    }

    /// How many readers it began with, and what the last look at their clocks said.
    pub(super) fn first(&self) -> (usize, Option<f64>) {
        (self.first, lock(&self.watch).share)
    }

    /// What the tuner tried.
    pub(super) fn tried(&self) -> Vec<Trial> {
        self.epoch.lock().map_or_else(|_| Vec::new(), |open| open.tuner.tried().to_vec())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half done under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
