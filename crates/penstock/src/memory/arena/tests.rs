//! What an arena promises: its bounds, its slots, what it does where memory or pinning is short, and after `fork`.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::chunk::Site;
use super::{Arena, Lease, Pinning, Slot, lock};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::headroom::Headroom;
use crate::memory::{Backing, PAGE};

/// Counts registrations, and refuses them or waits when told to.
#[derive(Default)]
struct Counting {
    refuse: AtomicBool,
    panic: AtomicBool,
    shut: AtomicBool,
    tried: AtomicUsize,
    registered: Mutex<HashSet<usize>>,
}

impl Counting {
    fn registered(&self) -> usize {
        lock(&self.registered).len()
    }
}

impl Pinning for Counting {
    fn family(&self) -> &'static str {
        "counting"
    }
    unsafe fn register(&self, ptr: *mut u8, _len: usize) -> Result<()> {
        self.tried.fetch_add(1, SeqCst);
        while self.shut.load(SeqCst) {
            std::thread::yield_now();
        }
        assert!(!self.panic.load(SeqCst), "a driver that panics");
        if self.refuse.load(SeqCst) {
            return Err(Error::new(ErrorKind::Memory, "RLIMIT_MEMLOCK"));
        }
        assert!(lock(&self.registered).insert(ptr as usize), "registered twice");
        Ok(())
    }
    unsafe fn unregister(&self, ptr: *mut u8) {
        assert!(lock(&self.registered).remove(&(ptr as usize)), "unregistered but not registered");
    }
}

/// An arena of slots of one page in chunks of four, and what its memory meets.
struct Bench {
    arena: Arc<Arena>,
    pinning: Arc<Counting>,
    spare_slots: Arc<AtomicU64>,
    pressure: Arc<AtomicU64>,
}

impl Bench {
    fn new() -> Self {
        Self::of(PAGE, 4)
    }

    fn of(slot_bytes: usize, chunk_slots: usize) -> Self {
        let pinning = Arc::new(Counting::default());
        let (spare_slots, pressure) = (Arc::new(AtomicU64::new(1 << 30)), Arc::new(AtomicU64::new(0)));
        let site =
            Site { pinning: Some(Arc::clone(&pinning) as _), node: Some(0), backing: Backing::Anonymous };
        let (spare, waits) = (Arc::clone(&spare_slots), Arc::clone(&pressure));
        let watch = Box::new(move || {
            Some(Headroom {
                bytes: spare.load(SeqCst).saturating_mul(slot_bytes as u64),
                bound: "the test".to_owned(),
                pressure: waits.load(SeqCst) as f64,
            })
        });
        let arena = Arc::new(Arena::new(slot_bytes, site, watch).with_chunks_of(chunk_slots));
        Self { arena, pinning, spare_slots, pressure }
    }

    /// A load that can use `wanted` slots of a budget of `budget` slots.
    fn load(&self, budget: usize, wanted: usize) -> Lease {
        Lease::of(Arc::clone(&self.arena), budget * self.arena.slot_bytes(), wanted)
    }

    fn slots(&self) -> usize {
        self.arena.usage().slots
    }

    fn release(&self) -> usize {
        self.arena.give_back(0, |_| true)
    }
}

/// All that the load gets.
fn all(load: &Lease) -> Vec<Slot> {
    std::iter::from_fn(|| load.try_acquire().unwrap()).collect()
}

/// Runs `body` in a forked child, in which nothing else runs.
#[track_caller]
fn in_child(body: impl FnOnce()) {
    // SAFETY: the child runs `body`, which takes no lock that another thread may hold, and ends without returning.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    let (began, mut status) = (Instant::now(), 0);
    // SAFETY: writes one int.
    while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
        if began.elapsed() > Duration::from_secs(30) {
            // SAFETY: our own child.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(status, 0, "the child failed");
}

/// Pages of this process: those mapped (0) or those in memory (1).
fn pages(which: usize) -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(which).unwrap().parse().unwrap()
}

// Slots and bounds

#[test]
fn the_budget_bounds_the_slots_and_dropped_ones_are_reused() {
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
fn a_budget_below_one_slot_still_allows_one() {
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
fn readers_that_come_together_make_no_more_chunks_than_they_need() {
    let bench = Bench::new();
    let load = bench.load(1000, 64);
    bench.pinning.shut.store(true, SeqCst);
    let held: Vec<Slot> = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..16).map(|_| scope.spawn(|| load.try_acquire().unwrap().unwrap())).collect();
        while bench.arena.growing() != (4, 12) {
            std::thread::yield_now();
        }
        bench.pinning.shut.store(false, SeqCst);
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    assert_eq!((bench.slots(), bench.pinning.registered()), (16, 4));
    assert_eq!(held.iter().map(Slot::as_ptr).collect::<HashSet<_>>().len(), 16);
}

#[test]
fn a_driver_that_panics_keeps_nobody_waiting() {
    let bench = Bench::new();
    let load = bench.load(8, 8);
    bench.pinning.panic.store(true, SeqCst);
    bench.pinning.shut.store(true, SeqCst);
    std::thread::scope(|scope| {
        let maker = scope.spawn(|| load.try_acquire().map(drop));
        while bench.arena.growing() != (1, 0) {
            std::thread::yield_now();
        }
        let waiting = scope.spawn(|| load.try_acquire().unwrap().unwrap());
        while bench.arena.growing() != (1, 1) {
            std::thread::yield_now();
        }
        // Only the one that is in the driver already panics.
        bench.pinning.shut.store(false, SeqCst);
        assert!(maker.join().is_err());
        bench.pinning.panic.store(false, SeqCst);
        drop(waiting.join());
    });
    assert_eq!(all(&load).len(), 8);
}

#[test]
fn a_load_with_a_smaller_budget_brings_an_idle_arena_down_to_it() {
    let bench = Bench::new();
    drop(all(&bench.load(16, 16)));
    assert_eq!(bench.slots(), 16);
    let running = bench.load(16, 16);
    let _other = bench.load(4, 4);
    assert_eq!(bench.slots(), 16, "another load may be using them");
    drop(running);
    drop(_other);
    let small = bench.load(5, 16);
    assert_eq!((bench.slots(), all(&small).len()), (4, 5));
}

#[test]
fn the_first_memory_that_cannot_be_had_is_an_error() {
    let load = Bench::of(1 << 47, 1).load(1, 1);
    assert_eq!(load.try_acquire().err().unwrap().kind(), ErrorKind::Memory);
    assert_eq!(load.usage().slots, 0);
}

#[test]
fn memory_that_cannot_be_had_later_ends_the_growth_and_not_the_load() {
    in_child(|| {
        let bench = Bench::of(1 << 20, 4);
        let load = bench.load(100, 100);
        let held = load.try_acquire().unwrap();
        // Two MiB more than there are: too little for a chunk, enough for everything else.
        let limit =
            libc::rlimit { rlim_cur: pages(0) * PAGE as u64 + (2 << 20), rlim_max: libc::RLIM_INFINITY };
        // SAFETY: reads one structure.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
        let more = all(&load);
        assert!(held.is_some() && more.len() == 3, "{}", more.len());
        assert!(load.notes()[0].contains("4.0 MiB of the 100.0 MiB"), "{:?}", load.notes());
        assert!(load.notes()[0].contains("host memory failed"), "{:?}", load.notes());
    });
}

// Giving back

#[test]
fn releasing_frees_and_unregisters_only_chunks_that_nobody_holds() {
    let bench = Bench::new();
    let load = bench.load(8, 8);
    let mut held = all(&load);
    assert_eq!(bench.pinning.registered(), 2);
    held.truncate(1);
    assert_eq!(bench.release(), 4 * PAGE);
    assert_eq!((bench.pinning.registered(), bench.slots()), (1, 4));
    held.clear();
    assert_eq!((bench.release(), bench.slots(), bench.pinning.registered()), (4 * PAGE, 0, 0));
    assert!(load.try_acquire().unwrap().is_some());
}

#[test]
fn releasing_gives_the_memory_back_to_the_system() {
    in_child(|| {
        let bench = Bench::of(2 << 20, 4);
        let before = pages(1) * PAGE as u64;
        drop(all(&bench.load(16, 16)));
        let full = pages(1) * PAGE as u64;
        assert!(full >= before + (32 << 20), "slots are touched before they are handed out");
        assert_eq!(bench.release(), 32 << 20);
        assert!(pages(1) * PAGE as u64 <= full - (32 << 20));
    });
}

// Pinning

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
    assert_eq!((bench.pinning.registered(), load.notes()), (2, vec![]));
    assert_eq!(bench.arena.usage().unpinned_because, None);
}

#[test]
fn pinned_chunks_stay_where_later_ones_were_refused() {
    let bench = Bench::new();
    let load = bench.load(12, 12);
    let first = load.try_acquire();
    bench.pinning.refuse.store(true, SeqCst);
    drop((all(&load), first));
    assert_eq!(bench.slots(), 12);
    drop(load);
    assert_eq!((bench.slots(), bench.pinning.registered()), (4, 1));
}

// Memory that is short

#[test]
fn an_arena_takes_no_more_than_a_quarter_of_what_is_to_spare_and_says_so() {
    let bench = Bench::new();
    bench.spare_slots.store(40, SeqCst);
    let load = bench.load(100, 64);
    assert_eq!(all(&load).len(), 10);
    let notes = load.notes();
    assert!(
        notes.len() == 1 && notes[0].contains("of the 0.2 MiB") && notes[0].contains("the test"),
        "{notes:?}"
    );
    drop(load);
    // What it holds counts as its own: the next load gets the same.
    bench.spare_slots.store(30, SeqCst);
    assert_eq!(all(&bench.load(100, 64)).len(), 10);
    let unhindered = bench.load(100, 8);
    drop(all(&unhindered));
    assert_eq!(unhindered.notes(), Vec::<String>::new(), "a load that has all it can use was not cut");
}

#[test]
fn a_load_gets_two_slots_however_little_there_is_and_one_where_the_budget_says_so() {
    for (budget, slots) in [(100, 2), (2, 2), (1, 1)] {
        let bench = Bench::new();
        bench.spare_slots.store(0, SeqCst);
        assert_eq!(all(&bench.load(budget, 64)).len(), slots);
    }
}

#[test]
fn memory_that_runs_short_while_the_arena_grows_ends_the_growth() {
    let bench = Bench::of(1 << 20, 4);
    bench.spare_slots.store(400, SeqCst);
    let load = bench.load(100, 100);
    let held: Vec<_> = (0..8).map(|_| load.try_acquire().unwrap().unwrap()).collect();
    bench.spare_slots.store(0, SeqCst);
    let more = all(&load);
    assert_eq!(held.len() + more.len(), 32, "it looks every 32 MiB");
    assert_eq!(load.notes().len(), 1);
}

#[test]
fn the_last_load_to_end_gives_everything_back_while_memory_is_tight() {
    for (spare, pressure, kept) in [(1000, 0, 8), (24, 0, 8), (23, 0, 0), (1000, 9, 8), (1000, 10, 0)] {
        let bench = Bench::new();
        let (load, other) = (bench.load(8, 8), bench.load(8, 8));
        drop(all(&load));
        bench.spare_slots.store(spare, SeqCst);
        bench.pressure.store(pressure, SeqCst);
        drop(load);
        assert_eq!(bench.slots(), 8, "another load is running");
        drop(other);
        assert_eq!(bench.slots(), kept, "{spare} slots to spare, {pressure} % waiting");
    }
}

// Children

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
    let _held_by_a_thread_that_the_child_lacks = bench.arena.hold();
    in_child(|| drop(of_parent.take()));
    drop(_held_by_a_thread_that_the_child_lacks);
    assert_eq!(bench.arena.usage().slots_taken, 8, "the child gave its parent's slots back");
}

#[test]
fn a_forked_child_has_neither_the_memory_nor_the_registration() {
    let bench = Bench::new();
    let pinning = Arc::clone(&bench.pinning);
    let load = bench.load(8, 8);
    let slot = load.try_acquire().unwrap().unwrap();
    let address = slot.as_ptr();
    in_child(move || {
        assert!(!is_mapped(address), "the child inherits the slot's memory");
        // Something of the child's takes the addresses over.
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
        // SAFETY: not mapped, as just seen.
        assert_eq!(unsafe { libc::mmap(address.cast(), PAGE, access, kind, -1, 0) }, address.cast());
        let registered = Arc::clone(&bench.pinning);
        drop((slot, load, bench));
        assert_eq!(registered.registered(), 1, "the child unregistered its parent's memory");
        assert!(is_mapped(address), "the child unmapped what is its own");
    });
    // Here, the same were dropped as well.
    assert_eq!(pinning.registered(), 0);
    assert!(!is_mapped(address));
}

// Any sequence

#[derive(Debug, Clone)]
enum Step {
    Begin { budget: usize, wanted: usize },
    End,
    Acquire,
    Drop(usize),
    Release,
    Spare(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0..20usize, 0..20usize).prop_map(|(budget, wanted)| Step::Begin { budget, wanted }),
        1 => Just(Step::End),
        8 => Just(Step::Acquire),
        5 => any::<usize>().prop_map(Step::Drop),
        1 => Just(Step::Release),
        1 => prop_oneof![Just(1 << 30), 0..100u64].prop_map(Step::Spare),
    ]
}

/// The most slots that these steps allow for.
fn largest_budget(steps: &[Step]) -> usize {
    let budget = |step: &Step| if let Step::Begin { budget, .. } = step { *budget } else { 0 };
    steps.iter().map(budget).max().unwrap_or(0).max(1)
}

/// One user of an arena: at most one load, and its slots, each filled with a mark of its own.
struct User<'a> {
    bench: &'a Bench,
    mark: u8,
    load: Option<Lease>,
    held: Vec<Slot>,
}

impl User<'_> {
    fn take(&mut self, step: &Step) {
        match step {
            Step::Begin { budget, wanted } => {
                self.take(&Step::End);
                self.load = Some(self.bench.load(*budget, *wanted));
            }
            Step::End => {
                while !self.held.is_empty() {
                    self.take(&Step::Drop(0));
                }
                self.load = None;
            }
            Step::Acquire => {
                if let Some(mut slot) = self.load.as_ref().and_then(|load| load.try_acquire().unwrap()) {
                    slot.window().write(0, &[self.mark; PAGE]);
                    self.held.push(slot);
                }
            }
            Step::Drop(which) if !self.held.is_empty() => {
                let mut slot = self.held.swap_remove(which % self.held.len());
                let window = slot.window();
                // SAFETY: written in full when it was acquired.
                let bytes = unsafe { window.assume_filled(0, PAGE) };
                assert!(bytes.iter().all(|byte| *byte == self.mark), "someone else wrote to this slot");
            }
            Step::Drop(_) => {}
            Step::Release => {
                self.bench.release();
            }
            Step::Spare(slots) => self.bench.spare_slots.store(*slots, SeqCst),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn one_user_s_slots_are_counted_exactly_and_given_whenever_there_is_room(
        steps in proptest::collection::vec(step(), 0..60)
    ) {
        let bench = Bench::new();
        let mut user = User { bench: &bench, mark: 1, load: None, held: Vec::new() };
        let (mut budget, mut wanted, mut always_rich) = (1, 1, true);
        for step in &steps {
            let before = (bench.slots(), user.held.len());
            user.take(step);
            let (slots, held) = (bench.slots(), user.held.len());
            prop_assert_eq!(bench.arena.usage().slots_taken, held);
            let chunks = bench.pinning.registered();
            prop_assert!(held <= slots && slots <= 4 * chunks, "{} slots in {} chunks", slots, chunks);
            match step {
                Step::Begin { budget: b, wanted: w } => {
                    (budget, wanted) = ((*b).max(1), (*w).max(1));
                    prop_assert!(slots <= budget.max(before.0));
                    prop_assert!(slots <= budget, "an idle arena is brought down to the budget");
                }
                Step::Acquire if user.load.is_some() => {
                    let room = before.0 > before.1 || before.0 < budget.min(wanted);
                    let got = held > before.1;
                    prop_assert!(!got || room, "a slot beyond the budget");
                    prop_assert!(got || !room || !always_rich, "no slot although there was room");
                    prop_assert!(got || held >= 2.min(budget).min(wanted), "fewer than a load needs to move");
                    prop_assert!(slots <= before.0.max(budget.min(wanted)));
                }
                Step::Spare(spare) => always_rich &= *spare > 1000,
                Step::Release => prop_assert!(slots <= 4 * held),
                _ => {}
            }
        }
        drop(user);
        bench.release();
        prop_assert_eq!((bench.slots(), bench.pinning.registered()), (0, 0));
    }

    #[test]
    fn several_users_never_share_a_slot_never_lose_one_and_stay_within_the_largest_budget(
        steps in proptest::collection::vec(proptest::collection::vec(step(), 0..40), 2..5)
    ) {
        let bench = Bench::new();
        let most = steps.iter().map(|steps| largest_budget(steps)).max().unwrap_or(1);
        std::thread::scope(|scope| {
            for (user, steps) in steps.iter().enumerate() {
                let mark = u8::try_from(user).unwrap() + 1;
                let mut user = User { bench: &bench, mark, load: None, held: Vec::new() };
                scope.spawn(move || {
                    for step in steps {
                        user.take(step);
                        let usage = user.bench.arena.usage();
                        assert!(usage.slots <= most, "{} slots, {most} allowed", usage.slots);
                        assert!(user.held.len() <= usage.slots_taken && usage.slots_taken <= usage.slots);
                    }
                    user.take(&Step::End);
                });
            }
        });
        let slots = bench.slots();
        prop_assert_eq!((bench.arena.usage().slots_taken, bench.arena.growing()), (0, (0, 0)));
        let load = bench.load(slots, slots);
        prop_assert_eq!(all(&load).len(), slots.max(1), "every slot that exists can be had");
        drop(load);
        bench.release();
        prop_assert_eq!((bench.slots(), bench.pinning.registered()), (0, 0));
    }
}
