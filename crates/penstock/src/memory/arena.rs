//! The staging arena: slots on the way to a device, taken by readers, given back, kept for the next load.
//!
//! Memory grows a chunk at a time as readers ask, up to a budget; a chunk is anonymous huge-paged memory, touched and
//! then registered (pinned) in one piece by the reader that asked, so that many readers grow the arena in parallel and
//! no copy ever spans two registrations. When the budget is used up, [`Arena::try_acquire`] says so and the reader
//! waits for a slot of its own or for one to be given back: memory is bounded by the budget, not by the checkpoint.
//!
//! There is one arena per process, slot size and pinning. A child after `fork` starts with none: the parent's slots
//! are registered with the parent's device context, so the child forgets them without touching any lock or driver.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{PAGE, Region, Window};
use crate::error::Result;

/// Slots in a chunk.
const CHUNK_SLOTS: usize = 4;

/// How memory is made known to a device, so that copies from it are asynchronous and fast.
pub trait Pinning: Send + Sync {
    /// Which kind of device; arenas are shared by loads to devices of one kind.
    fn family(&self) -> &'static str;

    /// Registers `len` bytes at `ptr`.
    ///
    /// # Safety
    /// The memory must stay mapped until it is unregistered.
    ///
    /// # Errors
    /// `Memory` or `Device` where the driver or a limit refuses; the arena then uses the memory as it is.
    unsafe fn register(&self, ptr: *mut u8, len: usize) -> Result<()>;

    /// Undoes [`Pinning::register`]. Failures are ignored: there is nothing left to do about them.
    ///
    /// # Safety
    /// `ptr` must be registered, with no copy in flight.
    unsafe fn unregister(&self, ptr: *mut u8);
}

/// What an arena holds at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ArenaUse {
    /// Bytes of slots that exist.
    pub bytes: usize,
    /// Slots that readers hold.
    pub slots_taken: usize,
    /// Slots that exist.
    pub slots: usize,
    /// Why the memory is not pinned although a device asked for it.
    pub unpinned_because: Option<String>,
}

/// Staging slots of one size, shared by all loads of the process that use that size and kind of device.
pub struct Arena {
    slot_bytes: usize,
    budget: AtomicUsize,
    pinning: Option<Arc<dyn Pinning>>,
    state: Mutex<State>,
    given_back: Condvar,
}

#[derive(Default)]
struct State {
    chunks: Vec<Chunk>,
    /// Most recently used last: its lines are likeliest still in the processor's cache.
    free: Vec<SlotAddress>,
    /// Slots that exist or are being made.
    slots: usize,
    unpinned_because: Option<String>,
}

struct Chunk {
    region: Region,
    registered: bool,
}

#[derive(Clone, Copy, PartialEq)]
struct SlotAddress(NonNull<u8>);

// SAFETY: the address of arena memory; only the one `Slot` made from it touches the bytes.
unsafe impl Send for SlotAddress {}

/// The arenas of one process, told apart by slot size and kind of device.
struct Process {
    pid: u32,
    arenas: Mutex<HashMap<(usize, &'static str), Arc<Arena>>>,
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());

fn process() -> &'static Process {
    let current = PROCESS.load(Ordering::Acquire);
    let pid = std::process::id();
    // SAFETY: either null or a `Process` leaked below, which is never freed.
    if let Some(process) = unsafe { current.as_ref() }.filter(|process| process.pid == pid) {
        return process;
    }
    // First use in this process, or in a child: whatever the parent had is left alone, locks included.
    let fresh = Box::into_raw(Box::new(Process { pid, arenas: Mutex::default() }));
    match PROCESS.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: leaked above and now published; never freed.
        Ok(_) => unsafe { &*fresh },
        Err(winner) => {
            // SAFETY: `fresh` was not published, so this is its only owner; `winner` was published by another thread
            // of this process and is never freed.
            unsafe {
                drop(Box::from_raw(fresh));
                &*winner
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while the lock was held leaves counts that are still true: every update is a single step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Arena {
    /// The process's arena for slots of `slot_bytes` (rounded up to whole pages), with `budget` bytes from now on.
    pub fn shared(slot_bytes: usize, budget: usize, pinning: Option<Arc<dyn Pinning>>) -> Arc<Self> {
        let slot_bytes = slot_bytes.next_multiple_of(PAGE);
        let family = pinning.as_ref().map_or("host", |pinning| pinning.family());
        let arena = Arc::clone(
            lock(&process().arenas)
                .entry((slot_bytes, family))
                .or_insert_with(|| Arc::new(Self::new(slot_bytes, budget, pinning))),
        );
        arena.budget.store(budget, Ordering::Relaxed);
        arena
    }

    fn new(slot_bytes: usize, budget: usize, pinning: Option<Arc<dyn Pinning>>) -> Self {
        Self {
            slot_bytes,
            budget: AtomicUsize::new(budget),
            pinning,
            state: Mutex::default(),
            given_back: Condvar::new(),
        }
    }

    /// Frees the chunks of every arena of the process that no reader holds a slot of; returns the bytes given back.
    pub fn release_all() -> usize {
        let arenas: Vec<_> = lock(&process().arenas).values().cloned().collect();
        arenas.iter().map(|arena| arena.release()).sum()
    }

    /// What all arenas of the process hold together.
    pub fn usage_all() -> ArenaUse {
        let arenas: Vec<_> = lock(&process().arenas).values().cloned().collect();
        arenas.iter().map(|arena| arena.usage()).fold(ArenaUse::default(), |sum, one| ArenaUse {
            bytes: sum.bytes + one.bytes,
            slots_taken: sum.slots_taken + one.slots_taken,
            slots: sum.slots + one.slots,
            unpinned_because: sum.unpinned_because.or(one.unpinned_because),
        })
    }

    /// What this arena holds.
    pub fn usage(&self) -> ArenaUse {
        let state = lock(&self.state);
        ArenaUse {
            bytes: state.slots * self.slot_bytes,
            slots_taken: state.slots - state.free.len(),
            slots: state.slots,
            unpinned_because: state.unpinned_because.clone(),
        }
    }

    /// A slot, if one is free or the budget allows for more. The first slot of an arena is always allowed.
    ///
    /// # Errors
    /// `Memory` where the operating system refuses the reservation.
    pub fn try_acquire(self: &Arc<Self>) -> Result<Option<Slot>> {
        let grow = {
            let mut state = lock(&self.state);
            if let Some(address) = state.free.pop() {
                return Ok(Some(self.slot(address)));
            }
            let allowed = self.budget.load(Ordering::Relaxed) / self.slot_bytes;
            let grow = allowed.saturating_sub(state.slots).min(CHUNK_SLOTS);
            let grow = if state.slots == 0 { grow.max(1) } else { grow };
            state.slots += grow;
            grow
        };
        if grow == 0 {
            return Ok(None);
        }
        // Touching and registering take milliseconds, so they happen outside of the lock.
        let made = self.make_chunk(grow);
        let mut state = lock(&self.state);
        let (chunk, unpinned_because) = match made {
            Ok(made) => made,
            Err(error) => {
                state.slots -= grow;
                return Err(error);
            }
        };
        if state.unpinned_because.is_none() {
            state.unpinned_because = unpinned_because;
        }
        let slots = (0..grow).filter_map(|i| {
            // SAFETY: `grow` slots of `slot_bytes` lie in the chunk's region.
            let address = unsafe { chunk.region.as_ptr().add(i * self.slot_bytes) };
            NonNull::new(address).map(SlotAddress)
        });
        state.free.extend(slots);
        state.chunks.push(chunk);
        let first = state.free.pop();
        drop(state);
        self.given_back.notify_all();
        Ok(first.map(|address| self.slot(address)))
    }

    /// Waits at most `timeout` for a slot to be given back. Whether one was is for [`Arena::try_acquire`] to say.
    pub fn wait(&self, timeout: Duration) {
        let state = lock(&self.state);
        if state.free.is_empty() {
            drop(self.given_back.wait_timeout(state, timeout));
        }
    }

    fn slot(self: &Arc<Self>, address: SlotAddress) -> Slot {
        Slot { address, arena: Arc::clone(self) }
    }

    fn make_chunk(&self, slots: usize) -> Result<(Chunk, Option<String>)> {
        let region = Region::reserve(slots * self.slot_bytes)?;
        for start in (0..region.len()).step_by(PAGE) {
            // SAFETY: inside the region just made, which nothing else knows of. Volatile, so that the touch happens.
            unsafe { region.as_ptr().add(start).write_volatile(0) };
        }
        let mut unpinned_because = None;
        let registered = match &self.pinning {
            None => false,
            // SAFETY: the chunk unregisters in `Drop`-order before its region is unmapped (see `release`), or the
            // process ends first.
            Some(pinning) => match unsafe { pinning.register(region.as_ptr(), region.len()) } {
                Ok(()) => true,
                Err(error) => {
                    tracing::warn!(%error, "staging memory could not be pinned; copies will be slower");
                    unpinned_because = Some(error.to_string());
                    false
                }
            },
        };
        Ok((Chunk { region, registered }, unpinned_because))
    }

    /// Frees the chunks of which every slot is free; returns the bytes given back.
    fn release(&self) -> usize {
        let mut state = lock(&self.state);
        let chunks = std::mem::take(&mut state.chunks);
        let mut freed = 0;
        for chunk in chunks {
            let start = chunk.region.as_ptr() as usize;
            let inside = |slot: &SlotAddress| {
                (start..start + chunk.region.len()).contains(&(slot.0.as_ptr() as usize))
            };
            let slots = chunk.region.len() / self.slot_bytes;
            if state.free.iter().filter(|slot| inside(slot)).count() < slots {
                state.chunks.push(chunk);
                continue;
            }
            state.free.retain(|slot| !inside(slot));
            state.slots -= slots;
            freed += chunk.region.len();
            if let (true, Some(pinning)) = (chunk.registered, &self.pinning) {
                // SAFETY: registered in `make_chunk`; all its slots are free, so no copy is in flight.
                unsafe { pinning.unregister(chunk.region.as_ptr()) };
            }
        }
        freed
    }
}

/// One piece of staging memory, held by one reader; given back on drop.
pub struct Slot {
    address: SlotAddress,
    arena: Arc<Arena>,
}

impl Slot {
    /// Where it begins: page-aligned.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address.0.as_ptr()
    }

    /// Bytes in it.
    pub fn len(&self) -> usize {
        self.arena.slot_bytes
    }

    /// Whether it holds no bytes: never.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// All of it, to be filled.
    pub fn window(&mut self) -> Window<'_> {
        // SAFETY: the slot owns these bytes of the arena until it is dropped, and `&mut self` is exclusive.
        unsafe { Window::from_raw(self.as_ptr(), self.len()) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.arena.state).free.push(self.address);
        self.arena.given_back.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts registrations, and refuses them when told to.
    #[derive(Default)]
    struct Counting {
        refuse: bool,
        registered: Mutex<Vec<usize>>,
    }

    impl Pinning for Counting {
        fn family(&self) -> &'static str {
            "counting"
        }
        unsafe fn register(&self, ptr: *mut u8, _len: usize) -> Result<()> {
            if self.refuse {
                return Err(crate::Error::new(crate::ErrorKind::Memory, "RLIMIT_MEMLOCK"));
            }
            lock(&self.registered).push(ptr as usize);
            Ok(())
        }
        unsafe fn unregister(&self, ptr: *mut u8) {
            lock(&self.registered).retain(|registered| *registered != ptr as usize);
        }
    }

    fn arena(slots: usize, pinning: Option<Arc<dyn Pinning>>) -> Arc<Arena> {
        Arc::new(Arena::new(PAGE, slots * PAGE, pinning))
    }

    #[test]
    fn the_budget_bounds_the_slots_and_dropped_ones_are_reused() {
        let arena = arena(6, None);
        let mut held: Vec<_> = std::iter::from_fn(|| arena.try_acquire().unwrap()).collect();
        assert_eq!(held.len(), 6);
        let last = held.pop().unwrap();
        let address = last.as_ptr();
        drop(last);
        assert_eq!(arena.try_acquire().unwrap().unwrap().as_ptr(), address);
        assert_eq!(arena.usage().bytes, 6 * PAGE);
    }

    #[test]
    fn a_budget_below_one_slot_still_allows_one() {
        assert!(arena(0, None).try_acquire().unwrap().is_some());
    }

    #[test]
    fn releasing_frees_and_unregisters_only_chunks_that_nobody_holds() {
        let pinning = Arc::new(Counting::default());
        let arena = arena(8, Some(Arc::clone(&pinning) as _));
        let mut held: Vec<_> = std::iter::from_fn(|| arena.try_acquire().unwrap()).collect();
        assert_eq!(lock(&pinning.registered).len(), 2);
        held.truncate(1);
        assert_eq!(arena.release(), 4 * PAGE);
        assert_eq!((lock(&pinning.registered).len(), arena.usage().slots), (1, 4));
        held.clear();
        assert_eq!((arena.release(), arena.usage().slots), (4 * PAGE, 0));
        assert!(arena.try_acquire().unwrap().is_some());
    }

    #[test]
    fn memory_that_cannot_be_pinned_is_used_as_it_is_and_says_why() {
        let arena = arena(4, Some(Arc::new(Counting { refuse: true, ..Counting::default() })));
        let mut slot = arena.try_acquire().unwrap().unwrap();
        slot.window().write(0, &[1; PAGE]);
        assert!(arena.usage().unpinned_because.unwrap().contains("RLIMIT_MEMLOCK"));
    }

    #[test]
    fn slots_of_one_size_come_from_one_arena_whoever_asks() {
        let one = Arena::shared(123 * PAGE, 1 << 20, None);
        let other = Arena::shared(123 * PAGE - 1, 1 << 20, None);
        assert!(Arc::ptr_eq(&one, &other));
    }
}
