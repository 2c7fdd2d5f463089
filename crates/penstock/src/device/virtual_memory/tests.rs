//! The books, the order of calls, and undoing them, on a driver that refuses calls: a real one refuses too seldom.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;

use super::{DeviceMemory, DeviceRange, DeviceUsage, SCRATCH, Space};
use crate::error::{Error, ErrorKind, Result};

const GRANULE: usize = 2 << 20;
const CHUNK: usize = 8 * GRANULE;

/// What the driver knows. Each call that breaks one of its rules panics.
#[derive(Default)]
struct Driver {
    reserved: BTreeMap<u64, usize>,
    chunks: BTreeMap<u64, usize>,
    /// Length, chunk, and whether there is access, by address.
    mapped: BTreeMap<u64, (usize, u64, bool)>,
    next: u64,
    /// Bytes that chunks may have in all.
    limit: usize,
    calls: Vec<&'static str>,
    /// The call that is refused, counted from now on.
    refuse: Option<usize>,
    /// Refuses every call after that one too.
    refuse_all: bool,
    written: bool,
}

impl Driver {
    fn call(&mut self, name: &'static str) -> Result<()> {
        self.calls.push(name);
        match self.refuse {
            Some(0) => {
                self.refuse = self.refuse_all.then_some(0);
                Err(Error::new(ErrorKind::Device, format!("{name} refused")))
            }
            Some(left) => {
                self.refuse = Some(left - 1);
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn created(&self) -> usize {
        self.chunks.values().sum()
    }

    fn overlaps(&self, start: u64, len: usize) -> bool {
        let ends = |(at, of): (&u64, usize)| *at + of as u64 > start;
        self.mapped.range(..start + len as u64).next_back().is_some_and(|(at, (of, ..))| ends((at, *of)))
    }

    fn is_reserved(&self, start: u64, len: usize) -> bool {
        let found = self.reserved.range(..=start).next_back();
        found.is_some_and(|(at, of)| start + len as u64 <= at + *of as u64)
    }
}

#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Driver>>);

impl Fake {
    fn with_limit(limit: usize) -> Self {
        let fake = Self::default();
        fake.0.lock().unwrap().limit = limit;
        fake
    }

    fn refuse(&self, call: Option<usize>) {
        self.0.lock().unwrap().refuse = call;
    }

    fn calls(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.0.lock().unwrap().calls)
    }

    fn memory(&self) -> Arc<DeviceMemory> {
        DeviceMemory::new(Box::new(self.clone()), CHUNK, false).unwrap()
    }

    /// What is mapped in a range: chunks from its beginning on, which the device may use.
    fn in_range(&self, range: &DeviceRange) -> Vec<u64> {
        let driver = self.0.lock().unwrap();
        let mut at = range.address();
        let mut found = Vec::new();
        while let Some((len, chunk, access)) = driver.mapped.get(&at) {
            assert!(access, "no access at {at:#x}");
            found.push(*chunk);
            at += *len as u64;
        }
        found
    }

    fn assert_empty(&self) {
        let driver = self.0.lock().unwrap();
        assert!(driver.mapped.is_empty() && driver.chunks.is_empty() && driver.reserved.is_empty());
    }
}

impl Space for Fake {
    fn name(&self) -> &'static str {
        "fake:0"
    }

    fn granularity(&self) -> usize {
        GRANULE
    }

    fn free_bytes(&self) -> Result<usize> {
        let driver = self.0.lock().unwrap();
        Ok(driver.limit - driver.created())
    }

    fn reserve(&self, len: usize) -> Result<u64> {
        let mut driver = self.0.lock().unwrap();
        assert!(len > 0 && len.is_multiple_of(GRANULE));
        driver.call("reserve")?;
        driver.next += 1;
        let start = driver.next << 40;
        driver.reserved.insert(start, len);
        Ok(start)
    }

    unsafe fn unreserve(&self, start: u64, len: usize) -> Result<()> {
        let mut driver = self.0.lock().unwrap();
        assert!(!driver.overlaps(start, len), "something is mapped there");
        driver.call("unreserve")?;
        assert_eq!(driver.reserved.remove(&start), Some(len));
        Ok(())
    }

    fn create(&self, len: usize) -> Result<u64> {
        let mut driver = self.0.lock().unwrap();
        assert!(len > 0 && len.is_multiple_of(GRANULE));
        driver.call("create")?;
        if driver.created() + len > driver.limit {
            return Err(Error::new(ErrorKind::Memory, "out of memory"));
        }
        driver.next += 1;
        let chunk = driver.next;
        driver.chunks.insert(chunk, len);
        Ok(chunk)
    }

    unsafe fn release(&self, chunk: u64) -> Result<()> {
        let mut driver = self.0.lock().unwrap();
        assert!(driver.mapped.values().all(|(_, mapped, _)| *mapped != chunk), "still mapped");
        driver.call("release")?;
        assert!(driver.chunks.remove(&chunk).is_some(), "released twice");
        Ok(())
    }

    unsafe fn map(&self, start: u64, len: usize, chunk: u64) -> Result<()> {
        let mut driver = self.0.lock().unwrap();
        assert_eq!(driver.chunks.get(&chunk), Some(&len));
        assert!(driver.is_reserved(start, len) && !driver.overlaps(start, len));
        driver.call("map")?;
        driver.mapped.insert(start, (len, chunk, false));
        Ok(())
    }

    unsafe fn allow(&self, start: u64, len: usize) -> Result<()> {
        let mut driver = self.0.lock().unwrap();
        driver.call("allow")?;
        let mut at = start;
        while at < start + len as u64 {
            let mapping = driver.mapped.get_mut(&at).expect("a hole");
            mapping.2 = true;
            at += mapping.0 as u64;
        }
        assert_eq!(at, start + len as u64);
        Ok(())
    }

    unsafe fn unmap(&self, start: u64, len: usize) -> Result<()> {
        let mut driver = self.0.lock().unwrap();
        assert_eq!(driver.mapped.get(&start).map(|mapping| mapping.0), Some(len));
        driver.call("unmap")?;
        driver.mapped.remove(&start);
        Ok(())
    }

    unsafe fn fill(&self, start: u64, _len: usize, byte: u8) -> Result<()> {
        let mut driver = self.0.lock().unwrap();
        assert!(driver.mapped[&start].2 && byte == SCRATCH);
        driver.call("fill")?;
        driver.written = false;
        Ok(())
    }

    unsafe fn read(&self, start: u64, into: &mut [u8]) -> Result<()> {
        let mut driver = self.0.lock().unwrap();
        assert!(driver.mapped[&start].2);
        driver.call("read")?;
        into.fill(SCRATCH);
        into[GRANULE / 2] = if driver.written { 0 } else { SCRATCH };
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        self.0.lock().unwrap().call("synchronize")
    }
}

fn unmap(range: &DeviceRange, from: usize) -> usize {
    // SAFETY: there is no device.
    unsafe { range.unmap(from) }.unwrap()
}

#[test]
fn a_range_is_made_of_large_chunks_and_a_tail_that_wastes_less_than_a_granule() {
    let fake = Fake::with_limit(1 << 40);
    let memory = fake.memory();
    for (len, lens) in [
        (0, vec![]),
        (1, vec![1]),
        (GRANULE, vec![1]),
        (2 * CHUNK + 5 * GRANULE + 1, vec![8, 8, 4, 2]),
        (CHUNK - 1, vec![8]),
        (7 * GRANULE, vec![4, 2, 1]),
    ] {
        let range = memory.reserve(len).unwrap();
        assert_eq!(range.map(len).unwrap(), range.whole());
        assert!(range.whole() < len + GRANULE);
        let found: Vec<_> =
            fake.in_range(&range).iter().map(|id| fake.0.lock().unwrap().chunks[id] / GRANULE).collect();
        assert_eq!(found, lens, "{len}");
    }
    drop(memory);
    fake.assert_empty();
    let odd = DeviceMemory::new(Box::new(fake.clone()), 5 * GRANULE, false).unwrap();
    assert_eq!(odd.chunk_bytes(), CHUNK);
    assert_eq!(DeviceMemory::new(Box::new(fake), 0, false).unwrap().chunk_bytes(), GRANULE);
}

#[test]
fn memory_goes_from_one_range_to_the_next_without_the_driver() {
    let fake = Fake::with_limit(4 * CHUNK);
    let memory = fake.memory();
    let (one, other) = (memory.reserve(3 * CHUNK).unwrap(), memory.reserve(3 * CHUNK).unwrap());
    one.map(3 * CHUNK).unwrap();
    let chunks = fake.in_range(&one);
    assert_eq!(memory.usage(), DeviceUsage { reserved: 6 * CHUNK, mapped: 3 * CHUNK, kept: 0 });
    fake.calls();
    assert_eq!(unmap(&one, 0), 3 * CHUNK);
    assert_eq!(memory.usage(), DeviceUsage { reserved: 6 * CHUNK, mapped: 0, kept: 3 * CHUNK });
    other.map(3 * CHUNK).unwrap();
    let mut again = fake.in_range(&other);
    again.sort_unstable();
    assert_eq!(again, chunks);
    assert_eq!(fake.calls(), ["unmap", "unmap", "unmap", "map", "map", "map", "allow"]);
    drop((one, other, memory));
    fake.assert_empty();
}

#[test]
fn a_part_that_stays_is_not_touched_when_the_rest_goes_and_returns() {
    let fake = Fake::with_limit(1 << 40);
    let memory = fake.memory();
    let range = memory.reserve(3 * CHUNK + GRANULE).unwrap();
    range.map(range.len()).unwrap();
    let all = fake.in_range(&range);
    assert_eq!(unmap(&range, CHUNK + 1), CHUNK + GRANULE, "the chunk that holds the byte before stays");
    assert_eq!((range.mapped(), fake.in_range(&range)), (2 * CHUNK, all[..2].to_vec()));
    assert_eq!(range.map(CHUNK).unwrap(), 2 * CHUNK, "nothing to do");
    fake.calls();
    assert_eq!(range.map(2 * CHUNK + 1).unwrap(), 3 * CHUNK);
    assert_eq!(fake.calls(), ["map", "allow"]);
    assert_eq!(range.map(range.len()).unwrap(), range.whole());
    assert_eq!(fake.in_range(&range), all);
    assert_eq!(unmap(&range, range.whole()), 0);
}

#[test]
fn kept_memory_goes_to_the_driver_when_it_is_trimmed_and_never_less_is_kept_than_asked() {
    let fake = Fake::with_limit(1 << 40);
    let memory = fake.memory();
    let range = memory.reserve(2 * CHUNK + 3 * GRANULE).unwrap();
    range.map(range.len()).unwrap();
    assert_eq!(memory.trim(0).unwrap(), 0, "what is mapped stays");
    unmap(&range, 0);
    assert_eq!(memory.trim(usize::MAX).unwrap(), 0);
    assert_eq!(memory.trim(CHUNK + 1).unwrap(), CHUNK + 2 * GRANULE);
    assert_eq!(memory.usage().kept, CHUNK + GRANULE);
    assert_eq!(memory.trim(0).unwrap(), CHUNK + GRANULE);
    assert_eq!(fake.0.lock().unwrap().created(), 0);
}

#[test]
fn kept_chunks_of_other_lengths_make_room_before_there_is_said_to_be_none() {
    let fake = Fake::with_limit(CHUNK);
    let memory = fake.memory();
    let small = memory.reserve(CHUNK - GRANULE).unwrap();
    small.map(small.len()).unwrap();
    unmap(&small, 0);
    let large = memory.reserve(CHUNK).unwrap();
    large.map(CHUNK).unwrap();
    assert_eq!(memory.usage().kept, 0);
    let error = small.map(small.len()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Memory);
    let said = "fake:0: 14 MiB more are wanted, and 0 MiB are free";
    assert!(error.to_string().starts_with(said), "{error}");
    assert!(error.details().contains(&("wanted", small.len().to_string())), "{error:?}");
}

#[test]
fn running_out_half_way_leaves_everything_as_it_was() {
    let fake = Fake::with_limit(3 * CHUNK);
    let memory = fake.memory();
    let (kept, range) = (memory.reserve(CHUNK).unwrap(), memory.reserve(4 * CHUNK).unwrap());
    kept.map(CHUNK).unwrap();
    unmap(&kept, 0);
    range.map(CHUNK).unwrap();
    kept.map(CHUNK).unwrap();
    unmap(&kept, 0);
    let before = (memory.usage(), fake.in_range(&range));
    assert_eq!(range.map(4 * CHUNK).unwrap_err().kind(), ErrorKind::Memory);
    let after = memory.usage();
    assert_eq!((after.mapped, fake.in_range(&range)), (before.0.mapped, before.1));
    assert_eq!(fake.0.lock().unwrap().created(), after.mapped + after.kept);
    assert_eq!(range.map(3 * CHUNK).unwrap(), 3 * CHUNK);
}

#[test]
fn a_map_that_the_driver_refuses_at_any_call_is_undone() {
    for debug in [false, true] {
        for call in 0.. {
            let fake = Fake::with_limit(1 << 40);
            let memory = DeviceMemory::new(Box::new(fake.clone()), CHUNK, debug).unwrap();
            let (other, range) =
                (memory.reserve(CHUNK).unwrap(), memory.reserve(3 * CHUNK + 3 * GRANULE).unwrap());
            range.map(GRANULE).unwrap();
            other.map(CHUNK).unwrap();
            unmap(&other, 0);
            let before = (memory.usage(), fake.in_range(&range)[0]);
            fake.calls();
            fake.refuse(Some(call));
            let mapped = range.map(range.len());
            fake.refuse(None);
            if mapped.is_ok() {
                // Three chunks are created, four mapped, and access is given once; 19 scratch granules are unmapped.
                assert_eq!(call, if debug { 27 } else { 8 });
                break;
            }
            assert_eq!(mapped.unwrap_err().kind(), ErrorKind::Device);
            assert_eq!(
                (memory.usage(), range.mapped()),
                (before.0, CHUNK),
                "call {call}: {:?}",
                fake.calls()
            );
            assert_eq!(fake.in_range(&range)[0], before.1);
            assert_eq!(range.map(range.len()).unwrap(), range.whole());
            drop((other, range, memory));
            fake.assert_empty();
        }
    }
}

#[test]
fn what_cannot_be_undone_either_stays_in_the_books_and_is_used_by_the_next_call() {
    for call in 1..9 {
        let fake = Fake::with_limit(1 << 40);
        let memory = fake.memory();
        let range = memory.reserve(3 * CHUNK).unwrap();
        {
            let mut driver = fake.0.lock().unwrap();
            (driver.refuse, driver.refuse_all) = (Some(call), true);
        }
        let mapped = range.map(range.len());
        fake.refuse(None);
        let usage = memory.usage();
        assert_eq!(usage.mapped + usage.kept, fake.0.lock().unwrap().created(), "call {call}");
        assert_eq!(mapped.is_ok(), call > 6);
        assert_eq!(range.map(range.len()).unwrap(), range.len());
        assert_eq!(fake.in_range(&range).len(), 3);
        drop((range, memory));
        fake.assert_empty();
    }
}

#[test]
fn unmapping_that_the_driver_refuses_half_way_can_be_gone_on_with() {
    let fake = Fake::with_limit(1 << 40);
    let memory = fake.memory();
    let range = memory.reserve(3 * CHUNK).unwrap();
    range.map(range.len()).unwrap();
    fake.refuse(Some(1));
    // SAFETY: there is no device.
    assert!(unsafe { range.unmap(0) }.is_err());
    let usage = memory.usage();
    assert_eq!((usage.mapped, usage.kept, range.mapped()), (2 * CHUNK, CHUNK, 2 * CHUNK));
    assert_eq!(unmap(&range, 0), 2 * CHUNK);
}

#[test]
fn a_range_that_is_dropped_with_memory_waits_for_the_device_and_leaves_no_address_to_others() {
    let fake = Fake::with_limit(1 << 40);
    let memory = fake.memory();
    let range = memory.reserve(CHUNK).unwrap();
    range.map(CHUNK).unwrap();
    fake.calls();
    drop(range);
    assert_eq!(fake.calls(), ["synchronize", "unmap", "unreserve"]);
    assert_eq!(memory.usage(), DeviceUsage { kept: CHUNK, ..DeviceUsage::default() });
    let range = memory.reserve(CHUNK).unwrap();
    range.map(CHUNK).unwrap();
    fake.refuse(Some(0));
    drop(range);
    let usage = DeviceUsage { reserved: CHUNK, mapped: CHUNK, kept: 0 };
    assert_eq!(memory.usage(), usage, "what may be in use is kept from everyone");
}

#[test]
fn a_closed_range_keeps_its_addresses_until_it_is_dropped_and_is_not_mapped_again() {
    let fake = Fake::with_limit(1 << 40);
    let memory = fake.memory();
    let range = memory.reserve(CHUNK).unwrap();
    range.map(CHUNK).unwrap();
    // SAFETY: there is no device.
    unsafe { range.close() }.unwrap();
    assert_eq!((memory.usage().mapped, memory.usage().reserved), (0, CHUNK));
    assert_eq!(range.map(1).unwrap_err().kind(), ErrorKind::Config);
    fake.calls();
    drop(range);
    assert_eq!(fake.calls(), ["unreserve"]);
}

#[test]
fn more_than_a_range_has_and_more_than_there_are_addresses_is_refused() {
    let memory = Fake::with_limit(1 << 40).memory();
    assert_eq!(memory.reserve(CHUNK).unwrap().map(CHUNK + 1).unwrap_err().kind(), ErrorKind::Config);
    assert_eq!(memory.reserve(usize::MAX).unwrap_err().kind(), ErrorKind::Memory);
}

#[test]
fn in_the_debug_mode_what_has_no_memory_leads_to_the_scratch_granule() {
    let fake = Fake::with_limit(1 << 40);
    let memory = DeviceMemory::new(Box::new(fake.clone()), CHUNK, true).unwrap();
    let range = memory.reserve(CHUNK + GRANULE).unwrap();
    let scratch = fake.in_range(&range);
    assert_eq!(scratch, [scratch[0]; 9]);
    range.map(range.len()).unwrap();
    let mapped = fake.in_range(&range);
    assert!(mapped.len() == 2 && !mapped.contains(&scratch[0]));
    unmap(&range, CHUNK);
    assert_eq!(fake.in_range(&range), [mapped[0], scratch[0]]);
    assert_eq!(memory.usage().mapped, CHUNK, "the scratch granule is nobody's memory");
    assert!(memory.scratch_is_clean().unwrap());
    fake.0.lock().unwrap().written = true;
    assert!(!memory.scratch_is_clean().unwrap());
    assert!(memory.scratch_is_clean().unwrap(), "it was filled anew");
    drop((range, memory));
    fake.assert_empty();
}

#[test]
fn a_debug_mode_without_its_granule_leaves_nothing_behind() {
    for call in 0..5 {
        let fake = Fake::with_limit(1 << 40);
        fake.refuse(Some(call));
        assert!(DeviceMemory::new(Box::new(fake.clone()), CHUNK, true).is_err());
        fake.assert_empty();
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri does not fork")]
fn a_forked_child_leaves_the_device_alone() {
    let fake = Fake::with_limit(1 << 40);
    let memory = fake.memory();
    let range = memory.reserve(CHUNK).unwrap();
    range.map(CHUNK).unwrap();
    fake.calls();
    // A thread of the parent holds what the child must not wait for.
    let held = memory.books();
    // SAFETY: the child ends without returning, and allocates, which the C library allows it.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = |result: Result<usize>| result.is_err_and(|error| error.kind() == ErrorKind::Device);
        // SAFETY: the range is a parent's.
        let alone = refused(range.map(1)) && refused(unsafe { range.unmap(0) }) && refused(memory.trim(0));
        let knows_nothing = memory.usage() == DeviceUsage::default() && range.mapped() == 0;
        let nothing_reserved = memory.reserve(1).is_err();
        drop(range);
        let untouched = fake.calls().is_empty();
        // SAFETY: ends the process.
        unsafe { libc::_exit(i32::from(!(alone && knows_nothing && nothing_reserved && untouched))) };
    }
    drop(held);
    let mut status = -1;
    // SAFETY: our own child; writes one int.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
}

#[derive(Debug, Clone)]
enum Step {
    Map(usize, usize),
    Unmap(usize, usize),
    Trim(usize),
    Refuse(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0usize..4, 0usize..5 * CHUNK).prop_map(|(range, bytes)| Step::Map(range, bytes)),
        3 => (0usize..4, 0usize..5 * CHUNK).prop_map(|(range, from)| Step::Unmap(range, from)),
        1 => (0usize..2 * CHUNK).prop_map(Step::Trim),
        1 => (0usize..12).prop_map(Step::Refuse),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_books_are_exact_and_nothing_leaks_whatever_happens(steps in steps(), debug: bool) {
        let fake = Fake::with_limit(7 * CHUNK);
        let memory = DeviceMemory::new(Box::new(fake.clone()), CHUNK, debug).unwrap();
        let own = fake.0.lock().unwrap().created();
        let lens = [GRANULE, CHUNK, 2 * CHUNK + 3 * GRANULE + 5, 4 * CHUNK - 1];
        let ranges: Vec<_> = lens.iter().map(|len| memory.reserve(*len).unwrap()).collect();
        for step in steps {
            match step {
                Step::Map(range, bytes) => drop(ranges[range].map(bytes.min(lens[range]))),
                // SAFETY: there is no device.
                Step::Unmap(range, from) => drop(unsafe { ranges[range].unmap(from) }),
                Step::Trim(keep) => drop(memory.trim(keep)),
                Step::Refuse(call) => fake.refuse(Some(call)),
            }
            let usage = memory.usage();
            prop_assert_eq!(usage.mapped, ranges.iter().map(DeviceRange::mapped).sum::<usize>());
            prop_assert_eq!(usage.mapped + usage.kept + own, fake.0.lock().unwrap().created());
        }
        fake.refuse(None);
        drop(ranges);
        prop_assert_eq!(memory.usage().reserved, 0);
        drop(memory);
        fake.assert_empty();
    }
}
