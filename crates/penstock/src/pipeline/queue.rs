//! The blocks of a load, and which of them a reader should take next.
//!
//! Two kinds of work share the readers. A block in the page cache is **copied**: that keeps a core busy, so there are
//! about as many copies at once as cores. Any other is **fetched**: that keeps the storage busy and the reader waits,
//! so the tuner finds how many at once. Fetches come first, and blocks are looked at a little ahead of those that are
//! taken, so that storage does not idle while there is something cached to copy: a checkpoint of which half is cached
//! can take as long as the other half does.
//!
//! Within a kind, blocks are taken in the plan's order, and only those whose tensors all have destinations. Where
//! nobody can tell what is cached, everything is fetched.
//!
//! The queue knows neither threads nor files. To learn what is cached, it has a reader look: that takes microseconds for
//! a block, too long to be done under the queue's lock.

use std::collections::VecDeque;
use std::ops::Range;

/// How many blocks a reader looks at in one go: enough to come upon a fetch soon, few enough to be at work soon.
const LOOK_AHEAD: usize = 16;

/// What kind of work a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
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
pub(super) enum Found {
    Block(usize, Kind),
    /// First look at these blocks, and say what kind of work they are with [`Queue::sort`].
    Look(Range<usize>),
    /// The next blocks lack destinations.
    NotYet,
    /// Enough readers are at work.
    Enough,
    /// Every block was taken.
    Over,
}

/// See the module.
pub(super) struct Queue {
    blocks: usize,
    taken: usize,
    /// Blocks before this have destinations.
    ready: usize,
    /// Blocks before this were given to readers to look at.
    looked_at: usize,
    /// Readers that are looking.
    looking: usize,
    to_copy: VecDeque<usize>,
    to_fetch: VecDeque<usize>,
    copying: usize,
    fetching: usize,
    most_at_work: usize,
}

impl Queue {
    pub(super) fn new(blocks: usize) -> Self {
        Self {
            blocks,
            taken: 0,
            ready: 0,
            looked_at: 0,
            looking: 0,
            to_copy: VecDeque::new(),
            to_fetch: VecDeque::new(),
            copying: 0,
            fetching: 0,
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

    /// What a reader should do next.
    pub(super) fn take(&mut self, room: Room) -> Found {
        let fetches = self.fetching < room.fetches;
        let copies = self.copying < room.copies;
        if self.is_over() {
            return Found::Over;
        }
        if fetches && let Some(block) = self.to_fetch.pop_front() {
            self.fetching += 1;
            return self.found(block, Kind::Fetch);
        }
        // There is room for a fetch: perhaps one comes soon. One reader at a time looks further than it must.
        let nothing_to_copy = copies && self.to_copy.is_empty();
        if self.looked_at < self.ready && (nothing_to_copy || (fetches && self.looking == 0)) {
            let end = self.ready.min(self.looked_at + LOOK_AHEAD);
            let range = self.looked_at..end;
            self.looked_at = end;
            self.looking += 1;
            return Found::Look(range);
        }
        if copies && let Some(block) = self.to_copy.pop_front() {
            self.copying += 1;
            return self.found(block, Kind::Copy);
        }
        let all_taken = self.taken == self.ready;
        if all_taken { Found::NotYet } else { Found::Enough }
    }

    /// Puts blocks that a reader has looked at in their lines.
    pub(super) fn sort(&mut self, kinds: impl IntoIterator<Item = (usize, Kind)>) {
        self.looking -= 1;
        for (block, kind) in kinds {
            let line = match kind {
                Kind::Copy => &mut self.to_copy,
                Kind::Fetch => &mut self.to_fetch,
            };
            line.push_back(block);
        }
    }

    /// A reader has ended its work on a block.
    pub(super) fn done(&mut self, kind: Kind) {
        match kind {
            Kind::Copy => self.copying -= 1,
            Kind::Fetch => self.fetching -= 1,
        }
    }

    /// Whether one more reader would find something to do.
    pub(super) fn wants_more(&self, room: Room) -> bool {
        let fetches = self.fetching < room.fetches;
        let copies = self.copying < room.copies;
        let nothing_to_copy = copies && self.to_copy.is_empty();
        (fetches && !self.to_fetch.is_empty())
            || (copies && !self.to_copy.is_empty())
            || (self.looked_at < self.ready && (nothing_to_copy || (fetches && self.looking == 0)))
    }

    fn found(&mut self, block: usize, kind: Kind) -> Found {
        self.taken += 1;
        self.most_at_work = self.most_at_work.max(self.copying + self.fetching);
        Found::Block(block, kind)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROOM: Room = Room { copies: 2, fetches: 2 };

    fn queue(blocks: usize) -> Queue {
        let mut queue = Queue::new(blocks);
        queue.set_ready(blocks);
        queue
    }

    /// What a reader finds, having looked where it was told to.
    fn take(queue: &mut Queue, room: Room, cached: impl Fn(usize) -> bool) -> Found {
        loop {
            match queue.take(room) {
                Found::Look(range) => {
                    let kind = |block| if cached(block) { Kind::Copy } else { Kind::Fetch };
                    queue.sort(range.map(|block| (block, kind(block))));
                }
                found => return found,
            }
        }
    }

    #[test]
    fn what_must_be_fetched_goes_first_though_it_comes_later() {
        let mut queue = queue(12);
        let cached = |block: usize| block < 10;
        assert_eq!(take(&mut queue, ROOM, cached), Found::Block(10, Kind::Fetch));
        assert_eq!(take(&mut queue, ROOM, cached), Found::Block(11, Kind::Fetch));
        assert_eq!(take(&mut queue, ROOM, cached), Found::Block(0, Kind::Copy));
        assert_eq!(take(&mut queue, ROOM, cached), Found::Block(1, Kind::Copy));
        assert_eq!(take(&mut queue, ROOM, cached), Found::Enough);
        queue.done(Kind::Fetch);
        assert_eq!(take(&mut queue, ROOM, cached), Found::Enough);
        queue.done(Kind::Copy);
        assert_eq!(take(&mut queue, ROOM, cached), Found::Block(2, Kind::Copy));
    }

    #[test]
    fn while_one_reader_looks_others_copy_what_is_known_and_look_on_when_there_is_nothing() {
        let mut queue = queue(100);
        assert_eq!(queue.take(ROOM), Found::Look(0..16));
        assert_eq!(queue.take(ROOM), Found::Look(16..32));
        queue.sort((0..16).map(|block| (block, Kind::Copy)));
        assert_eq!(queue.take(ROOM), Found::Block(0, Kind::Copy));
        queue.sort((16..32).map(|block| (block, Kind::Copy)));
        assert_eq!(queue.take(ROOM), Found::Look(32..48));
    }

    #[test]
    fn blocks_wait_for_their_destinations() {
        let mut queue = Queue::new(2);
        assert_eq!(queue.take(ROOM), Found::NotYet);
        queue.set_ready(1);
        assert!(queue.wants_more(ROOM));
        assert_eq!(take(&mut queue, ROOM, |_| true), Found::Block(0, Kind::Copy));
        assert_eq!(queue.take(ROOM), Found::NotYet);
        queue.set_ready(2);
        assert_eq!(take(&mut queue, ROOM, |_| false), Found::Block(1, Kind::Fetch));
        assert_eq!(queue.take(ROOM), Found::Over);
    }

    proptest! {
        /// Whoever comes when, with whatever room: every block is taken once, no kind of work has more readers than it
        /// has room for, and nobody waits while there is something to do.
        #[test]
        fn every_block_is_taken_once_and_nobody_waits_for_nothing(
            cached in prop::collection::vec(any::<bool>(), 1..200),
            copies in 1usize..5, fetches in 1usize..5,
            choices in prop::collection::vec(any::<u8>(), 2000),
        ) {
            let room = Room { copies, fetches };
            let mut queue = Queue::new(cached.len());
            let mut taken = vec![false; cached.len()];
            let (mut at_work, mut looking) = (Vec::new(), Vec::new());
            let mut ready = 0;
            let kind = |block: usize| (block, if cached[block] { Kind::Copy } else { Kind::Fetch });
            for choice in choices {
                if choice % 4 == 0 {
                    ready = (ready + usize::from(choice / 4)).min(cached.len());
                    queue.set_ready(ready);
                }
                let wanted = queue.wants_more(room);
                match queue.take(room) {
                    Found::Block(block, found) => {
                        prop_assert!(wanted && block < ready && !std::mem::replace(&mut taken[block], true));
                        prop_assert_eq!(found, kind(block).1);
                        at_work.push(found);
                    }
                    Found::Look(range) => {
                        prop_assert!(wanted && range.end <= ready);
                        looking.push(range);
                    }
                    Found::Over => prop_assert!(taken.iter().all(|taken| *taken)),
                    Found::NotYet => prop_assert!(!wanted && taken[..ready].iter().all(|taken| *taken)),
                    Found::Enough => {
                        prop_assert!(!wanted);
                        prop_assert!(!at_work.is_empty() || !looking.is_empty());
                    }
                }
                for kind in [Kind::Copy, Kind::Fetch] {
                    let room = if kind == Kind::Copy { copies } else { fetches };
                    prop_assert!(at_work.iter().filter(|at| **at == kind).count() <= room);
                }
                if choice % 3 == 0 && !at_work.is_empty() {
                    queue.done(at_work.swap_remove(usize::from(choice) % at_work.len()));
                }
                if choice % 5 < 3 && !looking.is_empty() {
                    let range = looking.swap_remove(usize::from(choice) % looking.len());
                    queue.sort(range.map(kind));
                }
            }
        }
    }
}
