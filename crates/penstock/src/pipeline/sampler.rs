//! Samples the throughput of a load for the tuner, in epochs, and holds the number of readers that may fetch at once.
//!
//! Counting is two relaxed additions for a block. Whichever reader finds an epoch full closes it; the others go on.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

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
}

struct OpenEpoch {
    tuner: Tuner,
    /// Whether the store throttled in it. What it says in the same epoch again was asked before that.
    throttled: bool,
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
            epoch: Mutex::new(OpenEpoch {
                tuner,
                throttled: false,
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
        let is_initial = open.tuner.is_initial();
        let blocks = if is_initial { 1 } else { active as u64 * BLOCKS_OF_AN_EPOCH };
        if came < blocks * self.block_bytes || took < EPOCH {
            return false;
        }
        let seconds = took.as_secs_f64();
        let busy = Duration::from_nanos(reading.saturating_sub(open.reading)).as_secs_f64();
        let on_cpu = if is_initial { on_cpu(took).unwrap_or(0.0) } else { 1.0 };
        let reading_share = busy / (seconds * active as f64);
        let now = open.tuner.observe(Epoch { bytes: came, seconds, reading: reading_share, on_cpu });
        (open.began, open.bytes, open.reading, open.throttled) = (Instant::now(), bytes, reading, false);
        self.active.store(now, Ordering::Release);
        now > active
    }

    /// The store says that it is asked too often. That ends the epoch.
    pub(super) fn on_throttle(&self) {
        let Ok(mut open) = self.epoch.lock() else { return };
        if self.tunes && !open.throttled {
            let now = open.tuner.on_throttle();
            self.active.store(now, Ordering::Release);
            open.began = Instant::now();
            open.bytes = self.bytes.load(Ordering::Relaxed);
            open.reading = self.reading.load(Ordering::Relaxed);
            open.throttled = true;
        }
    }

    /// What the tuner tried.
    pub(super) fn tried(&self) -> Vec<Trial> {
        self.epoch.lock().map_or_else(|_| Vec::new(), |open| open.tuner.tried().to_vec())
    }
}

/// The share of `time`, in which this thread may have been started, that it had a core or waited for one.
fn on_cpu(time: Duration) -> Option<f64> {
    let counters = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let mut nanos = counters.split_whitespace().map_while(|counter| counter.parse::<u64>().ok());
    Some(Duration::from_nanos(nanos.next()? + nanos.next()?).as_secs_f64() / time.as_secs_f64())
}
