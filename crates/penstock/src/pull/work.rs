//! Who does what next: files are opened one after the other, so that the blocks of few files are under way at a time, and
//! every thread that has nothing to fetch opens the next.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::partial_file::{BLOCK_BYTES, Came, MOST_BLOCKS, PartialFile};

/// How long a request should take at most: what comes within it is lost when the process is killed.
const REQUEST_TIME: Duration = Duration::from_secs(1);

/// How much a thread asks for at once: as much as comes in a second, so that a pull over a slow link that is cut off loses
/// no more than that; over a fast one, as much as a load does.
pub(super) struct RequestSize(usize);

impl Default for RequestSize {
    fn default() -> Self {
        Self(2)
    }
}

impl RequestSize {
    /// Bytes of the first request.
    pub(super) const FIRST_BYTES: u64 = 2 * BLOCK_BYTES;

    pub(super) fn blocks(&self) -> usize {
        self.0
    }

    /// Learns from what a request brought.
    pub(super) fn learn(&mut self, came: &Came) {
        if came.fetched > 0 {
            let took = came.took.max(Duration::from_millis(1)).as_nanos();
            let bytes = u128::from(came.fetched) * REQUEST_TIME.as_nanos() / took;
            let blocks = usize::try_from(bytes / u128::from(BLOCK_BYTES)).unwrap_or(MOST_BLOCKS);
            self.0 = blocks.clamp(1, MOST_BLOCKS);
        }
    }
}

/// What a thread is to do.
pub(super) enum Task {
    /// Open the item of that number.
    Open(usize),
    /// Bring in these blocks, with one request where none of them is there.
    Blocks(Arc<PartialFile>, Range<usize>),
    /// Nothing is left.
    Over,
}

#[derive(Default)]
struct State {
    items: VecDeque<usize>,
    /// Files with the blocks of each that no one has taken yet.
    blocks: VecDeque<(Arc<PartialFile>, Range<usize>)>,
    /// Files being opened: blocks may come of them.
    opening: usize,
    over: bool,
}

/// The work that is left.
#[derive(Default)]
pub(super) struct Work {
    state: Mutex<State>,
    more: Condvar,
}

impl Work {
    /// Adds items, before any thread asks for a task.
    pub(super) fn begin(&self, items: Vec<usize>) {
        self.lock().items.extend(items);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next task, of at most so many blocks; waits while there may be one.
    pub(super) fn next(&self, most: usize) -> Task {
        let mut state = self.lock();
        loop {
            if state.over {
                return Task::Over;
            }
            if let Some((part, left)) = state.blocks.front_mut() {
                let aligned = (left.start + 1).next_multiple_of(MOST_BLOCKS);
                let taken = left.start..left.end.min(aligned).min(left.start + most.max(1));
                left.start = taken.end;
                let (part, over) = (Arc::clone(part), left.start == left.end);
                if over {
                    state.blocks.pop_front();
                }
                return Task::Blocks(part, taken);
            }
            if let Some(item) = state.items.pop_front() {
                state.opening += 1;
                return Task::Open(item);
            }
            if state.opening == 0 {
                return Task::Over;
            }
            state = self.more.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A file was opened, or turned out to need nothing.
    pub(super) fn opened(&self, part: Option<&Arc<PartialFile>>) {
        let mut state = self.lock();
        state.opening -= 1;
        if let Some(part) = part {
            state.blocks.push_back((Arc::clone(part), 0..part.blocks()));
        }
        drop(state);
        self.more.notify_all();
    }

    /// Ends all work.
    pub(super) fn end(&self) {
        let mut state = self.lock();
        state.over = true;
        state.blocks.clear();
        drop(state);
        self.more.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_as_large_as_what_comes_in_a_second() {
        let after = |fetched: u64, millis: u64| {
            let mut size = RequestSize::default();
            size.learn(&Came { resumed: 0, fetched, took: Duration::from_millis(millis) });
            size.blocks()
        };
        assert_eq!(RequestSize::default().blocks() as u64 * BLOCK_BYTES, RequestSize::FIRST_BYTES);
        assert_eq!(after(1 << 20, 10), MOST_BLOCKS);
        assert_eq!(after(1 << 20, 1000), 2);
        assert_eq!(after(8 << 20, 2000), 8);
        assert_eq!((after(1 << 20, 60_000), after(1 << 20, 0)), (1, MOST_BLOCKS));
        // Nothing came over the network, so nothing is known.
        assert_eq!(after(0, 5), 2);
    }
}
