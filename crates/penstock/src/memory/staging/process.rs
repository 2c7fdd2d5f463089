//! The arenas of the process, told apart by buffer size, kind of device and memory node.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use super::chunk::ArenaSpec;
use super::{Arena, ArenaUse, Pinning, lock};
use crate::memory::headroom::Observer;
use crate::memory::{Backing, PAGE, PerProcess, numa};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    buffer_bytes: usize,
    family: &'static str,
    node: Option<u32>,
}

type Arenas = Mutex<HashMap<Key, Arc<Arena>>>;

static ARENAS: PerProcess<Arenas> = PerProcess::new();

fn process() -> &'static Arenas {
    ARENAS.get_or_init(Mutex::default)
}

/// The process's arena for buffers of `buffer_bytes` and the device that `pinning` speaks for.
pub(super) fn arena(buffer_bytes: usize, pinning: Arc<dyn Pinning>) -> Arc<Arena> {
    let root = Path::new("/");
    let node = numa::choose(root, pinning.numa_node());
    // More than can be addressed: reserving it fails.
    let buffer_bytes = buffer_bytes.max(1).checked_next_multiple_of(PAGE).unwrap_or(usize::MAX / PAGE * PAGE);
    let key = Key { buffer_bytes, family: pinning.family(), node };
    find_or_make(&mut lock(process()), key, pinning)
}

fn find_or_make(arenas: &mut HashMap<Key, Arc<Arena>>, key: Key, pinning: Arc<dyn Pinning>) -> Arc<Arena> {
    let make = || {
        let spec = ArenaSpec { pinning: Some(pinning), node: key.node, backing: Backing::Anonymous };
        let observer = Observer::new(Path::new("/"));
        Arc::new(Arena::new(key.buffer_bytes, spec, Box::new(move || observer.look())))
    };
    Arc::clone(arenas.entry(key).or_insert_with(make))
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
    fn an_arena_is_shared_by_buffers_of_one_size_one_kind_of_device_and_one_node() {
        let mut arenas = HashMap::new();
        let mut find = |buffer_bytes, family, node| {
            find_or_make(&mut arenas, Key { buffer_bytes, family, node }, Arc::new(Plugged(family)))
        };
        let first = find(PAGE, "a", Some(0));
        assert!(Arc::ptr_eq(&first, &find(PAGE, "a", Some(0))));
        for other in [(2 * PAGE, "a", Some(0)), (PAGE, "b", Some(0)), (PAGE, "a", Some(1)), (PAGE, "a", None)]
        {
            assert!(!Arc::ptr_eq(&first, &find(other.0, other.1, other.2)), "{other:?}");
        }
    }

    #[test]
    fn buffers_are_whole_pages_and_the_process_has_one_arena_for_them() {
        let one = arena(123 * PAGE, Arc::new(Plugged("whole pages")));
        assert!(Arc::ptr_eq(&one, &arena(123 * PAGE - 1, Arc::new(Plugged("whole pages")))));
        assert_eq!(one.buffer_bytes(), 123 * PAGE);
    }
}
