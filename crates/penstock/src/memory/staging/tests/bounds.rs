//! Buffers, the bounds of their number, and how it grows.

use std::collections::HashSet;
use std::sync::atomic::Ordering::SeqCst;

use super::{Bench, all, eventually, in_child, pages};
use crate::error::ErrorKind;
use crate::memory::{PAGE, StagingBuffer};

#[test]
fn the_budget_bounds_the_buffers_and_dropped_ones_are_reused() {
    let bench = Bench::new();
    let load = bench.load(6, 100);
    let mut held = all(&load);
    assert_eq!(held.len(), 6);
    let last = held.pop().unwrap();
    let address = last.as_ptr();
    drop(last);
    assert_eq!(load.try_acquire().unwrap().unwrap().as_ptr(), address);
    assert_eq!((bench.arena.usage().bytes, load.notes()), (6 * PAGE, vec![]));
}

#[test]
fn a_budget_below_one_buffer_still_allows_one() {
    let bench = Bench::new();
    assert_eq!(all(&bench.load(0, 0)).len(), 1);
}

#[test]
fn no_more_is_made_than_the_loads_that_run_can_use_and_a_later_load_makes_nothing() {
    let bench = Bench::new();
    let (first, second) = (bench.load(100, 6), bench.load(100, 3));
    assert_eq!(all(&first).len(), 9);
    assert_eq!(all(&second).len(), 9);
    drop((first, second));
    let made = bench.pinning.tried.load(SeqCst);
    assert_eq!(all(&bench.load(100, 9)).len(), 9);
    assert_eq!(bench.pinning.tried.load(SeqCst), made);
}

#[test]
fn readers_that_come_together_each_make_a_buffer_at_once() {
    let bench = Bench::new();
    let load = bench.load(1000, 64);
    bench.pinning.shut.store(true, SeqCst);
    let held: Vec<StagingBuffer> = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..16).map(|_| scope.spawn(|| load.try_acquire().unwrap().unwrap())).collect();
        eventually("sixteen make one", || bench.pinning.tried.load(SeqCst) == 16);
        bench.pinning.shut.store(false, SeqCst);
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    assert_eq!((bench.buffers(), bench.pinning.registered()), (16, 16));
    assert_eq!(held.iter().map(StagingBuffer::as_ptr).collect::<HashSet<_>>().len(), 16);
}

#[test]
fn a_driver_that_panics_takes_no_buffer_with_it() {
    let bench = Bench::new();
    let load = bench.load(8, 8);
    bench.pinning.panic.store(true, SeqCst);
    std::thread::scope(|scope| {
        assert!(scope.spawn(|| load.try_acquire().map(drop)).join().is_err());
    });
    bench.pinning.panic.store(false, SeqCst);
    assert_eq!(all(&load).len(), 8);
}

#[test]
fn a_load_with_a_smaller_budget_brings_an_idle_arena_down_to_it() {
    let bench = Bench::new();
    drop(all(&bench.load(16, 16)));
    assert_eq!(bench.buffers(), 16);
    let running = bench.load(16, 16);
    let _other = bench.load(4, 4);
    assert_eq!(bench.buffers(), 16, "another load may be using them");
    drop(running);
    drop(_other);
    let small = bench.load(5, 16);
    assert_eq!((bench.buffers(), all(&small).len()), (5, 5));
}

#[test]
fn the_first_memory_that_cannot_be_had_is_an_error() {
    let load = Bench::of(1 << 47).load(1, 1);
    assert_eq!(load.try_acquire().err().unwrap().kind(), ErrorKind::Memory);
    assert_eq!(load.usage().buffers, 0);
}

#[test]
fn memory_that_cannot_be_had_later_ends_the_growth_and_not_the_load() {
    in_child(|| {
        let bench = Bench::of(1 << 20);
        // A small load reserves what it can use, so that the next one needs more addresses.
        let small = bench.load(4, 4);
        let held = small.try_acquire().unwrap();
        // Two MiB more than there are: too little for all of these, enough for everything else.
        let limit =
            libc::rlimit { rlim_cur: pages(0) * PAGE as u64 + (2 << 20), rlim_max: libc::RLIM_INFINITY };
        // SAFETY: reads one structure.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
        let load = bench.load(100, 100);
        let more = all(&load);
        assert!(held.is_some() && more.len() == 3, "{}", more.len());
        assert!(load.notes()[0].contains("4.0 MiB of the 100.0 MiB"), "{:?}", load.notes());
        assert!(load.notes()[0].contains("host memory failed"), "{:?}", load.notes());
    });
}
