//! Finding the number of readers while a load runs.
//!
//! A climb over epochs: a stretch of loading with one number of readers. After a change one epoch is let pass, and the
//! rate of the next two is compared with the best so far. More readers are tried while that pays; what did not pay is taken
//! back. An epoch in which readers mostly waited for the device or the consumer says nothing about the storage, so nothing
//! is tried then. Once settled, the search begins anew only when the rate changes for good, as when a load comes from
//! cached to uncached files.
//!
//! Fewer readers than a load begins with are not tried. Start values are low, a disk whose rate wanders by itself talked
//! such a search down, and no storage was met that gained from it (benchmarks/NOTEBOOK.md).
//!
//! Where cores are few, a load from a network begins with fewer readers than slow connections want ([`Bounds::initial`]):
//! beside a fast server each further one costs CPU time and brings nothing. What they spend their time on is known with
//! the first blocks: if they wait for the network, all of `start` are set to work; if they keep the cores busy, they stay
//! as few; in between, the search goes on from there.
//!
//! A store that says it is asked too often has the last word: the number is halved, and the one at which it said so is
//! out of bounds until it has been quiet for a while.
//!
//! A pure state machine: it knows neither clocks nor threads. Who feeds it decides how long an epoch is.

#[cfg(test)]
mod tests;

/// How many readers do what at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Readers {
    /// Copying from the page cache: what the cores can do, which is known.
    pub copies: usize,
    /// Waiting for storage: what the storage can do, which the tuner finds.
    pub fetches: Bounds,
    /// The most threads.
    pub threads: usize,
    /// Whether each of those that wait for storage reads a run of blocks of its own, through open files of its own.
    pub per_reader_ranges: bool,
}

impl Readers {
    /// Always `readers`, whatever they do.
    pub fn fixed(readers: usize) -> Self {
        Self { copies: readers, fetches: Bounds::fixed(readers), threads: readers, per_reader_ranges: false }
    }

    /// So many threads as there may ever be work for.
    pub fn most(&self) -> usize {
        self.threads.min(self.copies + self.fetches.most)
    }

    /// Those that may have work before the tuner wants more.
    pub fn initial(&self) -> usize {
        (self.copies + self.fetches.initial).min(self.most())
    }

    /// The staging buffers they need: one that copies from the cache fills `depth` before the first is free again, one that
    /// waits for storage is slower than the copy of the buffer before.
    pub fn buffers(&self, depth: usize) -> usize {
        (self.copies * depth + self.fetches.most * 2).min(self.threads * depth)
    }

    /// These, but at most `most`: a small load has work for no more.
    #[must_use]
    pub fn at_most(self, most: usize) -> Self {
        Self { fetches: self.fetches.at_most(most), threads: self.threads.min(most.max(1)), ..self }
    }
}

/// A number of readers: where to begin, and how far the tuner may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// What a load begins with, until it is known whether it keeps the cores busy.
    pub initial: usize,
    /// What it goes on with where it does not, and what the search begins with.
    pub start: usize,
    /// The fewest.
    pub least: usize,
    /// The most.
    pub most: usize,
}

impl Bounds {
    /// Always `readers`.
    pub fn fixed(readers: usize) -> Self {
        Self { initial: readers, start: readers, least: readers, most: readers }
    }

    /// These bounds with at most `most` readers: a small load has work for no more.
    #[must_use]
    pub fn at_most(self, most: usize) -> Self {
        let most = most.max(1);
        Self {
            initial: self.initial.min(most),
            start: self.start.min(most),
            least: self.least.min(most),
            most: self.most.min(most),
        }
    }
}

/// What happened in one epoch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Epoch {
    /// Bytes brought in.
    pub bytes: u64,
    /// How long it took.
    pub seconds: f64,
    /// The share of the readers' time that went to reading, 0 to 1.
    pub reading: f64,
    /// The share of its time in which a reader had a core or waited for one, 0 to 1. Only the first epoch needs it.
    pub on_cpu: f64,
}

impl Epoch {
    fn rate(self) -> f64 {
        self.bytes as f64 / self.seconds.max(f64::MIN_POSITIVE)
    }

    /// Whether readers mostly read, rather than wait for the device or the consumer.
    fn is_limited_by_reading(self) -> bool {
        self.reading >= 0.5
    }
}

/// A number of readers and the rate they reached, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trial {
    /// Reader threads.
    pub readers: usize,
    /// Bytes per second.
    pub rate: f64,
}

/// How much faster a number of readers must be to be worth changing to.
const WORTH: f64 = 1.08;
/// Readers that spend less of their time than this at work or waiting for a core leave the cores idle.
const IDLE: f64 = 0.5;
/// Those that spend more than this so keep them busy.
const BUSY: f64 = 0.8;
/// How much a settled rate must change, in either direction, to be another situation.
const CHANGED: f64 = 1.4;
/// For how many epochs in a row it must have changed.
const CHANGED_FOR: u32 = 4;
/// For how many epochs a store that had pushed back must be quiet until more is asked of it again.
const CALM_FOR: u32 = 16;
/// How many trials are remembered for the statistics.
const REMEMBERED: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Search {
    /// The first blocks say what few readers spend their time on.
    Initial,
    /// The next epoch is not counted: it began under another number of readers, or with files to open.
    Skip,
    /// A trial is under way; its first half, once that is over.
    Try(Option<Epoch>),
    /// Found, with that rate, and for so many epochs now not reaching or passing it.
    Settled { rate: f64, changed: u32 },
}

/// The search for the best number of readers.
#[derive(Debug)]
pub struct Tuner {
    bounds: Bounds,
    readers: usize,
    best: Trial,
    search: Search,
    tried: Vec<Trial>,
    /// Whether more readers may be tried.
    climbs: bool,
    /// The most that the store has not refused.
    ceiling: usize,
    /// Epochs since it last did.
    calm: u32,
}

impl Tuner {
    /// A search that begins at `bounds.initial` or `bounds.start`.
    pub fn new(bounds: Bounds) -> Self {
        let start = bounds.start.clamp(bounds.least, bounds.most);
        let readers = bounds.initial.clamp(bounds.least, start);
        let search = if readers < start { Search::Initial } else { Search::Skip };
        Self {
            bounds,
            readers,
            best: Trial { readers, rate: 0.0 },
            search,
            tried: Vec::new(),
            climbs: true,
            ceiling: bounds.most,
            calm: 0,
        }
    }

    /// How many readers to use now.
    pub fn readers(&self) -> usize {
        self.readers
    }

    /// Whether the first blocks are all that is waited for.
    pub fn is_initial(&self) -> bool {
        self.search == Search::Initial
    }

    /// Whether there is anything to find.
    pub fn is_fixed(&self) -> bool {
        self.bounds.least == self.bounds.most
    }

    /// What was tried, in order; the first ones of a long load.
    pub fn tried(&self) -> &[Trial] {
        &self.tried
    }

    /// Learns that the store is asked too often; says how many readers to use from now on.
    pub fn on_throttle(&mut self) -> usize {
        self.ceiling = (self.readers - 1).max(self.bounds.least);
        self.calm = 0;
        self.begin_anew((self.readers / 2).max(self.bounds.least));
        self.search = Search::Skip;
        self.readers
    }

    fn begin_anew(&mut self, readers: usize) {
        self.readers = readers;
        self.best = Trial { readers, rate: 0.0 };
        self.search = Search::Try(None);
        self.climbs = true;
    }

    /// Learns from an epoch; says how many readers to use from now on.
    pub fn observe(&mut self, epoch: Epoch) -> usize {
        self.calm += 1;
        if self.ceiling < self.bounds.most && self.calm >= CALM_FOR {
            self.ceiling = (self.ceiling + self.ceiling.div_ceil(2)).min(self.bounds.most);
            self.calm = 0;
            self.begin_anew(self.readers);
        }
        match self.search {
            Search::Initial => {
                let is_idle = epoch.on_cpu < IDLE;
                let readers = if is_idle { self.bounds.start.min(self.ceiling) } else { self.readers };
                self.begin_anew(readers);
                self.search = Search::Skip;
                self.climbs = epoch.on_cpu <= BUSY;
            }
            Search::Skip => self.search = Search::Try(None),
            Search::Try(None) => self.search = Search::Try(Some(epoch)),
            Search::Try(Some(first)) => {
                let both = Epoch {
                    bytes: first.bytes + epoch.bytes,
                    seconds: first.seconds + epoch.seconds,
                    reading: first.reading.min(epoch.reading),
                    on_cpu: epoch.on_cpu,
                };
                let trial = Trial { readers: self.readers, rate: both.rate() };
                self.judge(trial, both.is_limited_by_reading());
            }
            Search::Settled { rate, changed } => {
                let now = epoch.rate();
                let other = epoch.is_limited_by_reading() && (now > rate * CHANGED || now * CHANGED < rate);
                let changed = if other { changed + 1 } else { 0 };
                self.search = Search::Settled { rate, changed };
                if changed >= CHANGED_FOR {
                    self.begin_anew(self.readers);
                }
            }
        }
        self.readers
    }

    fn judge(&mut self, trial: Trial, reading_limits: bool) {
        if self.tried.len() < REMEMBERED {
            self.tried.push(trial);
        }
        let better = trial.rate > self.best.rate * WORTH;
        if better {
            self.best = trial;
        }
        let Trial { readers, rate } = self.best;
        let more = (readers + readers.div_ceil(2)).min(self.ceiling);
        (self.readers, self.search) = match better && self.climbs && reading_limits && more > readers {
            true => (more, Search::Skip),
            false => (readers, Search::Settled { rate, changed: 0 }),
        };
    }
}
