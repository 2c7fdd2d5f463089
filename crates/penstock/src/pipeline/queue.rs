//! The blocks of a load, and which of them a reader should take next.
//!
//! Two kinds of work share the readers. A block in the page cache is **copied**: that keeps a core busy, so there are
//! about as many copies at once as cores. Any other is **fetched**: that keeps the storage busy and the reader waits,
//! so the tuner finds how many at once. Fetches come first, and blocks are looked at a little ahead of those that are
//! taken, so that storage does not idle while there is something cached to copy: a checkpoint of which half is cached
//! takes as long as the other half does.
//!
//! Within a kind, blocks are taken in the plan's order, and only those whose tensors all have destinations. Where
//! nobody can tell what is cached, everything is fetched.
//!
//! The queue knows neither threads nor files: it is told which objects are open and what is cached.

use std::collections::VecDeque;

/// How many blocks are looked at, ahead of those taken, each time a reader asks: enough to come upon a fetch soon, few
/// enough to keep others waiting for microseconds only.
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
    /// Nothing to do before this block's object is open.
    Closed(usize),
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
    /// Blocks before this are in one of the two lines, or were taken from there.
    sorted: usize,
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
            sorted: 0,
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

    /// The next block to work on. `is_cached` says whether a block is in the page cache, or nothing where its object
    /// is not open yet.
    pub(super) fn take(&mut self, room: Room, is_cached: impl Fn(usize) -> Option<bool>) -> Found {
        if self.is_over() {
            return Found::Over;
        }
        loop {
            let fetches = self.fetching < room.fetches;
            if fetches && self.to_fetch.is_empty() {
                self.sort(&is_cached);
            }
            if fetches && let Some(block) = self.to_fetch.pop_front() {
                self.fetching += 1;
                return self.found(block, Kind::Fetch);
            }
            let copies = self.copying < room.copies;
            if copies && let Some(block) = self.to_copy.pop_front() {
                self.copying += 1;
                return self.found(block, Kind::Copy);
            }
            if self.sorted == self.ready {
                let lines_are_empty = self.to_copy.is_empty() && self.to_fetch.is_empty();
                return if lines_are_empty { Found::NotYet } else { Found::Enough };
            }
            if !fetches && !copies {
                return Found::Enough;
            }
            let before = self.sorted;
            self.sort(&is_cached);
            if self.sorted == before {
                return Found::Closed(before);
            }
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
        let unsorted = self.sorted < self.ready;
        (self.fetching < room.fetches && (unsorted || !self.to_fetch.is_empty()))
            || (self.copying < room.copies && (unsorted || !self.to_copy.is_empty()))
    }

    fn found(&mut self, block: usize, kind: Kind) -> Found {
        self.taken += 1;
        self.most_at_work = self.most_at_work.max(self.copying + self.fetching);
        Found::Block(block, kind)
    }

    /// Puts the next few blocks in their lines, up to the first to fetch.
    fn sort(&mut self, is_cached: &impl Fn(usize) -> Option<bool>) {
        for _ in 0..LOOK_AHEAD {
            if self.sorted == self.ready {
                return;
            }
            let Some(cached) = is_cached(self.sorted) else { return };
            let line = if cached { &mut self.to_copy } else { &mut self.to_fetch };
            line.push_back(self.sorted);
            self.sorted += 1;
            if !cached {
                return;
            }
        }
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

    #[test]
    fn what_must_be_fetched_goes_first_though_it_comes_later() {
        let mut queue = queue(12);
        let cached = |block: usize| Some(block < 10);
        assert_eq!(queue.take(ROOM, cached), Found::Block(10, Kind::Fetch));
        assert_eq!(queue.take(ROOM, cached), Found::Block(11, Kind::Fetch));
        assert_eq!(queue.take(ROOM, cached), Found::Block(0, Kind::Copy));
        assert_eq!(queue.take(ROOM, cached), Found::Block(1, Kind::Copy));
        assert_eq!(queue.take(ROOM, cached), Found::Enough);
        queue.done(Kind::Fetch);
        assert_eq!(queue.take(ROOM, cached), Found::Enough);
        queue.done(Kind::Copy);
        assert_eq!(queue.take(ROOM, cached), Found::Block(2, Kind::Copy));
    }

    #[test]
    fn a_closed_object_is_opened_before_anything_is_said_of_it() {
        let mut queue = queue(2);
        assert_eq!(queue.take(ROOM, |_| None), Found::Closed(0));
        assert_eq!(queue.take(ROOM, |block| (block == 0).then_some(true)), Found::Block(0, Kind::Copy));
    }

    #[test]
    fn blocks_wait_for_their_destinations() {
        let mut queue = Queue::new(2);
        assert_eq!(queue.take(ROOM, |_| Some(true)), Found::NotYet);
        queue.set_ready(1);
        assert!(queue.wants_more(ROOM));
        assert_eq!(queue.take(ROOM, |_| Some(true)), Found::Block(0, Kind::Copy));
        assert_eq!(queue.take(ROOM, |_| Some(true)), Found::NotYet);
        queue.set_ready(2);
        assert_eq!(queue.take(ROOM, |_| Some(false)), Found::Block(1, Kind::Fetch));
        assert_eq!(queue.take(ROOM, |_| Some(false)), Found::Over);
    }

    proptest! {
        /// Whoever comes when, with whatever room: every block is taken once, no kind of work has more readers than it
        /// has room for, and somebody always has something to do.
        #[test]
        fn every_block_is_taken_once_and_nobody_waits_for_nothing(
            cached in prop::collection::vec(any::<bool>(), 1..200),
            copies in 1usize..5, fetches in 1usize..5,
            choices in prop::collection::vec(any::<u8>(), 2000),
        ) {
            let room = Room { copies, fetches };
            let mut queue = Queue::new(cached.len());
            let mut taken = vec![false; cached.len()];
            let mut at_work = Vec::new();
            let mut ready = 0;
            for choice in choices {
                if choice % 4 == 0 {
                    ready = (ready + usize::from(choice / 4)).min(cached.len());
                    queue.set_ready(ready);
                }
                let wanted = queue.wants_more(room);
                match queue.take(room, |block| Some(cached[block])) {
                    Found::Block(block, kind) => {
                        prop_assert!(wanted && block < ready && !std::mem::replace(&mut taken[block], true));
                        prop_assert_eq!(kind == Kind::Copy, cached[block]);
                        at_work.push(kind);
                    }
                    Found::Over => prop_assert!(taken.iter().all(|taken| *taken)),
                    Found::NotYet => prop_assert!(taken[..ready].iter().all(|taken| *taken)),
                    Found::Enough => prop_assert!(!at_work.is_empty()),
                    Found::Closed(_) => prop_assert!(false),
                }
                prop_assert!(at_work.iter().filter(|kind| **kind == Kind::Copy).count() <= copies);
                prop_assert!(at_work.iter().filter(|kind| **kind == Kind::Fetch).count() <= fetches);
                if choice % 3 == 0 && !at_work.is_empty() {
                    queue.done(at_work.swap_remove(usize::from(choice) % at_work.len()));
                }
            }
        }
    }
}
