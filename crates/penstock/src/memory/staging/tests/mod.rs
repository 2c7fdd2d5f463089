//! What an arena promises, and what these tests share.

mod bounds;
mod children;
mod sequences;
mod shortage;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Arena, Lease, Pinning, StagingBuffer, lock};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::PAGE;
use crate::memory::headroom::Headroom;

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
        eventually("the test lets the driver go on", || !self.shut.load(SeqCst));
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

/// An arena of buffers of one page, and what its memory meets.
struct Bench {
    arena: Arc<Arena>,
    pinning: Arc<Counting>,
    spare_buffers: Arc<AtomicU64>,
}

impl Bench {
    fn new() -> Self {
        Self::of(PAGE)
    }

    fn of(buffer_bytes: usize) -> Self {
        let pinning = Arc::new(Counting::default());
        let spare_buffers = Arc::new(AtomicU64::new(1 << 30));
        let spare = Arc::clone(&spare_buffers);
        let watch = Box::new(move || {
            Some(Headroom {
                bytes: spare.load(SeqCst).saturating_mul(buffer_bytes as u64),
                bound: "in the test".to_owned(),
            })
        });
        let arena = Arc::new(Arena::new(buffer_bytes, Arc::clone(&pinning) as _, watch));
        Self { arena, pinning, spare_buffers }
    }

    /// A load that can use `wanted` buffers of a budget of `budget` buffers.
    fn load(&self, budget: usize, wanted: usize) -> Lease {
        Lease::of(Arc::clone(&self.arena), budget * self.arena.buffer_bytes, wanted)
    }

    fn buffers(&self) -> usize {
        self.arena.usage().buffers
    }

    fn release(&self) -> usize {
        self.arena.give_back(0, |_| true)
    }
}

/// All that the load gets.
fn all(load: &Lease) -> Vec<StagingBuffer> {
    std::iter::from_fn(|| load.try_acquire().unwrap()).collect()
}

#[track_caller]
fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < Duration::from_secs(30), "waited in vain: {what}");
        std::thread::yield_now();
    }
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
