//! When to ask again, and when to give up.
//!
//! A range is asked for until it is complete. Every failure that may pass (a server that is busy or restarting, a
//! connection that is lost, a body that stalls or ends early) is followed by a pause and a request for the bytes that
//! are still missing. Pauses grow exponentially and are drawn at random between nothing and their bound ("full
//! jitter"), so that many readers that fail together do not come back together. What a server says of when to come
//! back (`Retry-After`) is a lower bound.
//!
//! Two limits end this. A range is given up when it has failed several times in a row, without a single byte in between,
//! for longer than outages last. A load is given up when failures keep interrupting ranges that had been doing well: it
//! has some for free, and earns one more with every two ranges that come in. So a network that is gone for half a minute
//! costs every reader one failure, however often it asked meanwhile; a server that fails for every tenth request is
//! asked again for as long as the load lasts; and one that breaks off whatever it begins is not met with an endless
//! stream of requests.
//!
//! Nothing here knows of requests or clocks.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::Code;

/// How much waiting is worth it. The defaults suit object stores; tests shorten them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RetryPolicy {
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
    /// Failures in a row, without a byte between them, after which a range may be given up.
    pub in_a_row: u32,
    /// How long they must have gone on by then: shorter outages are waited for.
    pub outage: Duration,
    /// Failures in a row after which a range is given up while nobody has ever answered for the object, because the host
    /// is unknown or refuses connections: a wrong host name is reported within seconds. A server that answers, or
    /// breaks off its answers, is there, and gets as much time when an object is opened as during a load.
    pub in_a_row_at_first: u32,
    /// How long such a host is asked for before it is given up after fewer failures: where each takes its time.
    pub outage_at_first: Duration,
    /// Interrupted ranges that a load has for free. Every two ranges that come in earn one more.
    pub interruptions: u32,
    /// Ranges that take less than this are not asked for a second time, however long the others take.
    pub hedge_after: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(30),
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_secs(8),
            longest_wait: Duration::from_secs(300),
            in_a_row: 6,
            outage: Duration::from_secs(60),
            in_a_row_at_first: 6,
            outage_at_first: Duration::from_secs(4),
            interruptions: 256,
            hedge_after: Duration::from_millis(500),
        }
    }
}

impl RetryPolicy {
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
pub(crate) struct TransientError {
    /// In a few words.
    pub(crate) what: String,
    /// How long the server asked to wait.
    pub(crate) retry_after: Option<Duration>,
    /// Whether the server says that it is asked too often.
    pub(crate) throttled: bool,
    /// Whether nobody is there: an unknown host, a refused connection.
    pub(crate) unreachable: bool,
    /// What an error says of it that ends with it.
    pub(crate) code: Code,
    /// What to do about it, where that is known better than for the store as a whole.
    pub(crate) remedy: Option<String>,
}

impl TransientError {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        let what = what.into();
        let (retry_after, throttled, unreachable, code, remedy) = (None, false, false, Code::Storage, None);
        Self { what, retry_after, throttled, unreachable, code, remedy }
    }
}

/// The failures of one load, over all its objects, ranges and readers.
#[derive(Debug, Default)]
pub(crate) struct Budget(Mutex<Account>);

#[derive(Debug, Default)]
struct Account {
    came: u64,
    failures: u64,
    interruptions: u64,
}

impl Budget {
    /// A range has come in.
    pub(crate) fn came(&self) {
        self.lock().came += 1;
    }

    /// Counts a failure; says how many the load has seen if that was one interruption too many.
    fn failed(&self, interrupts: bool, free: u32) -> Option<u64> {
        let mut account = self.lock();
        account.failures += 1;
        account.interruptions += u64::from(interrupts);
        let too_many = account.interruptions > u64::from(free) + account.came / 2;
        too_many.then_some(account.failures)
    }

    fn lock(&self) -> MutexGuard<'_, Account> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The failures of one range.
pub(crate) struct Attempts<'a> {
    policy: &'a RetryPolicy,
    budget: &'a Budget,
    /// Whether nobody has ever answered for the object.
    unanswered: bool,
    in_a_row: u32,
    /// When the first of those was.
    since: Duration,
    failures: u64,
}

/// Why a range was given up.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RetriesExhausted {
    limit: Limit,
    pub(crate) last: TransientError,
}

#[derive(Debug, PartialEq, Eq)]
enum Limit {
    /// So many requests for the range failed.
    Range(u64),
    /// So many requests of the load failed.
    Load(u64),
    /// The server asked to wait so long.
    Wait(Duration),
}

impl<'a> Attempts<'a> {
    /// `unanswered` says that nobody has ever answered for the object.
    pub(crate) fn new(policy: &'a RetryPolicy, budget: &'a Budget, unanswered: bool) -> Self {
        Self { policy, budget, unanswered, in_a_row: 0, since: Duration::ZERO, failures: 0 }
    }

    /// Counts a failure, after bytes had come or not, at a time counted from the first request. Says how long to wait
    /// before the next one.
    pub(crate) fn failed(
        &mut self,
        error: &TransientError,
        progress: bool,
        now: Duration,
    ) -> Result<Duration, RetriesExhausted> {
        self.unanswered &= !progress && error.unreachable;
        if progress || self.in_a_row == 0 {
            (self.in_a_row, self.since) = (0, now);
        }
        self.in_a_row += 1;
        self.failures += 1;
        let all = self.budget.failed(self.in_a_row == 1, self.policy.interruptions);
        let RetryPolicy { in_a_row, in_a_row_at_first, outage, outage_at_first, longest_wait, .. } =
            self.policy;
        let nobody = self.unanswered && (self.in_a_row >= *in_a_row_at_first || now >= *outage_at_first);
        let gone = self.in_a_row >= *in_a_row && now.saturating_sub(self.since) >= *outage;
        let limit = match (error.retry_after, all) {
            (Some(asked), _) if asked > *longest_wait => Limit::Wait(asked),
            (_, Some(failures)) => Limit::Load(failures),
            _ if nobody || gone => Limit::Range(self.failures),
            _ => return Ok(self.policy.pause(self.in_a_row, error.retry_after, fastrand::f64())),
        };
        Err(RetriesExhausted { limit, last: error.clone() })
    }
}

impl fmt::Display for RetriesExhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = &self.last.what;
        match &self.limit {
            Limit::Range(failures) => {
                write!(f, "given up after {failures} failed requests, the last: {what}")
            }
            Limit::Load(failures) => write!(
                f,
                "given up, as too many requests of this load failed, {failures} of them, the last: {what}"
            ),
            Limit::Wait(asked) => write!(f, "the server asks to come back in {} s: {what}", asked.as_secs()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PATIENCE: RetryPolicy = RetryPolicy {
        connect: Duration::from_secs(1),
        idle: Duration::from_secs(1),
        first_pause: Duration::from_millis(100),
        longest_pause: Duration::from_secs(2),
        longest_wait: Duration::from_secs(60),
        in_a_row: 4,
        outage: Duration::from_secs(10),
        in_a_row_at_first: 2,
        outage_at_first: Duration::from_secs(3),
        interruptions: 6,
        hedge_after: Duration::from_secs(1),
    };
    const LATER: Duration = Duration::from_secs(11);

    fn fail(
        attempts: &mut Attempts<'_>,
        what: &str,
        progress: bool,
        now: Duration,
    ) -> Result<(), RetriesExhausted> {
        attempts.failed(&TransientError::new(what), progress, now).map(drop)
    }

    #[test]
    fn failures_in_a_row_end_a_range_once_the_outage_is_a_long_one() {
        let budget = Budget::default();
        let mut attempts = Attempts::new(&PATIENCE, &budget, false);
        for what in ["HTTP 503", "reset", "HTTP 503", "HTTP 503"] {
            fail(&mut attempts, what, false, Duration::from_secs(1)).unwrap();
        }
        let exhausted = fail(&mut attempts, "HTTP 503", false, LATER).unwrap_err();
        assert_eq!(exhausted.to_string(), "given up after 5 failed requests, the last: HTTP 503");
    }

    #[test]
    fn a_few_failures_that_take_long_are_no_end() {
        let budget = Budget::default();
        let mut attempts = Attempts::new(&PATIENCE, &budget, false);
        for second in [0, 30, 60] {
            fail(&mut attempts, "x", false, Duration::from_secs(second)).unwrap();
        }
        fail(&mut attempts, "x", false, Duration::from_secs(90)).unwrap_err();
    }

    #[test]
    fn where_nobody_has_ever_answered_is_given_up_sooner() {
        let budget = Budget::default();
        let nobody = TransientError { unreachable: true, ..TransientError::new("no connection") };
        let mut attempts = Attempts::new(&PATIENCE, &budget, true);
        attempts.failed(&nobody, false, Duration::ZERO).unwrap();
        attempts.failed(&nobody, false, Duration::ZERO).unwrap_err();
        // Each of these failures took its time.
        Attempts::new(&PATIENCE, &budget, true).failed(&nobody, false, Duration::from_secs(3)).unwrap_err();
        // A server that is busy, or restarts after it was, is there.
        let mut attempts = Attempts::new(&PATIENCE, &budget, true);
        for error in [&nobody, &TransientError::new("HTTP 503"), &nobody, &nobody, &nobody, &nobody] {
            attempts.failed(error, false, Duration::ZERO).unwrap();
        }
        attempts.failed(&nobody, false, LATER).unwrap_err();
    }

    #[test]
    fn an_outage_costs_each_range_one_interruption_however_often_it_asks() {
        let budget = Budget::default();
        for _ in 0..6 {
            let mut attempts = Attempts::new(&PATIENCE, &budget, false);
            for _ in 0..50 {
                fail(&mut attempts, "no connection", false, Duration::ZERO).unwrap();
            }
        }
        let exhausted =
            fail(&mut Attempts::new(&PATIENCE, &budget, false), "reset", false, Duration::ZERO).unwrap_err();
        assert_eq!(
            exhausted.to_string(),
            "given up, as too many requests of this load failed, 301 of them, the last: reset"
        );
    }

    #[test]
    fn progress_forgives_a_range_its_failures_but_the_load_remembers_them() {
        let budget = Budget::default();
        let mut attempts = Attempts::new(&PATIENCE, &budget, false);
        for _ in 0..6 {
            fail(&mut attempts, "reset", true, LATER).unwrap();
        }
        fail(&mut attempts, "reset", true, LATER).unwrap_err();
    }

    #[test]
    fn a_load_that_gets_on_may_fail_for_ever() {
        let budget = Budget::default();
        for _ in 0..1000 {
            let mut attempts = Attempts::new(&PATIENCE, &budget, false);
            fail(&mut attempts, "reset", true, Duration::ZERO).unwrap();
            budget.came();
            budget.came();
        }
    }

    #[test]
    fn a_server_that_asks_for_too_long_is_not_waited_for() {
        let budget = Budget::default();
        let mut attempts = Attempts::new(&PATIENCE, &budget, false);
        let busy = |seconds| TransientError {
            retry_after: Some(Duration::from_secs(seconds)),
            throttled: true,
            ..TransientError::new("HTTP 429")
        };
        let pause = attempts.failed(&busy(3), false, Duration::ZERO).unwrap();
        assert!(pause >= Duration::from_secs(3) && pause <= Duration::from_secs(6), "{pause:?}");
        let exhausted = attempts.failed(&busy(3600), false, Duration::ZERO).unwrap_err();
        assert!(exhausted.to_string().contains("come back in 3600 s"), "{exhausted}");
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
