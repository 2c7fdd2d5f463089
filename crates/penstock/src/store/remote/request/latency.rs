//! How long ranges take in a load, and which of them are so slow that a second request is worth it.
//!
//! Most of a load's requests take about as long as each other; now and then one hangs on a server that is ill, or on a
//! connection that lost its packets, and the load's end waits for it. Such a range is asked for a second time, and
//! whichever request is done first counts. That is rarely right early in a load and often at its end, so there is a
//! bound: of the ranges of a load, one in twenty, and few at once.
//!
//! Nothing here knows of requests or clocks.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Ranges that are remembered.
const REMEMBERED: usize = 64;
/// As many must have come before anything is called slow.
const ENOUGH: usize = 8;
/// How many times longer than the usual range a slow one takes.
const SLOW: u32 = 4;
/// One range in so many may be asked for twice, and a few besides.
const ONE_IN: u64 = 20;
const FREE: u64 = 2;
/// Second requests at once, at most.
const AT_ONCE: u64 = 4;

/// The durations of a load's ranges.
#[derive(Debug, Default)]
pub(crate) struct LatencyTracker(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The last durations, in no order.
    last: Vec<Duration>,
    came: u64,
    /// The most bytes that a range had: shorter ones say nothing of how long those take.
    bytes: u64,
    hedged: u64,
    hedging: u64,
}

/// The right to ask for a range a second time. Given back on drop.
#[derive(Debug)]
pub(crate) struct HedgePermit<'a>(&'a LatencyTracker);

impl LatencyTracker {
    /// Learns of a range that has come.
    pub(crate) fn came(&self, bytes: u64, took: Duration) {
        let mut state = self.lock();
        if bytes < state.bytes / 2 {
            return;
        }
        state.bytes = state.bytes.max(bytes);
        let place = usize::try_from(state.came % REMEMBERED as u64).unwrap_or(0);
        match state.last.get_mut(place) {
            Some(oldest) => *oldest = took,
            None => state.last.push(took),
        }
        state.came += 1;
    }

    /// When a range is slow: after so long, but not before `floor`. None while nobody knows.
    pub(crate) fn hedge_after(&self, floor: Duration) -> Option<Duration> {
        let mut last = self.lock().last.clone();
        if last.len() < ENOUGH {
            return None;
        }
        let middle = last.len() / 2;
        let (_, usual, _) = last.select_nth_unstable(middle);
        Some((*usual * SLOW).max(floor))
    }

    /// The right to a second request, if there are not too many.
    pub(crate) fn hedge(&self) -> Option<HedgePermit<'_>> {
        let mut state = self.lock();
        if state.hedging >= AT_ONCE || state.hedged >= FREE + state.came / ONE_IN {
            return None;
        }
        state.hedged += 1;
        state.hedging += 1;
        Some(HedgePermit(self))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for HedgePermit<'_> {
    fn drop(&mut self) {
        self.0.lock().hedging -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 8 << 20;
    const FLOOR: Duration = Duration::from_millis(1);

    fn after(ranges: impl IntoIterator<Item = (u64, u64)>) -> LatencyTracker {
        let latency = LatencyTracker::default();
        ranges.into_iter().for_each(|(bytes, millis)| latency.came(bytes, Duration::from_millis(millis)));
        latency
    }

    #[test]
    fn slow_is_several_times_the_usual_whatever_the_outliers() {
        let latency = after((0..100).map(|i| (BLOCK, if i % 10 == 0 { 9000 } else { 100 })));
        assert_eq!(latency.hedge_after(FLOOR), Some(Duration::from_millis(400)));
        assert_eq!(latency.hedge_after(Duration::from_secs(1)), Some(Duration::from_secs(1)));
    }

    #[test]
    fn nothing_is_slow_before_anything_is_usual_and_short_ranges_do_not_count() {
        assert_eq!(after((0..7).map(|_| (BLOCK, 1))).hedge_after(FLOOR), None);
        let latency = after((0..8).map(|_| (BLOCK, 100)).chain((0..50).map(|_| (4096, 1))));
        assert_eq!(latency.hedge_after(FLOOR), Some(Duration::from_millis(400)));
    }

    #[test]
    fn the_usual_follows_the_load() {
        let latency = after((0..100).map(|_| (BLOCK, 100)).chain((0..64).map(|_| (BLOCK, 300))));
        assert_eq!(latency.hedge_after(FLOOR), Some(Duration::from_millis(1200)));
    }

    #[test]
    fn second_requests_are_few_at_once_and_few_in_all() {
        let latency = LatencyTracker::default();
        let (one, two) = (latency.hedge().unwrap(), latency.hedge().unwrap());
        assert!(latency.hedge().is_none(), "two in a load of nothing");
        drop((one, two));
        let latency = after((0..1000).map(|_| (BLOCK, 100)));
        let held: Vec<_> = std::iter::from_fn(|| latency.hedge()).collect();
        assert_eq!(held.len(), 4);
        drop(held);
        let all = std::iter::from_fn(|| latency.hedge().map(drop)).count();
        assert_eq!(all, 48, "one in twenty of a thousand, and two, without those four");
    }
}
