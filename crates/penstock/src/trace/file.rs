//! A trace as a file that Perfetto and chrome://tracing open: the Trace Event Format, JSON.
//!
//! A file may hold many loads: those of one process one after the other, or those of several ranks, which take turns by
//! a lock. So a load is added to what is there. Times are those of the system's monotonic clock, in microseconds:
//! processes of one machine lie on one time line. A file that is no trace of ours is left as it is.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Error, Read, Result, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use super::{Activity, Place, ReaderTrace, Route};
use crate::stats::LoadStats;

const HEAD: &str =
    "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"clock\":\"CLOCK_MONOTONIC\"},\"traceEvents\":[\n";
const TAIL: &str = "\n]}\n";

/// Numbers of rows that are no threads: above all numbers of threads that Linux gives.
static NEXT_ROW: AtomicU64 = AtomicU64::new(1 << 23);

/// How a load ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// With its last tensor.
    Complete,
    /// With an error.
    Failed,
    /// Its owner ended it.
    Cancelled,
}

/// What a block is for people.
pub struct BlockShown {
    /// The file's name.
    pub file: String,
    /// Its bytes in the file.
    pub range: Range<u64>,
}

/// Adds a load to the trace at `path`, which is made if it is not there.
///
/// # Errors
/// What the file system says; `InvalidData` for a file that is no trace of ours.
pub fn write(
    path: &Path,
    began: Instant,
    stats: &LoadStats,
    outcome: Outcome,
    traces: &[ReaderTrace],
    block: impl Fn(u32) -> BlockShown,
) -> Result<()> {
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    let mut text = String::new();
    for event in events(began, stats, outcome, traces, block) {
        text.push_str(if text.is_empty() { "" } else { ",\n" });
        text.push_str(&event.to_string());
    }
    flock(&file, FlockOperation::LockExclusive)?;
    let added = add(&mut file, &text);
    // A forked child may have the file too, so the lock is not left to its end.
    flock(&file, FlockOperation::Unlock)?;
    added
}

fn add(file: &mut File, events: &str) -> Result<()> {
    let len = file.metadata()?.len();
    if len == 0 {
        return file.write_all([HEAD, events, TAIL].concat().as_bytes());
    }
    let mut found = [vec![0; HEAD.len()], vec![0; TAIL.len()]];
    file.read_exact(&mut found[0]).map_err(|_| not_ours())?;
    let end = len - TAIL.len() as u64;
    file.seek(SeekFrom::Start(end))?;
    file.read_exact(&mut found[1])?;
    if found[0] != HEAD.as_bytes() || found[1] != TAIL.as_bytes() {
        return Err(not_ours());
    }
    file.seek(SeekFrom::Start(end))?;
    file.write_all([",\n", events, TAIL].concat().as_bytes())
}

fn not_ours() -> Error {
    Error::new(std::io::ErrorKind::InvalidData, "the file is no trace of Penstock, and is left as it is")
}

/// Microseconds of the monotonic clock.
struct Clock {
    now: Instant,
    since_boot: Duration,
}

impl Clock {
    fn new() -> Self {
        let now = clock_gettime(ClockId::Monotonic);
        let nanos = u32::try_from(now.tv_nsec).unwrap_or(0);
        Self { now: Instant::now(), since_boot: Duration::new(now.tv_sec.unsigned_abs(), nanos) }
    }

    fn at(&self, instant: Instant) -> f64 {
        micros(self.since_boot.saturating_sub(self.now.saturating_duration_since(instant)))
    }
}

fn micros(time: Duration) -> f64 {
    // Whole nanoseconds, so that what ends where another begins does so in the file too.
    time.as_nanos() as f64 / 1e3
}

/// The events of one load, in the format's own words.
struct Events {
    clock: Clock,
    process: u32,
    all: Vec<Value>,
}

impl Events {
    fn row(&mut self, row: u64, name: &str, order: usize) {
        for (of, key, value) in
            [("thread_name", "name", json!(name)), ("thread_sort_index", "sort_index", json!(order))]
        {
            self.all
                .push(json!({"name": of, "ph": "M", "pid": self.process, "tid": row, "args": {key: value}}));
        }
    }

    fn slice(&mut self, row: u64, name: &str, category: &str, began: Instant, took: Duration, args: Value) {
        self.all.push(json!({
            "name": name, "cat": category, "ph": "X", "pid": self.process, "tid": row,
            "ts": self.clock.at(began), "dur": micros(took), "args": args,
        }));
    }
}

fn events(
    began: Instant,
    stats: &LoadStats,
    outcome: Outcome,
    traces: &[ReaderTrace],
    block: impl Fn(u32) -> BlockShown,
) -> Vec<Value> {
    let mut to = Events { clock: Clock::new(), process: std::process::id(), all: Vec::new() };
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_else(|_| "process".to_owned());
    let args = json!({"name": name.trim_end()});
    to.all.push(json!({"name": "process_name", "ph": "M", "pid": to.process, "tid": 0, "args": args}));
    let new_row = || NEXT_ROW.fetch_add(1, Ordering::Relaxed);
    let row = new_row();
    to.row(row, "load", 0);
    to.slice(
        row,
        &format!("load {}", stats.storage),
        "load",
        began,
        stats.wall,
        figures(stats, outcome, traces),
    );
    let described = |number: u32, bytes: u64| {
        let BlockShown { file, range } = block(number);
        json!({"block": number, "file": file, "offset": range.start, "block_bytes": range.end - range.start, "bytes": bytes})
    };
    for (order, trace) in traces.iter().enumerate() {
        to.row(trace.thread, &trace.name, 1 + order);
        for span in &trace.spans {
            let (name, category) = names(span.activity);
            let args = span.block.map_or_else(|| json!({}), |number| described(number, span.bytes));
            to.slice(trace.thread, name, category, span.began, span.took, args);
        }
    }
    let mut buffers: BTreeMap<usize, usize> = BTreeMap::new();
    let mut rows: BTreeMap<(usize, Place), u64> = BTreeMap::new();
    for (reader, trace) in traces.iter().enumerate() {
        for passage in &trace.passages {
            let (owner, name) = match passage.place {
                // Another reader's, at another time.
                Place::Staging(address, part) => {
                    let next = buffers.len() + 1;
                    let number = *buffers.entry(address).or_insert(next);
                    let half = if part > 0 { ", second half" } else { "" };
                    (0, format!("staging buffer {number}{half}"))
                }
                Place::Pinned(slot) => {
                    (reader + 1, format!("pinned memory to the device, {}.{slot}", trace.name))
                }
            };
            let next = 1 + traces.len() + rows.len();
            let row = *rows.entry((owner, passage.place)).or_insert_with(|| {
                let row = new_row();
                to.row(row, &name, next);
                row
            });
            let args = described(passage.block, passage.bytes);
            if matches!(passage.place, Place::Staging(..)) {
                let filling = passage.enqueued.saturating_duration_since(passage.filled);
                to.slice(row, "fill", "staging", passage.filled, filling, args.clone());
            }
            if let Some(landed) = passage.landed {
                let took = landed.saturating_duration_since(passage.enqueued);
                to.slice(row, "copy to device", "copy", passage.enqueued, took, args);
            }
        }
    }
    to.all
}

fn names(activity: Activity) -> (&'static str, &'static str) {
    match activity {
        Activity::Read(Route::Cached) => ("read page cache", "read"),
        Activity::Read(Route::Direct) => ("read direct", "read"),
        Activity::Read(Route::Buffered) => ("read buffered", "read"),
        Activity::Read(Route::Network) => ("read network", "read"),
        Activity::Read(Route::Pinned) => ("pinned already", "read"),
        Activity::Place => ("place", "place"),
        Activity::WaitForCopy => ("wait for copy", "wait"),
        Activity::WaitForBuffer => ("wait for staging buffer", "wait"),
        Activity::WaitForWork => ("wait for work", "wait"),
    }
}

fn figures(stats: &LoadStats, outcome: Outcome, traces: &[ReaderTrace]) -> Value {
    let outcome = match outcome {
        Outcome::Complete => "complete",
        Outcome::Failed => "failed",
        Outcome::Cancelled => "cancelled",
    };
    json!({
        "outcome": outcome,
        "bytes": stats.bytes, "read_bytes": stats.read_bytes, "tensors": stats.tensors, "blocks": stats.blocks,
        "block_bytes": stats.block_bytes, "readers": stats.readers, "storage": stats.storage,
        "limited_by": stats.limited_by(), "notes": stats.notes,
        "left_out": traces.iter().map(|trace| trace.left_out).sum::<u64>(),
    })
}
