//! What the first readers of a load spend their time on: whether they wait for the storage or for the machine's cores.
//!
//! The kernel counts for every thread how long it had a core and how long it was ready to run but had none. A reader
//! whose time goes to these two has no use for another one beside it; one that has little of either waits for what
//! comes from elsewhere. Time on a core alone would not tell: beside other processes a reader gets less of it the more
//! it wants, and what the consumer does meanwhile is its own affair.
//!
//! A thread's wait for a core is counted when it ends, so that of a machine where threads wait longer than a window too
//! little is seen: then more readers are set to work, as they would be without this module.
//!
//! Looked at in windows, the first of which is short: a load over slow connections loses as long as it takes until all of
//! them are made. The kernel adds to its counts at every tick, 1 to 10 ms, or when a thread stops running, so a window is
//! no shorter than that.
//!
//! Knows neither readers nor the tuner: clocks come in, a share comes out.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// The first window.
const FIRST: Duration = Duration::from_millis(10);
/// Each is twice as long as the one before, up to this.
const LONGEST: Duration = Duration::from_millis(160);

/// How long a thread has run or been ready to, so far.
pub(super) trait Clock {
    /// None once the thread has ended.
    fn read(&self) -> Option<Duration>;
}

/// The clock of one thread, which others may read. An open file.
pub(super) struct ThreadClock(File);

impl ThreadClock {
    /// The clock of this thread, where the kernel keeps one.
    pub(super) fn of_this_thread() -> Option<Self> {
        let clock = Self(File::open("/proc/thread-self/schedstat").ok()?);
        clock.read().is_some().then_some(clock)
    }
}

impl Clock for ThreadClock {
    fn read(&self) -> Option<Duration> {
        let mut text = [0; 96];
        let len = self.0.read_at(&mut text, 0).ok()?;
        parse(std::str::from_utf8(&text[..len]).ok()?)
    }
}

/// Nanoseconds at work, nanoseconds ready, and how often.
fn parse(text: &str) -> Option<Duration> {
    let mut numbers = text.split_ascii_whitespace().map(|number| number.parse::<u64>().ok());
    let (at_work, ready) = (numbers.next()??, numbers.next()??);
    Some(Duration::from_nanos(at_work.checked_add(ready)?))
}

/// What the first readers' threads spent on a core, and waiting for one.
pub(super) struct Watch<C> {
    /// Each with what it said when the window began.
    clocks: Vec<(C, Duration)>,
    began: Instant,
    window: Duration,
}

impl<C: Clock> Watch<C> {
    pub(super) fn new(now: Instant) -> Self {
        Self { clocks: Vec::new(), began: now, window: FIRST }
    }

    /// A reader more.
    pub(super) fn join(&mut self, clock: C) {
        let said = clock.read().unwrap_or_default();
        self.clocks.push((clock, said));
    }

    /// Has the window begin now: readers had nothing to read until then.
    pub(super) fn begin_anew(&mut self, now: Instant) {
        self.began = now;
        self.clocks.retain_mut(|(clock, said)| clock.read().map(|says| *said = says).is_some());
    }

    /// How long the window still lasts.
    pub(super) fn rest(&self, now: Instant) -> Duration {
        (self.began + self.window).saturating_duration_since(now)
    }

    /// Which share of their time readers ran or were ready to, if the window is over; then the next one begins.
    pub(super) fn look(&mut self, now: Instant) -> Option<f64> {
        let took = now.saturating_duration_since(self.began).as_secs_f64();
        if !self.rest(now).is_zero() || self.clocks.is_empty() || took <= 0.0 {
            return None;
        }
        let spent = |(clock, said): &(C, Duration)| Some(clock.read()?.saturating_sub(*said));
        let spent: Vec<_> = self.clocks.iter().filter_map(spent).collect();
        let share = spent.iter().sum::<Duration>().as_secs_f64() / (took * spent.len().max(1) as f64);
        self.window = (self.window * 2).min(LONGEST);
        self.begin_anew(now);
        Some(share.min(1.0))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[derive(Clone, Default)]
    struct Told(Rc<Cell<Option<Duration>>>);

    impl Told {
        fn ran(&self, time: Duration) {
            self.0.set(Some(self.0.get().unwrap_or_default() + time));
        }
    }

    impl Clock for Told {
        fn read(&self) -> Option<Duration> {
            self.0.get()
        }
    }

    #[track_caller]
    fn says(share: Option<f64>, expected: f64) {
        assert!(share.is_some_and(|share| (share - expected).abs() < 1e-9), "{share:?} for {expected}");
    }

    #[test]
    fn the_share_is_of_all_readers_and_of_one_window_alone() {
        let began = Instant::now();
        let mut watch = Watch::new(began);
        let clocks = [Told::default(), Told::default()];
        for clock in &clocks {
            clock.ran(7 * MS);
            watch.join(clock.clone());
        }
        clocks[0].ran(10 * MS);
        clocks[1].ran(2 * MS);
        assert_eq!(watch.look(began + 9 * MS), None, "not yet");
        assert_eq!(watch.rest(began + 9 * MS), MS);
        says(watch.look(began + 10 * MS), 0.6);
        assert_eq!(watch.rest(began + 10 * MS), 20 * MS, "the next is longer");
        clocks[0].ran(10 * MS);
        says(watch.look(began + 30 * MS), 0.25);
    }

    #[test]
    fn time_before_there_was_something_to_read_does_not_count() {
        let began = Instant::now();
        let mut watch = Watch::new(began);
        let clock = Told::default();
        clock.ran(MS);
        watch.join(clock.clone());
        clock.ran(500 * MS);
        watch.begin_anew(began + 500 * MS);
        clock.ran(MS);
        says(watch.look(began + 510 * MS), 0.1);
    }

    #[test]
    fn nothing_is_said_while_no_reader_has_begun_and_one_that_ended_is_forgotten() {
        let began = Instant::now();
        let mut watch = Watch::new(began);
        assert_eq!(watch.look(began + 50 * MS), None);
        let clocks = [Told::default(), Told::default()];
        clocks.iter().for_each(|clock| clock.ran(MS));
        clocks.iter().for_each(|clock| watch.join(clock.clone()));
        clocks[0].0.set(None);
        clocks[1].ran(10 * MS);
        says(watch.look(began + 50 * MS), 0.2);
        assert_eq!(watch.clocks.len(), 1);
    }

    #[test]
    fn what_the_kernel_says_is_both_of_its_times_or_nothing() {
        assert_eq!(parse("1000 500 3\n"), Some(Duration::from_nanos(1500)));
        for text in ["", "12", "12 x 3", "-1 2 3", "18446744073709551615 1 1"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_thread_that_works_is_seen_by_another_until_it_ends() {
        // Where the kernel keeps no such clocks, loads begin with all readers.
        let Some(own) = ThreadClock::of_this_thread() else { return };
        let (send, receive) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            send.send(ThreadClock::of_this_thread()).unwrap();
            let mut turns = 0u64;
            while let Err(std::sync::mpsc::TryRecvError::Empty) = ended.try_recv() {
                turns = std::hint::black_box(turns.wrapping_add(1));
            }
        });
        let clock = receive.recv().unwrap().unwrap();
        let began = clock.read().unwrap();
        // However long the kernel takes until it counts.
        while clock.read().unwrap() < began + 5 * MS {
            std::thread::sleep(MS);
        }
        end.send(()).unwrap();
        thread.join().unwrap();
        // The thread's last trace may go a little later than the thread.
        while clock.read().is_some() {
            std::thread::sleep(MS);
        }
        assert!(own.read().is_some());
    }
}
