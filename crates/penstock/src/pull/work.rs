//! Who does what next: files are opened one after the other, so that the blocks of few files are under way at a time, and
//! every thread that has nothing to fetch opens the next.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::part::Part;

/// What a thread is to do.
pub(super) enum Task {
    /// Open the item of that number.
    Open(usize),
    /// Bring in that block.
    Block(Arc<Part>, usize),
    /// Nothing is left.
    Over,
}

#[derive(Default)]
struct State {
    items: VecDeque<usize>,
    blocks: VecDeque<(Arc<Part>, usize)>,
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
    pub(super) fn of(items: impl IntoIterator<Item = usize>) -> Self {
        let state = State { items: items.into_iter().collect(), ..State::default() };
        Self { state: Mutex::new(state), more: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next task; waits while there may be one.
    pub(super) fn next(&self) -> Task {
        let mut state = self.lock();
        loop {
            if state.over {
                return Task::Over;
            }
            if let Some((part, block)) = state.blocks.pop_front() {
                return Task::Block(part, block);
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
    pub(super) fn opened(&self, part: Option<&Arc<Part>>) {
        let mut state = self.lock();
        state.opening -= 1;
        if let Some(part) = part {
            state.blocks.extend((0..part.blocks()).map(|block| (Arc::clone(part), block)));
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
