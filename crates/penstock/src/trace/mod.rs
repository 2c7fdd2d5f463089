//! What a load did when: the spans of its readers, staging buffers and copies, for a time line.
//!
//! Each reader keeps its spans to itself and hands them in when it ends, so recording takes no lock; where no trace is
//! wanted, it costs one branch for each block. What one load keeps is bounded: later spans are counted and left out.
//!
//! Times are those that the reader saw. A copy to the device lasts from when it was enqueued until its reader found it
//! done, which may be later than it was.
//!
//! Knows neither plans nor stores: what a block is, the session says when it is written (`file`).

mod file;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::device::CopyEvent;

pub use file::{BlockShown, Outcome, write};

/// Spans of one reader that are kept: 64 bytes each.
const MOST_SPANS: usize = 1 << 16;

/// What a span of a reader was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// A block, or one request of it, came in by this route.
    Read(Route),
    /// Bytes were scattered or packed in host memory, and copies to the device enqueued.
    Place,
    /// It waited for a copy to the device to end.
    WaitForCopy,
    /// It waited for a staging buffer.
    WaitForBuffer,
    /// It had nothing to do: no destinations were there yet, or enough readers were at work.
    WaitForWork,
}

/// Where what was read came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// Copied from the page cache.
    Cached,
    /// Straight from the device of the file system.
    Direct,
    /// Through the page cache, although not in it.
    Buffered,
    /// From an object store or HTTP server.
    Network,
    /// It lay in pinned memory already, and was not read.
    Pinned,
}

/// What a reader did in a stretch of time.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// What.
    pub activity: Activity,
    /// Since when.
    pub began: Instant,
    /// For how long.
    pub took: Duration,
    /// The plan's number of the block, where there is one.
    pub block: Option<u32>,
    /// Bytes that left the store.
    pub bytes: u64,
}

/// Host memory that copies to the device are made from. One of them is on its way at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A staging buffer at this address, from this byte of it on.
    Staging(usize, usize),
    /// Memory that was pinned before, by the place in the reader's queue.
    Pinned(usize),
}

/// A block, or a part of it, on its way through host memory.
#[derive(Debug, Clone, Copy)]
pub struct Passage {
    /// Where it lay.
    pub place: Place,
    /// Since when it was filled.
    pub filled: Instant,
    /// Since when its copy was enqueued.
    pub enqueued: Instant,
    /// When its reader found it done; none where it never did.
    pub landed: Option<Instant>,
    /// The plan's number of the block.
    pub block: u32,
    /// Bytes of it.
    pub bytes: u64,
}

/// What one reader did.
#[derive(Debug, Default)]
pub struct ReaderTrace {
    /// The thread's number in the system.
    pub thread: u64,
    /// The thread's name.
    pub name: String,
    /// In order.
    pub spans: Vec<Span>,
    /// In the order in which they were enqueued.
    pub passages: Vec<Passage>,
    /// Of spans and passages: those that were not kept.
    pub left_out: u64,
}

/// The trace of one load: what its readers hand in.
#[derive(Debug, Clone, Default)]
pub struct Trace(Arc<Mutex<Vec<ReaderTrace>>>);

impl Trace {
    /// A recorder for the calling thread.
    pub fn recorder(&self) -> Recorder {
        // `pid/task/tid`, the numbers that other tools show.
        let own = std::fs::read_link("/proc/thread-self").ok();
        let thread = own.and_then(|link| link.file_name()?.to_str()?.parse().ok()).unwrap_or(0);
        let name = std::thread::current().name().unwrap_or("reader").to_owned();
        Recorder {
            trace: ReaderTrace { thread, name, ..ReaderTrace::default() },
            on_their_way: Vec::new(),
            to: self.clone(),
        }
    }

    /// Takes what was handed in: complete once the readers have ended.
    pub fn take(&self) -> Vec<ReaderTrace> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Records one reader, and hands that in when it is dropped.
pub struct Recorder {
    trace: ReaderTrace,
    /// Copies that were enqueued: indices into the trace's passages.
    on_their_way: Vec<(CopyEvent, usize)>,
    to: Trace,
}

impl Recorder {
    /// A span that began then and ends now.
    pub fn until_now(&mut self, activity: Activity, began: Instant, block: Option<usize>, bytes: u64) {
        self.add(activity, began, began.elapsed(), block, bytes);
    }

    /// A span.
    pub fn add(
        &mut self,
        activity: Activity,
        began: Instant,
        took: Duration,
        block: Option<usize>,
        bytes: u64,
    ) {
        if self.trace.spans.len() < MOST_SPANS {
            let block = block.map(number);
            self.trace.spans.push(Span { activity, began, took, block, bytes });
        } else {
            self.trace.left_out += 1;
        }
    }

    /// What has been in `place` since `filled` is on its way to the device until `event`; none for memory that was pinned
    /// before.
    pub fn enqueued(
        &mut self,
        event: CopyEvent,
        place: Option<(usize, usize)>,
        filled: Instant,
        block: usize,
        bytes: u64,
    ) {
        if self.trace.passages.len() >= MOST_SPANS {
            self.trace.left_out += 1;
            return;
        }
        let taken = |slot: &usize| {
            let place = Place::Pinned(*slot);
            self.on_their_way.iter().any(|(_, index)| self.trace.passages[*index].place == place)
        };
        let place = match place {
            Some((address, part)) => Place::Staging(address, part),
            None => Place::Pinned((0..).find(|slot| !taken(slot)).unwrap_or(0)),
        };
        let enqueued = Instant::now();
        self.on_their_way.push((event, self.trace.passages.len()));
        let block = number(block);
        self.trace.passages.push(Passage { place, filled, enqueued, landed: None, block, bytes });
    }

    /// That copy has ended.
    pub fn landed(&mut self, event: CopyEvent) {
        if let Some(at) = self.on_their_way.iter().position(|(of, _)| *of == event) {
            let (_, index) = self.on_their_way.remove(at);
            self.trace.passages[index].landed = Some(Instant::now());
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.to.0.lock().unwrap_or_else(PoisonError::into_inner).push(std::mem::take(&mut self.trace));
    }
}

fn number(block: usize) -> u32 {
    u32::try_from(block).unwrap_or(u32::MAX)
}
