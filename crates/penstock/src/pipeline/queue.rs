//! The blocks of a load, and which of them a reader should take next.
//!
//! Two kinds of work share the readers. A block in the page cache is **copied**: that keeps a core busy, so there are
//! about as many copies at once as cores. Any other is **fetched**: that keeps the storage busy and the reader waits,
//! so the tuner finds how many at once. Fetches come first, and blocks are looked at a little ahead of those that are
//! taken, so that storage does not idle while there is something cached to copy: a checkpoint of which half is cached
//! can take as long as the other half does.
//!
//! Within a kind, blocks are taken in the plan's order (fetches, where each reader has a run of its own, as
//! [`ReaderRanges`] says), and only those whose tensors all have destinations. Where nobody can tell what is cached, everything is
//! fetched.
//!
//! The queue knows neither threads nor files. To learn what is cached, it has a reader look: that takes microseconds for
//! a block, too long to be done under the queue's lock.

use std::collections::VecDeque;
use std::ops::Range;

use super::reader_ranges::ReaderRanges;

/// How many blocks a reader looks at in one go: enough to come upon a fetch soon, few enough to be at work soon.
const PROBE_BLOCKS: usize = 16;

/// What kind of work a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadKind {
    Copy,
    Fetch,
}

/// How many readers may be at each kind of work.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    pub(super) copies: usize,
    pub(super) fetches: usize,
}

/// What a reader finds.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Block(usize, ReadKind),
    /// First look at these blocks, and say what kind of work they are with [`Queue::enqueue`].
    Probe(Range<usize>),
    /// The next blocks lack destinations.
    NotYet,
    /// Enough readers are at work.
    Enough,
    /// Every block was taken.
    Over,
}

/// The blocks of a load that wait for a reader.
pub(super) struct Queue {
    blocks: usize,
    taken: usize,
    /// Blocks before this have destinations.
    ready: usize,
    /// Blocks before this were given to readers to look at.
    probed: usize,
    /// Readers that are looking.
    probing: usize,
    to_copy: VecDeque<usize>,
    to_fetch: ReaderRanges,
    copying: usize,
    most_at_work: usize,
}

impl Queue {
    /// So many blocks, of which each reader fetches a run of its own or the next one.
    pub(super) fn new(blocks: usize, per_reader_ranges: bool) -> Self {
        Self {
            blocks,
            taken: 0,
            ready: 0,
            probed: 0,
            probing: 0,
            to_copy: VecDeque::new(),
            to_fetch: ReaderRanges::new(per_reader_ranges),
            copying: 0,
            most_at_work: 0,
        }
    }

    /// Blocks before `ready` have destinations now.
    pub(super) fn set_ready(&mut self, ready: usize) {
        self.ready = ready;
    }

    /// Whether every block was taken.
    pub(super) fn is_over(&self) -> bool {
        self.taken == self.blocks
    }

    /// The most readers that were at work at once.
    pub(super) fn most_at_work(&self) -> usize {
        self.most_at_work
    }

    /// What a reader should do next that fetched the block `after` just now, if it did.
    pub(super) fn take(&mut self, room: Room, after: Option<usize>) -> Next {
        if self.is_over() {
            return Next::Over;
        }
        let fetches = self.to_fetch.under_way() < room.fetches;
        let copies = self.copying < room.copies;
        // Ranges are cut from all that there is.
        if self.to_fetch.each_their_own() && self.should_probe(room) {
            return self.probe();
        }
        if fetches && let Some(block) = self.to_fetch.take(after) {
            return self.found(block, ReadKind::Fetch);
        }
        if self.should_probe(room) {
            return self.probe();
        }
        if copies && let Some(block) = self.to_copy.pop_front() {
            self.copying += 1;
            return self.found(block, ReadKind::Copy);
        }
        let all_taken = self.taken == self.ready;
        if all_taken { Next::NotYet } else { Next::Enough }
    }

    /// Whether a reader should look further. Where there is room for a fetch, perhaps one comes soon: then one reader at a
    /// time looks further than it must.
    fn should_probe(&self, room: Room) -> bool {
        let fetches = self.to_fetch.under_way() < room.fetches;
        let nothing_to_copy = self.copying < room.copies && self.to_copy.is_empty();
        self.probed < self.ready && (nothing_to_copy || (fetches && self.probing == 0))
    }

    fn probe(&mut self) -> Next {
        let range = self.probed..self.ready.min(self.probed + PROBE_BLOCKS);
        self.probed = range.end;
        self.probing += 1;
        Next::Probe(range)
    }

    /// Puts blocks that a reader has looked at in their lines.
    pub(super) fn enqueue(&mut self, kinds: impl IntoIterator<Item = (usize, ReadKind)>) {
        self.probing -= 1;
        for (block, kind) in kinds {
            match kind {
                ReadKind::Copy => self.to_copy.push_back(block),
                ReadKind::Fetch => self.to_fetch.add(block),
            }
        }
    }

    /// A reader has ended its work on a block.
    pub(super) fn done(&mut self, block: usize, kind: ReadKind) {
        match kind {
            ReadKind::Copy => self.copying -= 1,
            ReadKind::Fetch => self.to_fetch.done(block),
        }
    }

    /// Whether one more reader would find something to do.
    pub(super) fn wants_more(&self, room: Room) -> bool {
        let fetches = self.to_fetch.under_way() < room.fetches;
        let copies = self.copying < room.copies;
        (fetches && !self.to_fetch.is_empty())
            || (copies && !self.to_copy.is_empty())
            || self.should_probe(room)
    }

    fn found(&mut self, block: usize, kind: ReadKind) -> Next {
        self.taken += 1;
        self.most_at_work = self.most_at_work.max(self.copying + self.to_fetch.under_way());
        Next::Block(block, kind)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROOM: Room = Room { copies: 2, fetches: 2 };

    fn queue(blocks: usize) -> Queue {
        let mut queue = Queue::new(blocks, false);
        queue.set_ready(blocks);
        queue
    }

    /// What a reader finds, having looked where it was told to.
    fn take(queue: &mut Queue, room: Room, cached: impl Fn(usize) -> bool) -> Next {
        loop {
            match queue.take(room, None) {
                Next::Probe(range) => {
                    let kind = |block| if cached(block) { ReadKind::Copy } else { ReadKind::Fetch };
                    queue.enqueue(range.map(|block| (block, kind(block))));
                }
                found => return found,
            }
        }
    }

    #[test]
    fn what_must_be_fetched_goes_first_though_it_comes_later() {
        let mut queue = queue(12);
        let cached = |block: usize| block < 10;
        assert_eq!(take(&mut queue, ROOM, cached), Next::Block(10, ReadKind::Fetch));
        assert_eq!(take(&mut queue, ROOM, cached), Next::Block(11, ReadKind::Fetch));
        assert_eq!(take(&mut queue, ROOM, cached), Next::Block(0, ReadKind::Copy));
        assert_eq!(take(&mut queue, ROOM, cached), Next::Block(1, ReadKind::Copy));
        assert_eq!(take(&mut queue, ROOM, cached), Next::Enough);
        queue.done(10, ReadKind::Fetch);
        assert_eq!(take(&mut queue, ROOM, cached), Next::Enough);
        queue.done(0, ReadKind::Copy);
        assert_eq!(take(&mut queue, ROOM, cached), Next::Block(2, ReadKind::Copy));
    }

    #[test]
    fn while_one_reader_looks_others_copy_what_is_known_and_look_on_when_there_is_nothing() {
        let mut queue = queue(100);
        assert_eq!(queue.take(ROOM, None), Next::Probe(0..16));
        assert_eq!(queue.take(ROOM, None), Next::Probe(16..32));
        queue.enqueue((0..16).map(|block| (block, ReadKind::Copy)));
        assert_eq!(queue.take(ROOM, None), Next::Block(0, ReadKind::Copy));
        queue.enqueue((16..32).map(|block| (block, ReadKind::Copy)));
        assert_eq!(queue.take(ROOM, None), Next::Probe(32..48));
    }

    #[test]
    fn readers_with_runs_of_their_own_look_at_everything_first() {
        let mut queue = Queue::new(100, true);
        queue.set_ready(100);
        let nothing_cached = |_| false;
        assert_eq!(take(&mut queue, ROOM, nothing_cached), Next::Block(0, ReadKind::Fetch));
        assert_eq!(take(&mut queue, ROOM, nothing_cached), Next::Block(50, ReadKind::Fetch));
        queue.done(50, ReadKind::Fetch);
        assert_eq!(queue.take(ROOM, Some(50)), Next::Block(51, ReadKind::Fetch));
    }

    #[test]
    fn blocks_wait_for_their_destinations() {
        let mut queue = Queue::new(2, false);
        assert_eq!(queue.take(ROOM, None), Next::NotYet);
        queue.set_ready(1);
        assert!(queue.wants_more(ROOM));
        assert_eq!(take(&mut queue, ROOM, |_| true), Next::Block(0, ReadKind::Copy));
        assert_eq!(queue.take(ROOM, None), Next::NotYet);
        queue.set_ready(2);
        assert_eq!(take(&mut queue, ROOM, |_| false), Next::Block(1, ReadKind::Fetch));
        assert_eq!(queue.take(ROOM, None), Next::Over);
    }

    proptest! {
        /// Whoever comes when, with whatever room: every block is taken once, no kind of work has more readers than it
        /// has room for, and nobody waits while there is something to do.
        #[test]
        fn every_block_is_taken_once_and_nobody_waits_for_nothing(
            cached in prop::collection::vec(any::<bool>(), 1..200),
            copies in 1usize..5, fetches in 1usize..5, per_reader_ranges: bool,
            choices in prop::collection::vec(any::<u8>(), 2000),
        ) {
            let room = Room { copies, fetches };
            let mut queue = Queue::new(cached.len(), per_reader_ranges);
            let mut taken = vec![false; cached.len()];
            let (mut at_work, mut probing) = (Vec::new(), Vec::new());
            let mut ready = 0;
            let kind = |block: usize| (block, if cached[block] { ReadKind::Copy } else { ReadKind::Fetch });
            for choice in choices {
                if choice % 4 == 0 {
                    ready = (ready + usize::from(choice / 4)).min(cached.len());
                    queue.set_ready(ready);
                }
                let wanted = queue.wants_more(room);
                match queue.take(room, None) {
                    Next::Block(block, found) => {
                        prop_assert!(wanted && block < ready && !std::mem::replace(&mut taken[block], true));
                        prop_assert_eq!(found, kind(block).1);
                        at_work.push((block, found));
                    }
                    Next::Probe(range) => {
                        prop_assert!(wanted && range.end <= ready);
                        probing.push(range);
                    }
                    Next::Over => prop_assert!(taken.iter().all(|taken| *taken)),
                    Next::NotYet => prop_assert!(!wanted && taken[..ready].iter().all(|taken| *taken)),
                    Next::Enough => {
                        prop_assert!(!wanted);
                        prop_assert!(!at_work.is_empty() || !probing.is_empty());
                    }
                }
                for kind in [ReadKind::Copy, ReadKind::Fetch] {
                    let room = if kind == ReadKind::Copy { copies } else { fetches };
                    prop_assert!(at_work.iter().filter(|at| at.1 == kind).count() <= room);
                }
                if choice % 3 == 0 && !at_work.is_empty() {
                    let (block, kind) = at_work.swap_remove(usize::from(choice) % at_work.len());
                    queue.done(block, kind);
                }
                if choice % 5 < 3 && !probing.is_empty() {
                    let range = probing.swap_remove(usize::from(choice) % probing.len());
                    queue.enqueue(range.map(kind));
                }
            }
        }
    }
}
