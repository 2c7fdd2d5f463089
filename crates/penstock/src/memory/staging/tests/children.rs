//! What a forked child has of its parent's arenas: nothing.

use std::sync::Arc;

use super::{Bench, all, in_child, lock};
use crate::memory::PAGE;

/// Whether the page at `address` is mapped.
fn is_mapped(address: *mut u8) -> bool {
    // SAFETY: only asks; private memory is never written anywhere.
    unsafe { libc::msync(address.cast(), PAGE, libc::MS_ASYNC) == 0 }
}

#[test]
fn a_forked_child_waits_for_no_lock_that_its_parent_s_threads_held() {
    let bench = Bench::new();
    let load = bench.load(8, 8);
    let of_parent = std::cell::RefCell::new(Some((all(&load), load)));
    let _held_by_a_thread_that_the_child_lacks = lock(&bench.arena.state);
    in_child(|| drop(of_parent.take()));
    drop(_held_by_a_thread_that_the_child_lacks);
    assert_eq!(bench.arena.usage().buffers_taken, 8, "the child gave its parent's buffers back");
}

#[test]
fn a_forked_child_has_neither_the_memory_nor_the_registration() {
    let bench = Bench::new();
    let pinning = Arc::clone(&bench.pinning);
    let load = bench.load(8, 8);
    let buffer = load.try_acquire().unwrap().unwrap();
    let address = buffer.as_ptr();
    in_child(move || {
        assert!(!is_mapped(address), "the child inherits the buffer's memory");
        // Something of the child's takes the addresses over.
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
        // SAFETY: not mapped, as just seen.
        assert_eq!(unsafe { libc::mmap(address.cast(), PAGE, access, kind, -1, 0) }, address.cast());
        let registered = Arc::clone(&bench.pinning);
        drop((buffer, load, bench));
        assert_eq!(registered.registered(), 1, "the child unregistered its parent's memory");
        assert!(is_mapped(address), "the child unmapped what is its own");
    });
    // Here, the same were dropped as well.
    assert_eq!(pinning.registered(), 0);
    assert!(!is_mapped(address));
}
