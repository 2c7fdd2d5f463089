//! How an arena grows: how far it may, what a chunk costs it, and when it looks at the memory that is left.

use super::chunk::{Chunk, SlotAddress};
use super::lease::Terms;
use super::pool::State;
use super::{Arena, lock};
use crate::error::Result;
use crate::memory::headroom::Headroom;

/// Slots that a load may have however little memory there is: one is filled while the other is copied.
const MINIMUM: usize = 2;
/// One part in this many of what could be spared is the arena's at most.
const SHARE: u64 = 4;
/// Memory is tight when threads wait for it this share of the time, in per cent.
const TIGHT: f64 = 10.0;
/// Bytes that are made between two looks at what there is to spare.
pub(super) const LOOK_EVERY: usize = 32 << 20;

impl Arena {
    /// How many slots may be made in one piece now.
    pub(super) fn room(&self, state: &State, terms: &Terms) -> usize {
        let useful = terms.budget.min(state.wanted);
        let affordable = state.ceiling.max(MINIMUM);
        if state.slots >= affordable && affordable < useful {
            let mib = |slots: usize| (slots * self.slot_bytes) as f64 / f64::from(1 << 20);
            terms.cut(|| {
                format!(
                    "staging memory was held to {:.1} MiB of the {:.1} MiB that this load could use: {}",
                    mib(state.slots),
                    mib(useful),
                    state.bound
                )
            });
        }
        useful.min(affordable).saturating_sub(state.slots).min(self.chunk_slots)
    }

    /// Touching and registering take milliseconds, so this is called without the lock.
    pub(super) fn grow(&self, growth: Growth<'_>, terms: &Terms) -> Result<Option<SlotAddress>> {
        match Chunk::make(&self.site, growth.slots, self.slot_bytes, terms.refusal()) {
            Ok(chunk) => {
                if let Some(because) = chunk.unpinned_because() {
                    terms.refuse(because);
                }
                let mut state = lock(&self.state);
                state.free.extend(chunk.addresses());
                state.chunks.push(chunk);
                let first = state.free.pop();
                state.taken += usize::from(first.is_some());
                growth.end(&mut state);
                Ok(first)
            }
            Err(error) => {
                drop(growth);
                let mut state = lock(&self.state);
                if state.slots == 0 {
                    return Err(error);
                }
                // The slots that there are will do.
                state.ceiling = state.slots;
                state.bound = error.to_string();
                let _ = self.room(&state, terms);
                Ok(None)
            }
        }
    }

    /// Looks how much memory there is; whether there is enough for the slots that exist and are being made.
    pub(super) fn look(&self) -> bool {
        let headroom = (self.watch)();
        let mut state = lock(&self.state);
        state.unlooked = 0;
        state.ceiling = usize::MAX;
        if let Some(headroom) = headroom {
            let held = ((state.slots - state.making) * self.slot_bytes) as u64;
            let slots = share(&headroom, held) / self.slot_bytes as u64;
            state.ceiling = usize::try_from(slots).unwrap_or(usize::MAX);
            let mib = headroom.bytes as f64 / f64::from(1 << 20);
            state.bound = format!("{mib:.0} MiB were left {}", headroom.bound);
        }
        state.slots <= state.ceiling.max(MINIMUM)
    }

    pub(super) fn is_tight(&self) -> bool {
        let held = (lock(&self.state).slots * self.slot_bytes) as u64;
        (self.watch)().is_some_and(|headroom| held > share(&headroom, held) || headroom.pressure >= TIGHT)
    }
}

/// The arena's share of what could be spared if it held nothing.
fn share(headroom: &Headroom, held: u64) -> u64 {
    headroom.bytes.saturating_add(held) / SHARE
}

/// Slots being made: counted from the decision to its end, however that comes.
pub(super) struct Growth<'a> {
    arena: &'a Arena,
    slots: usize,
    ended: bool,
}

impl<'a> Growth<'a> {
    pub(super) fn begin(arena: &'a Arena, state: &mut State, slots: usize) -> Self {
        state.slots += slots;
        state.making += slots;
        state.makers += 1;
        Self { arena, slots, ended: false }
    }

    /// The slots exist.
    fn end(mut self, state: &mut State) {
        self.settle(state);
    }

    fn settle(&mut self, state: &mut State) {
        self.ended = true;
        state.making -= self.slots;
        state.makers -= 1;
        state.ended += 1;
        self.arena.changed.notify_all();
    }
}

impl Drop for Growth<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let arena = self.arena;
            let mut state = lock(&arena.state);
            state.slots -= self.slots;
            self.settle(&mut state);
        }
    }
}
