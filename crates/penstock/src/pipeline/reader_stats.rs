//! What a reader counts and, where a trace is wanted, records.
//!
//! Both are its own until it ends, so neither takes a lock. Without a trace, each of the functions here is one branch.

use std::sync::Arc;
use std::time::Instant;

use super::landing::Timing;
use super::queue::ReadKind;
use super::shared::Shared;
use crate::device::CopyEvent;
use crate::plan::Block;
use crate::stats::LoadStats;
use crate::store::ReadContext;
use crate::trace::{Activity, Recorder, Route};

/// What every reader keeps, whatever it reads to: scratch for its store and its own counts.
pub(super) struct ReaderStats {
    pub(super) cx: ReadContext,
    pub(super) stats: LoadStats,
    recorder: Option<Recorder>,
    /// The block at work, and the bytes by route when a part of it was recorded last.
    block: usize,
    recorded: [u64; 4],
}

impl ReaderStats {
    pub(super) fn new(shared: &Shared) -> Self {
        let (cx, stats) = (shared.cx(), LoadStats::default());
        Self { cx, stats, recorder: None, block: 0, recorded: [0; 4] }
    }

    /// Says that a block of this kind is begun, in this thread.
    pub(super) fn begins(&mut self, shared: &Shared, index: usize, block: &Block, kind: ReadKind) {
        self.cx.cached = shared.objects.was_cached(block, kind);
        self.block = index;
        self.looks_for_trace(shared);
    }

    /// A session may ask for a trace after its readers were started.
    fn looks_for_trace(&mut self, shared: &Shared) {
        if self.recorder.is_none()
            && let Some(trace) = shared.trace()
        {
            self.recorder = Some(trace.recorder());
        }
    }

    /// Sleeps until there is work.
    pub(super) fn wait_for_work(&mut self, shared: &Shared) {
        let began = Instant::now();
        shared.wait_for_work();
        self.looks_for_trace(shared);
        if let Some(recorder) = &mut self.recorder {
            recorder.until_now(Activity::WaitForWork, began, None, 0);
        }
    }

    /// The block, or a part of it, was read and placed from `began` on.
    pub(super) fn brought(&mut self, began: Instant, spent: &Timing) {
        let Some(recorder) = &mut self.recorder else { return };
        let now = [self.cx.cached_bytes, self.cx.direct_bytes, self.cx.buffered_bytes, self.cx.network_bytes];
        let routes = [Route::Cached, Route::Direct, Route::Buffered, Route::Network];
        let gained = now.iter().zip(self.recorded).map(|(now, before)| now - before);
        let most = gained.clone().zip(routes).max_by_key(|(bytes, _)| *bytes);
        let route = most.filter(|(bytes, _)| *bytes > 0).map_or(Route::Pinned, |(_, route)| route);
        let block = Some(self.block);
        recorder.add(Activity::Read(route), began, spent.reading, block, gained.sum());
        if !spent.copying.is_zero() {
            recorder.add(Activity::Place, began + spent.reading, spent.copying, block, 0);
        }
        self.recorded = now;
    }

    /// So many bytes of the block are on their way to the device until `event`, from `place` in a staging buffer that has been
    /// filled since `began`, or from memory that was pinned before.
    pub(super) fn enqueued(
        &mut self,
        event: CopyEvent,
        place: Option<(usize, usize)>,
        began: Instant,
        bytes: u64,
    ) {
        if let Some(recorder) = &mut self.recorder {
            recorder.enqueued(event, place, began, self.block, bytes);
        }
    }

    /// That copy was found to have ended.
    pub(super) fn landed(&mut self, event: CopyEvent) {
        if let Some(recorder) = &mut self.recorder {
            recorder.landed(event);
        }
    }

    /// The reader waited for that copy.
    pub(super) fn waited_for_copy(&mut self, began: Instant) {
        self.stats.device_wait += began.elapsed();
        self.waited(Activity::WaitForCopy, began);
    }

    pub(super) fn waited(&mut self, activity: Activity, began: Instant) {
        if let Some(recorder) = &mut self.recorder {
            recorder.until_now(activity, began, None, 0);
        }
    }

    pub(super) fn spent(&mut self, shared: &Arc<Shared>, block: &Block, kind: ReadKind, spent: &Timing) {
        if self.cx.throttled > self.stats.throttled {
            self.stats.throttled = self.cx.throttled;
            shared.on_throttle();
        }
        self.stats.reading += spent.reading;
        self.stats.copying += spent.copying;
        match kind {
            ReadKind::Copy => self.stats.cached_reading += spent.reading,
            ReadKind::Fetch => shared.fetched(block, spent.reading),
        }
    }

    pub(super) fn hand_in(mut self, shared: &Shared) {
        self.stats.cached_bytes = self.cx.cached_bytes;
        self.stats.direct_bytes = self.cx.direct_bytes;
        self.stats.buffered_bytes = self.cx.buffered_bytes;
        self.stats.network_bytes = self.cx.network_bytes;
        self.stats.read_bytes = self.cx.bytes();
        self.stats.verified_bytes = self.cx.verified_bytes;
        self.stats.verification_excess_bytes = self.cx.verification_excess_bytes;
        self.stats.calls = self.cx.calls;
        shared.with_stats(|stats| stats.add(&self.stats));
    }
}
