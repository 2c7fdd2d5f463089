//! What is read and by whom: patterns, engines, and the requests of a pattern.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::files::mixed;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Ranges cover one part in this many.
const SPARSE: u64 = 4;
/// Ranges begin at multiples of this, as direct reads must.
const SECTOR: u64 = 4096;

/// Where the bytes come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// From storage, past the page cache.
    Direct,
    /// From storage, through the page cache, which has none of them.
    Through,
    /// From the page cache.
    Warm,
}

/// What is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pattern {
    pub state: State,
    /// All of the files in order, or ranges of a quarter of them in random order.
    pub whole: bool,
    /// Bytes of a request.
    pub bytes: u64,
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Direct => "cold",
            State::Through => "cold, buffered",
            State::Warm => "warm",
        };
        let what = if self.whole { "whole file by" } else { "ranges of" };
        match self.bytes {
            mib if mib >= MIB => write!(f, "{state}: {what} {} MiB", mib / MIB),
            kib => write!(f, "{state}: {what} {} KiB", kib / KIB),
        }
    }
}

impl Pattern {
    /// All patterns, direct ones first: those leave the page cache as it is.
    pub fn all() -> Vec<Self> {
        let of = |state, whole, bytes| Self { state, whole, bytes };
        let four = |state| {
            [(true, 2 * MIB), (true, 8 * MIB), (false, 128 * KIB), (false, 16 * KIB)]
                .map(|(whole, bytes)| of(state, whole, bytes))
        };
        let through = [of(State::Through, false, 16 * KIB)];
        four(State::Direct).into_iter().chain(through).chain(four(State::Warm)).collect()
    }
}

/// One read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    pub file: usize,
    pub offset: u64,
}

/// The requests of a pattern on `files` files of `each` bytes. Files take turns, as shards on several disks would.
///
/// A round's seed turns whole files to another beginning and picks other ranges, so that what a host or a disk keeps
/// from the last round helps nobody.
pub fn requests(pattern: Pattern, files: usize, each: u64, seed: u64) -> Vec<Request> {
    if pattern.whole {
        let blocks = each / pattern.bytes;
        let turned = mixed(seed) % blocks;
        return (0..blocks)
            .flat_map(|block| {
                let offset = (block + turned) % blocks * pattern.bytes;
                (0..files).map(move |file| Request { file, offset })
            })
            .collect();
    }
    // One range somewhere in every cell: they never overlap, and leave gaps of all sizes.
    let cell = SPARSE * pattern.bytes;
    let places = (cell - pattern.bytes) / SECTOR + 1;
    let mut found: Vec<_> = (0..each / cell)
        .flat_map(|number| {
            (0..files).map(move |file| {
                let place = mixed(mixed(seed) ^ (number * 64 + file as u64)) % places;
                Request { file, offset: number * cell + place * SECTOR }
            })
        })
        .collect();
    for last in (1..found.len()).rev() {
        let other = mixed(mixed(seed ^ 1) ^ last as u64) % (last as u64 + 1);
        found.swap(last, other as usize);
    }
    found
}

/// Who reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// So many threads, each with one `pread` at a time.
    Threads(usize),
    /// So many rings, each driven by a thread, with so many reads in flight each.
    Rings { rings: usize, depth: usize, how: How },
}

/// How a ring is used. Files and buffers are registered unless it says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    Plain,
    /// Neither files nor buffers are registered.
    Unregistered,
    /// Waits for a quarter of the depth at once: fewer system calls.
    Batched,
    /// A kernel thread polls the submission queue.
    SqPoll,
    /// Completions are polled for at the device.
    IoPoll,
    /// Every read goes to the kernel's workers (`IOSQE_ASYNC`).
    Workers,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Threads(count) => write!(f, "threads {count}"),
            Self::Rings { rings, depth, how } => {
                write!(f, "io_uring {rings}x{depth}")?;
                match how {
                    How::Plain => Ok(()),
                    How::Unregistered => f.write_str(" unregistered"),
                    How::Batched => f.write_str(" batched"),
                    How::SqPoll => f.write_str(" SQPOLL"),
                    How::IoPoll => f.write_str(" IOPOLL"),
                    How::Workers => f.write_str(" workers"),
                }
            }
        }
    }
}

impl Engine {
    /// Whether this is io_uring.
    pub fn is_ring(self) -> bool {
        matches!(self, Self::Rings { .. })
    }

    /// The engines worth trying on a pattern with `cores` processors.
    pub fn of(pattern: Pattern, cores: usize) -> Vec<Self> {
        let ring = |rings, depth, how| Self::Rings { rings, depth, how };
        let plain = |rings, depth| ring(rings, depth, How::Plain);
        let mut found = match (pattern.state, pattern.whole) {
            (State::Direct, true) => vec![
                Self::Threads(4),
                Self::Threads(8),
                Self::Threads(16),
                plain(1, 4),
                plain(1, 8),
                plain(1, 16),
                plain(4, 4),
                ring(1, 8, How::Unregistered),
                ring(1, 8, How::SqPoll),
                ring(1, 8, How::IoPoll),
            ],
            (State::Direct, false) => vec![
                Self::Threads(8),
                Self::Threads(16),
                Self::Threads(32),
                Self::Threads(64),
                plain(1, 16),
                plain(1, 32),
                plain(1, 64),
                plain(4, 16),
                ring(1, 64, How::Batched),
                ring(1, 32, How::Unregistered),
                ring(1, 32, How::SqPoll),
                ring(1, 32, How::IoPoll),
            ],
            (State::Through, _) => {
                vec![
                    Self::Threads(8),
                    Self::Threads(32),
                    plain(1, 32),
                    plain(4, 8),
                    ring(1, 32, How::Workers),
                ]
            }
            (State::Warm, _) => vec![
                Self::Threads(cores),
                Self::Threads(8),
                Self::Threads(2 * cores),
                plain(1, 4),
                plain(cores, 1),
                ring(cores, 1, How::Unregistered),
                plain(cores, 4),
                ring(1, 2 * cores, How::Workers),
            ],
        };
        let mut seen = Vec::new();
        found.retain(|engine| {
            !seen.contains(engine) && {
                seen.push(*engine);
                true
            }
        });
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::UNIT;

    #[test]
    fn whole_files_are_read_once_and_ranges_cover_a_quarter_without_overlap() {
        for pattern in Pattern::all() {
            for seed in 0..3 {
                let mut found = requests(pattern, 2, 2 * UNIT, seed);
                let share = if pattern.whole { 1 } else { 4 };
                assert_eq!(found.len() as u64 * pattern.bytes * share, 4 * UNIT, "{pattern}");
                found.sort_by_key(|request| (request.file, request.offset));
                for pair in found.windows(2) {
                    assert!(pair[0].file < pair[1].file || pair[0].offset + pattern.bytes <= pair[1].offset);
                }
                assert!(found.iter().all(|request| request.offset + pattern.bytes <= 2 * UNIT));
                assert!(found.iter().all(|request| request.offset.is_multiple_of(SECTOR)));
            }
        }
    }

    #[test]
    fn another_round_reads_in_another_order() {
        for pattern in Pattern::all() {
            assert_ne!(requests(pattern, 1, 8 * UNIT, 1), requests(pattern, 1, 8 * UNIT, 2), "{pattern}");
        }
    }

    #[test]
    fn no_engine_is_tried_twice() {
        for pattern in Pattern::all() {
            for cores in [1, 2, 4, 8, 16] {
                let names: Vec<_> = Engine::of(pattern, cores).iter().map(Engine::to_string).collect();
                let unique: std::collections::HashSet<_> = names.iter().collect();
                assert_eq!(names.len(), unique.len(), "{names:?}");
            }
        }
    }
}
