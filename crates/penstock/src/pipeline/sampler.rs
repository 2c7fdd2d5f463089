//! Samples the throughput of a load for the tuner, in epochs.
//!
//! It lies under the lock of the load's work: a block is megabytes, so counting one costs nothing beside it.

use std::time::{Duration, Instant};

use crate::tune::{Bounds, Epoch, Trial, Tuner};

/// An epoch takes at least this long: shorter ones are noise.
const EPOCH: Duration = Duration::from_millis(20);
/// And this many blocks for each reader, so that every one of them had a part in it.
const BLOCKS_OF_AN_EPOCH: u64 = 2;

pub(super) struct ThroughputSampler {
    tuner: Tuner,
    block_bytes: u64,
    began: Instant,
    /// What was fetched in this epoch, and the readers' time for it.
    bytes: u64,
    reading: Duration,
    /// Whether the store throttled in it. What it says in the same epoch again was asked before that.
    throttled: bool,
}

impl ThroughputSampler {
    pub(super) fn new(bounds: Bounds, block_bytes: u64) -> Self {
        let (tuner, began) = (Tuner::new(bounds), Instant::now());
        Self { tuner, block_bytes, began, bytes: 0, reading: Duration::ZERO, throttled: false }
    }

    /// How many readers may fetch at once now.
    pub(super) fn active(&self) -> usize {
        self.tuner.readers()
    }

    /// Counts a block. Returns whether more readers may fetch than before.
    pub(super) fn count(&mut self, bytes: u64, reading: Duration) -> bool {
        if self.tuner.is_fixed() {
            return false;
        }
        self.bytes += bytes;
        self.reading += reading;
        let (active, took) = (self.active(), self.began.elapsed());
        let is_initial = self.tuner.is_initial();
        let blocks = if is_initial { 1 } else { active as u64 * BLOCKS_OF_AN_EPOCH };
        if self.bytes < blocks * self.block_bytes || took < EPOCH {
            return false;
        }
        let seconds = took.as_secs_f64();
        let reading = self.reading.as_secs_f64() / (seconds * active as f64);
        let on_cpu = if is_initial { on_cpu(took).unwrap_or(0.0) } else { 1.0 };
        let now = self.tuner.observe(Epoch { bytes: self.bytes, seconds, reading, on_cpu });
        self.begin_epoch(false);
        now > active
    }

    /// The store says that it is asked too often. That ends the epoch.
    pub(super) fn on_throttle(&mut self) {
        if !self.tuner.is_fixed() && !self.throttled {
            self.tuner.on_throttle();
            self.begin_epoch(true);
        }
    }

    fn begin_epoch(&mut self, throttled: bool) {
        (self.began, self.bytes, self.reading) = (Instant::now(), 0, Duration::ZERO);
        self.throttled = throttled;
    }

    /// What the tuner tried.
    pub(super) fn tried(&self) -> &[Trial] {
        self.tuner.tried()
    }
}

/// The share of `time`, in which this thread may have been started, that it had a core or waited for one.
fn on_cpu(time: Duration) -> Option<f64> {
    let counters = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let mut nanos = counters.split_whitespace().map_while(|counter| counter.parse::<u64>().ok());
    Some(Duration::from_nanos(nanos.next()? + nanos.next()?).as_secs_f64() / time.as_secs_f64())
}
