//! When to ask again, and when to give up.
//!
//! A range is asked for until it is complete. Every failure that may pass (a server that is busy or restarting, a
//! connection that is lost, a body that stalls or ends early) is followed by a pause and a request for the bytes that
//! are still missing. Pauses grow exponentially and are drawn at random between nothing and their bound ("full
//! jitter"), so that many readers that fail together do not come back together. What a server says of when to come
//! back (`Retry-After`) is a lower bound.
//!
//! Two limits end this: failures in a row without a single byte in between, for one range, and failures in all, for one
//! object. So a server that delivers slowly is waited for, and one that fails for every tenth request is not met with
//! an endless stream of them.
//!
//! Nothing here knows of requests or clocks.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How much waiting is worth it. The defaults suit object stores; tests shorten them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Patience {
    /// How long a connection may take to be made.
    pub connect: Duration,
    /// How long a server may send nothing, before its answer or in the middle of it.
    pub idle: Duration,
    /// The bound of the first pause; each further one is twice as long.
    pub first_pause: Duration,
    /// The longest bound of a pause.
    pub longest_pause: Duration,
    /// The longest time that a server may ask for; beyond it, it is taken to have refused.
    pub longest_wait: Duration,
    /// Failures in a row, without a byte between them, after which a range is given up.
    pub in_a_row: u32,
    /// The same while nothing has ever come from the object: a wrong host name should not take a minute to be told of.
    pub in_a_row_at_first: u32,
    /// Failures in all after which an object is given up.
    pub in_all: u32,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(30),
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_secs(20),
            longest_wait: Duration::from_secs(300),
            in_a_row: 10,
            in_a_row_at_first: 6,
            in_all: 200,
        }
    }
}

impl Patience {
    /// How long to wait after the `failures`-th failure in a row, given a random number in 0..1.
    fn pause(&self, failures: u32, asked: Option<Duration>, random: f64) -> Duration {
        let doublings = failures.saturating_sub(1).min(30);
        let bound = self.first_pause.saturating_mul(1 << doublings).min(self.longest_pause);
        let jitter = bound.mul_f64(random.clamp(0.0, 1.0));
        // Those who were told the same time should not all come at that time either.
        asked.map_or(jitter, |asked| asked + jitter.min(asked.max(self.first_pause)))
    }
}

/// A failure that may pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trouble {
    /// In a few words, the same for failures of the same kind: they are counted by it.
    pub(super) what: String,
    /// How long the server asked to wait.
    pub(super) retry_after: Option<Duration>,
}

impl Trouble {
    pub(super) fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), retry_after: None }
    }
}

/// The failures of one object, counted over all its ranges and readers.
#[derive(Debug, Default)]
pub(super) struct Budget {
    failures: AtomicU32,
}

impl Budget {
    /// Failures so far.
    #[cfg(test)]
    pub(super) fn failures(&self) -> u32 {
        self.failures.load(Ordering::Relaxed)
    }
}

/// The failures of one range.
pub(super) struct Attempts<'a> {
    patience: &'a Patience,
    budget: &'a Budget,
    in_a_row: u32,
    allowed: u32,
    seen: Vec<(String, u32)>,
}

/// Why a range was given up.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct GivenUp {
    /// The failures, by kind.
    history: Vec<(String, u32)>,
    limit: Limit,
}

#[derive(Debug, PartialEq, Eq)]
enum Limit {
    Range,
    Object,
    /// The server asked to wait so long.
    Wait(Duration),
}

impl<'a> Attempts<'a> {
    /// `at_first` says that nothing has ever come from the object.
    pub(super) fn new(patience: &'a Patience, budget: &'a Budget, at_first: bool) -> Self {
        let allowed = if at_first { patience.in_a_row_at_first } else { patience.in_a_row };
        Self { patience, budget, in_a_row: 0, allowed, seen: Vec::new() }
    }

    /// Counts a failure, after bytes had come or not, and says how long to wait before the next request.
    pub(super) fn failed(&mut self, trouble: Trouble, progress: bool) -> Result<Duration, GivenUp> {
        self.in_a_row = if progress { 1 } else { self.in_a_row + 1 };
        if progress {
            self.allowed = self.patience.in_a_row;
        }
        let in_all = self.budget.failures.fetch_add(1, Ordering::Relaxed) + 1;
        match self.seen.iter_mut().find(|(what, _)| *what == trouble.what) {
            Some((_, count)) => *count += 1,
            None => self.seen.push((trouble.what, 1)),
        }
        let limit = match trouble.retry_after {
            Some(asked) if asked > self.patience.longest_wait => Some(Limit::Wait(asked)),
            _ if self.in_a_row >= self.allowed => Some(Limit::Range),
            _ if in_all >= self.patience.in_all => Some(Limit::Object),
            _ => None,
        };
        match limit {
            Some(limit) => Err(GivenUp { history: std::mem::take(&mut self.seen), limit }),
            None => Ok(self.patience.pause(self.in_a_row, trouble.retry_after, fastrand::f64())),
        }
    }
}

impl fmt::Display for GivenUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let requests: u32 = self.history.iter().map(|(_, count)| count).sum();
        match &self.limit {
            Limit::Range => write!(f, "given up after {requests} failed requests: ")?,
            Limit::Object => {
                write!(f, "given up, as too many requests for this object failed, here {requests}: ")?;
            }
            Limit::Wait(asked) => write!(f, "the server asks to come back in {} s: ", asked.as_secs())?,
        }
        for (index, (what, count)) in self.history.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            if *count > 1 {
                write!(f, "{comma}{count} times {what}")?;
            } else {
                write!(f, "{comma}{what}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PATIENCE: Patience = Patience {
        connect: Duration::from_secs(1),
        idle: Duration::from_secs(1),
        first_pause: Duration::from_millis(100),
        longest_pause: Duration::from_secs(2),
        longest_wait: Duration::from_secs(60),
        in_a_row: 4,
        in_a_row_at_first: 2,
        in_all: 7,
    };

    #[test]
    fn failures_in_a_row_end_it_and_are_told_by_kind() {
        let budget = Budget::default();
        let mut attempts = Attempts::new(&PATIENCE, &budget, false);
        for what in ["HTTP 503", "reset", "HTTP 503"] {
            attempts.failed(Trouble::new(what), false).unwrap();
        }
        let given_up = attempts.failed(Trouble::new("HTTP 503"), false).unwrap_err();
        assert_eq!(given_up.to_string(), "given up after 4 failed requests: 3 times HTTP 503, reset");
    }

    #[test]
    fn what_has_never_answered_is_given_up_sooner() {
        let budget = Budget::default();
        let mut attempts = Attempts::new(&PATIENCE, &budget, true);
        attempts.failed(Trouble::new("x"), false).unwrap();
        attempts.failed(Trouble::new("x"), false).unwrap_err();
    }

    #[test]
    fn progress_forgives_failures_but_the_object_remembers_them() {
        let budget = Budget::default();
        let mut attempts = Attempts::new(&PATIENCE, &budget, false);
        for _ in 0..6 {
            attempts.failed(Trouble::new("reset"), true).unwrap();
        }
        let given_up = attempts.failed(Trouble::new("reset"), true).unwrap_err();
        assert!(given_up.to_string().contains("too many requests for this object"), "{given_up}");
        assert_eq!(budget.failures(), 7);
    }

    #[test]
    fn a_server_that_asks_for_too_long_is_not_waited_for() {
        let budget = Budget::default();
        let mut attempts = Attempts::new(&PATIENCE, &budget, false);
        let busy =
            |seconds| Trouble { what: "HTTP 429".into(), retry_after: Some(Duration::from_secs(seconds)) };
        let pause = attempts.failed(busy(3), false).unwrap();
        assert!(pause >= Duration::from_secs(3) && pause <= Duration::from_secs(6), "{pause:?}");
        let given_up = attempts.failed(busy(3600), false).unwrap_err();
        assert!(given_up.to_string().contains("come back in 3600 s"), "{given_up}");
    }

    proptest! {
        #[test]
        fn pauses_stay_within_their_bound_and_above_what_was_asked(
            failures in 1u32..100, asked in prop::option::of(0u64..100), random in 0.0f64..1.0,
        ) {
            let asked = asked.map(Duration::from_secs);
            let pause = PATIENCE.pause(failures, asked, random);
            prop_assert!(pause >= asked.unwrap_or_default());
            prop_assert!(pause <= asked.unwrap_or_default() + PATIENCE.longest_pause);
        }
    }
}
