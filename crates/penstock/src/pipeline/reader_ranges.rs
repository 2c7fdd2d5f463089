//! The blocks that wait to be fetched, as runs of neighbours, and which of them a reader should fetch next.
//!
//! Most storage does not mind who reads what: blocks go out in the plan's order. Some serves each open file from front
//! to back, looks ahead of it, and loses that with every jump (a FUSE daemon). There every reader has **a run of its
//! own**: it goes on where it was; who begins takes a run that nobody is in, or else the second half of the longest. So
//! each sees a rising sequence of neighbours, and the last blocks are shared out however slow one of the readers is.
//!
//! It knows neither files nor bytes: a run may cross from one file to the next, which is read from its front then.

use std::collections::{BTreeMap, BTreeSet};

/// Blocks that wait to be fetched, as runs of neighbours.
#[derive(Debug, Default)]
pub(super) struct ReaderRanges {
    own: bool,
    /// Where each waiting run begins, and where it ends.
    waiting: BTreeMap<usize, usize>,
    /// The blocks that readers are at.
    under_way: BTreeSet<usize>,
}

impl ReaderRanges {
    /// No blocks; `own`: each reader has a run of its own.
    pub(super) fn new(own: bool) -> Self {
        Self { own, ..Self::default() }
    }

    pub(super) fn each_their_own(&self) -> bool {
        self.own
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// How many blocks are being fetched.
    pub(super) fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// One more block waits.
    pub(super) fn add(&mut self, block: usize) {
        let end = self.waiting.remove(&(block + 1)).unwrap_or(block + 1);
        match self.waiting.range_mut(..block).next_back() {
            Some((_, before)) if *before == block => *before = end,
            _ => {
                self.waiting.insert(block, end);
            }
        }
    }

    /// The block for a reader that fetched `after` just now, if it did.
    pub(super) fn take(&mut self, after: Option<usize>) -> Option<usize> {
        let block = if self.own { self.in_own_run(after) } else { self.waiting.keys().next().copied() }?;
        let (&start, &end) = self.waiting.range(..=block).next_back()?;
        self.waiting.remove(&start);
        if start < block {
            self.waiting.insert(start, block);
        }
        if block + 1 < end {
            self.waiting.insert(block + 1, end);
        }
        self.under_way.insert(block);
        Some(block)
    }

    /// A reader has ended its work on this block.
    pub(super) fn done(&mut self, block: usize) {
        self.under_way.remove(&block);
    }

    fn in_own_run(&self, after: Option<usize>) -> Option<usize> {
        let next = after.map(|block| block + 1).filter(|next| self.waiting.contains_key(next));
        let free = || self.waiting.keys().copied().find(|start| !self.someone_comes_to(*start));
        let half = || {
            let (start, end) = self.waiting.iter().max_by_key(|(start, end)| *end - *start)?;
            Some(start + (end - start) / 2)
        };
        next.or_else(free).or_else(half)
    }

    /// Whether a reader is right before the run that begins there.
    fn someone_comes_to(&self, start: usize) -> bool {
        start.checked_sub(1).is_some_and(|before| self.under_way.contains(&before))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn runs(own: bool, blocks: impl IntoIterator<Item = usize>) -> ReaderRanges {
        let mut runs = ReaderRanges::new(own);
        blocks.into_iter().for_each(|block| runs.add(block));
        runs
    }

    /// The block after `after` was fetched.
    fn next(runs: &mut ReaderRanges, after: usize) -> Option<usize> {
        runs.done(after);
        runs.take(Some(after))
    }

    #[test]
    fn without_own_runs_blocks_go_out_in_order_whoever_comes() {
        let mut runs = runs(false, [3, 1, 0, 2]);
        assert_eq!([None, Some(0), None, Some(1)].map(|after| runs.take(after)), [0, 1, 2, 3].map(Some));
    }

    #[test]
    fn a_reader_goes_on_where_it_was_and_a_new_one_takes_the_second_half() {
        let mut runs = runs(true, 0..10);
        assert_eq!(runs.take(None), Some(0));
        assert_eq!(runs.take(None), Some(5), "of blocks 1 to 9");
        assert_eq!(next(&mut runs, 0), Some(1));
        assert_eq!(next(&mut runs, 5), Some(6));
        assert_eq!(next(&mut runs, 1), Some(2));
    }

    #[test]
    fn a_run_that_nobody_is_in_is_taken_before_another_is_divided() {
        let mut runs = runs(true, (0..4).chain(100..200));
        assert_eq!(runs.take(None), Some(0));
        assert_eq!(runs.take(None), Some(100));
        // The first one stops reading: the tuner wants fewer. Who begins next goes on there.
        runs.done(0);
        assert_eq!(runs.take(None), Some(1));
    }

    #[test]
    fn the_end_is_shared_out_until_nothing_waits() {
        let mut runs = runs(true, 0..4);
        assert_eq!(runs.take(None), Some(0));
        // However slow the first reader is, the second leaves nothing for it.
        let mut at = runs.take(None);
        let mut taken = Vec::new();
        while let Some(block) = at {
            taken.push(block);
            at = next(&mut runs, block);
        }
        taken.sort_unstable();
        assert_eq!(taken, [1, 2, 3]);
        assert!(runs.is_empty());
    }

    proptest! {
        /// Whatever waits and however fast the readers are: each block goes out once, and as long as no reader begins or
        /// comes to the end of its run, every reader goes from block to block.
        #[test]
        fn every_block_goes_out_once_in_rising_runs(
            waits in prop::collection::vec(any::<bool>(), 1..300),
            readers in 1usize..6, own: bool,
            choices in prop::collection::vec(any::<prop::sample::Index>(), 400),
        ) {
            let blocks: Vec<usize> = (0..waits.len()).filter(|block| waits[*block]).collect();
            let mut runs = runs(own, blocks.iter().copied().rev());
            let mut at: Vec<Option<usize>> = vec![None; readers];
            let mut taken = Vec::new();
            for choice in choices {
                let reader = choice.index(readers);
                let after = at[reader];
                if let Some(block) = after {
                    runs.done(block);
                }
                let goes_on = after.map(|block| block + 1).filter(|next| runs.waiting.contains_key(next));
                at[reader] = runs.take(after);
                prop_assert_eq!(runs.under_way(), at.iter().flatten().count());
                if own && goes_on.is_some() {
                    prop_assert_eq!(at[reader], goes_on);
                }
                taken.extend(at[reader]);
            }
            prop_assert!(runs.is_empty() && at.iter().filter_map(|at| *at).all(|block| taken.contains(&block)));
            if !own {
                prop_assert!(taken.is_sorted());
            }
            taken.sort_unstable();
            prop_assert_eq!(taken, blocks);
        }
    }
}
