//! Pinning that is refused, memory that is short, memory that is given back.

use std::sync::atomic::Ordering::SeqCst;

use super::{Bench, all, in_child, pages};
use crate::memory::PAGE;

#[test]
fn releasing_frees_and_unregisters_only_buffers_that_nobody_holds() {
    let bench = Bench::new();
    let load = bench.load(8, 8);
    let mut held = all(&load);
    assert_eq!(bench.pinning.registered(), 8);
    held.truncate(1);
    assert_eq!(bench.release(), 7 * PAGE);
    assert_eq!((bench.pinning.registered(), bench.buffers()), (1, 1));
    held.clear();
    assert_eq!((bench.release(), bench.buffers(), bench.pinning.registered()), (PAGE, 0, 0));
    assert!(load.try_acquire().unwrap().is_some());
}

#[test]
fn releasing_gives_the_memory_back_to_the_system() {
    in_child(|| {
        let bench = Bench::of(2 << 20);
        let before = pages(1) * PAGE as u64;
        drop(all(&bench.load(16, 16)));
        let full = pages(1) * PAGE as u64;
        // The kernel counts resident pages for each processor and sums them up now and then: give or take a mebibyte.
        assert!(full >= before + (31 << 20), "buffers are touched before they are handed out");
        assert_eq!(bench.release(), 32 << 20);
        assert!(pages(1) * PAGE as u64 <= full - (31 << 20));
    });
}

#[test]
fn memory_that_cannot_be_pinned_is_used_and_the_next_load_tries_again() {
    let bench = Bench::new();
    bench.pinning.refuse.store(true, SeqCst);
    let load = bench.load(8, 8);
    let mut held = all(&load);
    held[7].window().write(0, &[1; PAGE]);
    assert_eq!(bench.pinning.tried.load(SeqCst), 1, "one load tries once");
    assert!(bench.arena.usage().unpinned_because.unwrap().contains("RLIMIT_MEMLOCK"));
    assert!(load.notes()[0].contains("not pinned") && load.notes().len() == 1);
    drop((held, load));
    bench.pinning.refuse.store(false, SeqCst);
    let load = bench.load(8, 8);
    let _held = all(&load);
    assert_eq!((bench.pinning.registered(), load.notes()), (8, vec![]));
    assert_eq!(bench.arena.usage().unpinned_because, None);
}

#[test]
fn pinned_buffers_stay_where_later_ones_were_refused() {
    let bench = Bench::new();
    let load = bench.load(12, 12);
    let first = load.try_acquire();
    bench.pinning.refuse.store(true, SeqCst);
    drop((all(&load), first));
    assert_eq!(bench.buffers(), 12);
    drop(load);
    assert_eq!((bench.buffers(), bench.pinning.registered()), (1, 1));
}

#[test]
fn an_arena_takes_no_more_than_a_quarter_of_what_is_to_spare_and_says_so() {
    let bench = Bench::new();
    bench.spare_buffers.store(40, SeqCst);
    let load = bench.load(100, 64);
    assert_eq!(all(&load).len(), 10);
    let notes = load.notes();
    assert!(
        notes.len() == 1
            && notes[0].contains("of the 0.2 MiB")
            && notes[0].ends_with("0 MiB were left in the test"),
        "{notes:?}"
    );
    drop(load);
    // What it holds counts as its own: the next load gets the same.
    bench.spare_buffers.store(30, SeqCst);
    assert_eq!(all(&bench.load(100, 64)).len(), 10);
    let unhindered = bench.load(100, 8);
    drop(all(&unhindered));
    assert_eq!(unhindered.notes(), Vec::<String>::new(), "a load that has all it can use was not cut");
}

#[test]
fn a_load_gets_two_buffers_however_little_there_is_and_one_where_the_budget_says_so() {
    for (budget, buffers) in [(100, 2), (2, 2), (1, 1)] {
        let bench = Bench::new();
        bench.spare_buffers.store(0, SeqCst);
        assert_eq!(all(&bench.load(budget, 64)).len(), buffers);
    }
}

#[test]
fn the_last_load_to_end_gives_everything_back_while_memory_is_tight() {
    for (spare, kept) in [(1000, 8), (24, 8), (23, 0)] {
        let bench = Bench::new();
        let (load, other) = (bench.load(8, 8), bench.load(8, 8));
        drop(all(&load));
        bench.spare_buffers.store(spare, SeqCst);
        drop(load);
        assert_eq!(bench.buffers(), 8, "another load is running");
        drop(other);
        assert_eq!(bench.buffers(), kept, "{spare} buffers to spare");
    }
}
