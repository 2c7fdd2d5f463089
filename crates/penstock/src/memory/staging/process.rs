//! The arenas of the process, told apart by buffer size and kind of device.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use super::{Arena, ArenaUse, Pinning, lock};
use crate::memory::{PerProcess, headroom, page_bytes};

/// By the bytes of a buffer, and the kind of device.
type Arenas = HashMap<(usize, &'static str), Arc<Arena>>;

static ARENAS: PerProcess<Mutex<Arenas>> = PerProcess::new();

fn process() -> &'static Mutex<Arenas> {
    ARENAS.get_or_init(Mutex::default)
}

/// The process's arena for buffers of `buffer_bytes` and the device that `pinning` speaks for.
pub(super) fn arena(buffer_bytes: usize, pinning: Arc<dyn Pinning>) -> Arc<Arena> {
    let page = page_bytes();
    // More than can be addressed: reserving it fails.
    let bytes = buffer_bytes.max(1).checked_next_multiple_of(page).unwrap_or(usize::MAX / page * page);
    let mut arenas = lock(process());
    let arena = arenas
        .entry((bytes, pinning.family()))
        .or_insert_with(|| Arc::new(Arena::new(bytes, pinning, Box::new(|| headroom::look(Path::new("/"))))));
    Arc::clone(arena)
}

/// Frees what arenas that no load uses hold beyond `allowed` bytes together, `but` one arena's.
pub(super) fn make_room(but: &Arc<Arena>, allowed: usize) {
    let others: Vec<_> = arenas().into_iter().filter(|arena| !Arc::ptr_eq(arena, but)).collect();
    let mut held: usize = others.iter().map(|arena| arena.usage().bytes).sum();
    for arena in others {
        if held > allowed && arena.is_idle() {
            held = held.saturating_sub(arena.give_back(0, |_| true));
        }
    }
}

fn arenas() -> Vec<Arc<Arena>> {
    lock(process()).values().cloned().collect()
}

impl Arena {
    /// Frees the chunks of every arena of the process that no reader holds a buffer of; returns the bytes given back.
    pub fn release_all() -> usize {
        arenas().iter().map(|arena| arena.give_back(0, |_| true)).sum()
    }

    /// What all arenas of the process hold together.
    pub fn usage_all() -> ArenaUse {
        arenas().iter().map(|arena| arena.usage()).fold(ArenaUse::default(), |sum, one| ArenaUse {
            bytes: sum.bytes + one.bytes,
            buffers_taken: sum.buffers_taken + one.buffers_taken,
            buffers: sum.buffers + one.buffers,
            unpinned_because: sum.unpinned_because.or(one.unpinned_because),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Result;
    use crate::memory::PAGE;

    struct Plugged(&'static str);

    impl Pinning for Plugged {
        fn family(&self) -> &'static str {
            self.0
        }
        unsafe fn register(&self, _ptr: *mut u8, _len: usize) -> Result<()> {
            Ok(())
        }
        unsafe fn unregister(&self, _ptr: *mut u8) {}
    }

    #[test]
    fn an_arena_is_shared_by_buffers_of_one_size_and_one_kind_of_device() {
        let find = |pages, family| arena(pages * PAGE, Arc::new(Plugged(family)));
        let first = find(119 * 16, "a");
        assert!(Arc::ptr_eq(&first, &find(119 * 16, "a")));
        for other in [(120 * 16, "a"), (119 * 16, "b")] {
            assert!(!Arc::ptr_eq(&first, &find(other.0, other.1)), "{other:?}");
        }
    }

    #[test]
    fn buffers_are_whole_pages_and_the_process_has_one_arena_for_them() {
        let page = page_bytes();
        let one = arena(123 * page, Arc::new(Plugged("whole pages")));
        assert!(Arc::ptr_eq(&one, &arena(123 * page - 1, Arc::new(Plugged("whole pages")))));
        assert_eq!(one.buffer_bytes, 123 * page);
    }
}
