//! The pipeline, driven as its owners drive it: on files, on a store that fails, and on a device whose copies come late.
#![allow(unsafe_code, clippy::unwrap_used, clippy::panic)]

mod support;

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock::checkpoint::Checkpoint;
use penstock::memory::Arena;
use penstock::pipeline::{Next, Session, Target};
use penstock::plan::{Plan, Selection};
use penstock::store::LocalStore;
use penstock::{Error, ErrorKind};

use support::{FaultyStore, LateDevice, descriptors_of, open, reader_threads, write_file};

const SIZES: [usize; 9] = [100, 0, 70_000, 1, 1_300_000, 4096, 13, 250_000, 9_999];
const PATIENCE: Duration = Duration::from_secs(10);

/// Tests count what the process holds, so they take turns.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn plan(checkpoint: &Checkpoint, block_bytes: u64) -> Arc<Plan> {
    let wanted = checkpoint.tensors().iter().map(|tensor| (tensor, Selection::all(tensor))).collect();
    Arc::new(Plan::new(wanted, block_bytes, 4096))
}

fn device_target(device: &LateDevice, staging_bytes: usize) -> Target {
    Target::Device { device: Arc::new(LateDevice { state: Arc::clone(&device.state) }), staging_bytes }
}

/// Memory for every tensor of a plan, standing for the caller's.
fn destinations(plan: &Plan) -> Vec<Vec<u8>> {
    plan.tensors().iter().map(|tensor| vec![0xEE; tensor.bytes() as usize]).collect()
}

fn addresses(memory: &mut [Vec<u8>]) -> Vec<u64> {
    memory.iter_mut().map(|tensor| tensor.as_mut_ptr() as usize as u64).collect()
}

/// Takes tensors until all have landed.
fn drain(session: &mut Session) -> Result<Vec<u32>, Error> {
    let mut landed = Vec::new();
    loop {
        match session.next(PATIENCE)? {
            Next::Landed(tensor) => landed.push(tensor),
            Next::Done => return Ok(landed),
            Next::Waiting => panic!("nothing landed for {PATIENCE:?}"),
        }
    }
}

fn nothing_remains(path: &Path) {
    assert_eq!((reader_threads(), descriptors_of(path), Arena::usage_all().slots_taken), (0, 0, 0));
}

/// Loads everything to the caller's memory and checks every byte.
fn load_and_check(
    checkpoint: &Arc<Checkpoint>,
    expected: &[Vec<u8>],
    target: Target,
    readers: usize,
    block: u64,
) {
    let plan = plan(checkpoint, block);
    let mut memory = destinations(&plan);
    let mut session = Session::start(Arc::clone(checkpoint), Arc::clone(&plan), target, readers).unwrap();
    // SAFETY: `memory` outlives the session and is not touched meanwhile.
    unsafe { session.attach(&addresses(&mut memory), 0) }.unwrap();
    let mut landed = drain(&mut session).unwrap();
    session.finish().unwrap();
    landed.sort_unstable();
    assert_eq!(landed, (0..expected.len() as u32).collect::<Vec<_>>());
    drop(session);
    assert!(memory == expected, "readers {readers}, blocks of {block}: bytes differ");
}

#[test]
fn every_byte_reaches_the_callers_memory_and_the_slab() {
    let _turn = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.safetensors");
    let expected = write_file(&path, &SIZES);
    let checkpoint = open(Arc::new(LocalStore::default()), &path);
    for readers in [1, 8] {
        for block in [4096, 1 << 20] {
            load_and_check(&checkpoint, &expected, Target::Host, readers, block);
            let plan = plan(&checkpoint, block);
            let mut session = Session::start(Arc::clone(&checkpoint), plan, Target::Slab, readers).unwrap();
            session.attach_slab(SIZES.len()).unwrap();
            let landed = drain(&mut session).unwrap();
            for tensor in landed {
                let mut memory = session.take_host(tensor).unwrap();
                assert!(session.take_host(tensor).is_none(), "memory is handed out once");
                let len = memory.len();
                let window = memory.window();
                // SAFETY: the tensor has landed.
                assert!(unsafe { window.assume_filled(0, len) } == expected[tensor as usize]);
            }
        }
    }
    nothing_remains(&path);
}

#[test]
fn every_byte_reaches_a_device_whose_copies_come_late() {
    let _turn = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.safetensors");
    let expected = write_file(&path, &SIZES);
    let checkpoint = open(Arc::new(LocalStore::default()), &path);
    let device = LateDevice::default();
    for (readers, block, staging) in
        [(1, 4096, 1 << 20), (8, 65_536, 1 << 20), (8, 4096, 1), (3, 1 << 20, 3 << 20)]
    {
        load_and_check(&checkpoint, &expected, device_target(&device, staging), readers, block);
        nothing_remains(&path);
        assert_eq!(device.state.streams.load(Ordering::SeqCst), 0);
    }
    let registered = device.state.registered.lock().unwrap().len();
    assert!(registered > 0);
    assert!(Arena::release_all() > 0);
    assert_eq!(device.state.registered.lock().unwrap().len(), 0);
}

#[test]
fn strided_slices_are_packed_on_their_way_to_a_device() {
    let _turn = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.safetensors");
    write_file(&path, &[64 * 1000]);
    let file = std::fs::read(&path).unwrap();
    // The same bytes as a matrix.
    let mut text = String::from_utf8_lossy(&file[8..]).into_owned();
    text.truncate(text.find("}}").unwrap() + 2);
    let matrix = text.replace("[64000]", "[64,1000]");
    let mut rewritten = (matrix.len() as u64).to_le_bytes().to_vec();
    rewritten.extend(matrix.as_bytes());
    rewritten.extend(&file[file.len() - 64_000..]);
    std::fs::write(&path, rewritten).unwrap();
    let checkpoint = open(Arc::new(LocalStore::default()), &path);
    let tensor = &checkpoint.tensors()[0];
    let selection = Selection::of(tensor, &[3..60, 17..700]).unwrap();
    let plan = Arc::new(Plan::new(vec![(tensor, selection)], 8192, 4096));
    let data = &file[file.len() - 64_000..];
    let expected: Vec<u8> =
        (3..60).flat_map(|row| data[row * 1000 + 17..row * 1000 + 700].to_vec()).collect();
    let device = LateDevice::default();
    for target in [Target::Host, device_target(&device, 1 << 20)] {
        let mut memory = destinations(&plan);
        let mut session = Session::start(Arc::clone(&checkpoint), Arc::clone(&plan), target, 4).unwrap();
        // SAFETY: `memory` outlives the session and is not touched meanwhile.
        unsafe { session.attach(&addresses(&mut memory), 0) }.unwrap();
        drain(&mut session).unwrap();
        drop(session);
        assert!(memory[0] == expected);
    }
}

#[test]
fn copies_wait_for_the_consumers_work() {
    let _turn = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.safetensors");
    let expected = write_file(&path, &SIZES);
    let checkpoint = open(Arc::new(LocalStore::default()), &path);
    let device = LateDevice::default();
    let plan = plan(&checkpoint, 65_536);
    let mut memory = destinations(&plan);
    let to = addresses(&mut memory);
    let target = device_target(&device, 1 << 20);
    let mut session = Session::start(checkpoint, Arc::clone(&plan), target, 4).unwrap();
    device.state.fence_held.store(true, Ordering::SeqCst);
    // SAFETY: `memory` outlives the session; below it is only looked at before any copy may begin.
    unsafe { session.attach(&to, 0) }.unwrap();
    let mut landed = 0;
    // Only the empty tensor, which needs no copy.
    while session.next(Duration::from_millis(100)).unwrap() != Next::Waiting {
        landed += 1;
    }
    assert_eq!(landed, 1);
    assert!(memory.iter().flatten().all(|byte| *byte == 0xEE), "a copy overtook the consumer's work");
    device.state.fence_held.store(false, Ordering::SeqCst);
    drain(&mut session).unwrap();
    drop(session);
    assert!(memory == expected);
}

#[test]
fn nothing_is_read_before_it_has_a_destination() {
    let _turn = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.safetensors");
    write_file(&path, &[100_000; 20]);
    let store = FaultyStore::default();
    let faults = Arc::clone(&store.faults);
    let checkpoint = open(Arc::new(store), &path);
    let opened = faults.reads.load(Ordering::SeqCst);
    let plan = plan(&checkpoint, 4096);
    let mut session = Session::start(checkpoint, Arc::clone(&plan), Target::Slab, 4).unwrap();
    assert_eq!(session.next(Duration::from_millis(50)).unwrap(), Next::Waiting);
    session.attach_slab(3).unwrap();
    let mut landed = Vec::new();
    while let Next::Landed(tensor) = session.next(Duration::from_millis(200)).unwrap() {
        landed.push(tensor);
    }
    landed.sort_unstable();
    // The third shares its last block with the fourth.
    assert_eq!(landed, [0, 1]);
    assert_eq!(faults.reads.load(Ordering::SeqCst) - opened, plan.blocks_ready(3));
}

#[test]
fn a_failed_read_is_told_once_with_its_place_and_leaves_nothing() {
    let _turn = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.safetensors");
    let expected = write_file(&path, &SIZES);
    let device = LateDevice::default();
    for to_device in [false, true] {
        for fail_from in [1, 5, 40] {
            let store = FaultyStore::default();
            let faults = Arc::clone(&store.faults);
            let checkpoint = open(Arc::new(store), &path);
            faults.fail_from.store(faults.reads.load(Ordering::SeqCst) + fail_from, Ordering::SeqCst);
            let plan = plan(&checkpoint, 16_384);
            let mut memory = destinations(&plan);
            let target = if to_device { device_target(&device, 1 << 20) } else { Target::Host };
            let mut session = Session::start(Arc::clone(&checkpoint), Arc::clone(&plan), target, 4).unwrap();
            // SAFETY: `memory` outlives the session and is not touched meanwhile.
            unsafe { session.attach(&addresses(&mut memory), 0) }.unwrap();
            let error = drain(&mut session).unwrap_err();
            assert_eq!((error.kind(), error.os_error()), (ErrorKind::Storage, Some(libc::EIO)));
            assert_eq!(error.object_name(), path.to_str());
            assert!(error.tensor_name().is_some() && error.byte_range().is_some(), "{error}");
            // Even while the failed session is still held.
            nothing_remains(&path);
            drop(session);
            faults.fail_from.store(0, Ordering::SeqCst);
            load_and_check(&checkpoint, &expected, Target::Host, 4, 16_384);
        }
    }
}

#[test]
fn a_failed_copy_is_a_device_error_and_leaves_nothing() {
    let _turn = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.safetensors");
    let expected = write_file(&path, &SIZES);
    let checkpoint = open(Arc::new(LocalStore::default()), &path);
    let device = LateDevice::default();
    for fail_from in [1, 7] {
        device.state.copies.store(0, Ordering::SeqCst);
        device.state.fail_from.store(fail_from, Ordering::SeqCst);
        let plan = plan(&checkpoint, 16_384);
        let mut memory = destinations(&plan);
        let target = device_target(&device, 1 << 20);
        let mut session = Session::start(Arc::clone(&checkpoint), Arc::clone(&plan), target, 4).unwrap();
        // SAFETY: `memory` outlives the session and is not touched meanwhile.
        unsafe { session.attach(&addresses(&mut memory), 0) }.unwrap();
        assert_eq!(drain(&mut session).unwrap_err().kind(), ErrorKind::Device);
        nothing_remains(&path);
        assert_eq!(device.state.streams.load(Ordering::SeqCst), 0);
    }
    device.state.fail_from.store(0, Ordering::SeqCst);
    load_and_check(&checkpoint, &expected, device_target(&device, 1 << 20), 4, 16_384);
}

#[test]
fn a_dropped_session_is_gone_at_once() {
    let _turn = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.safetensors");
    write_file(&path, &[50_000; 100]);
    let store = FaultyStore::default();
    store.faults.delay_ms.store(5, Ordering::SeqCst);
    let checkpoint = open(Arc::new(store), &path);
    let device = LateDevice::default();
    for target in [Target::Slab, device_target(&device, 1 << 20)] {
        let plan = plan(&checkpoint, 4096);
        let mut memory = destinations(&plan);
        let slab = matches!(target, Target::Slab);
        let mut session = Session::start(Arc::clone(&checkpoint), Arc::clone(&plan), target, 8).unwrap();
        if slab {
            session.attach_slab(100).unwrap();
        } else {
            // SAFETY: `memory` outlives the session and is not touched meanwhile.
            unsafe { session.attach(&addresses(&mut memory), 0) }.unwrap();
        }
        assert!(matches!(session.next(PATIENCE).unwrap(), Next::Landed(_)));
        let began = Instant::now();
        drop(session);
        assert!(began.elapsed() < Duration::from_millis(200), "{:?}", began.elapsed());
        nothing_remains(&path);
    }
}

#[test]
fn a_paused_load_does_not_starve_another() {
    let _turn = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.safetensors");
    let expected = write_file(&path, &[100_000; 12]);
    let checkpoint = open(Arc::new(LocalStore::default()), &path);
    let device = LateDevice::default();
    let staging = 4 * (16_384 + 8192);
    let plan = plan(&checkpoint, 16_384);
    let mut memory = destinations(&plan);
    let to = addresses(&mut memory);
    let target = device_target(&device, staging);
    let mut paused = Session::start(Arc::clone(&checkpoint), Arc::clone(&plan), target, 4).unwrap();
    // SAFETY: `memory` outlives the session and is not touched meanwhile.
    unsafe { paused.attach(&to[..5], 0) }.unwrap();
    assert!(matches!(paused.next(PATIENCE).unwrap(), Next::Landed(_)));
    load_and_check(&checkpoint, &expected, device_target(&device, staging), 4, 16_384);
    // SAFETY: as above.
    unsafe { paused.attach(&to[5..], 0) }.unwrap();
    drain(&mut paused).unwrap();
    drop(paused);
    assert!(memory == expected);
}

#[test]
fn a_file_that_changes_is_an_error_before_during_and_after_reading() {
    let _turn = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.safetensors");
    write_file(&path, &[100_000; 12]);
    let original = std::fs::read(&path).unwrap();

    // Before: the first read opens the file again.
    let checkpoint = open(Arc::new(LocalStore::default()), &path);
    std::fs::write(&path, &original[..original.len() / 2]).unwrap();
    let before = plan(&checkpoint, 4096);
    let mut session = Session::start(checkpoint, before, Target::Slab, 2).unwrap();
    session.attach_slab(12).unwrap();
    assert_eq!(drain(&mut session).unwrap_err().kind(), ErrorKind::Changed);
    drop(session);

    // During: reads meet the new end of the file.
    std::fs::write(&path, &original).unwrap();
    let checkpoint = open(Arc::new(LocalStore::default()), &path);
    let during = plan(&checkpoint, 4096);
    let mut session = Session::start(checkpoint, during, Target::Slab, 2).unwrap();
    session.attach_slab(2).unwrap();
    assert!(matches!(session.next(PATIENCE).unwrap(), Next::Landed(_)));
    std::fs::File::options().write(true).open(&path).unwrap().set_len(500_000).unwrap();
    session.attach_slab(10).unwrap();
    let error = drain(&mut session).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Changed);
    assert!(error.tensor_name().is_some(), "{error}");
    drop(session);

    // After: everything was read, but perhaps not all of it from the same version.
    std::fs::write(&path, &original).unwrap();
    let checkpoint = open(Arc::new(LocalStore::default()), &path);
    let after = plan(&checkpoint, 4096);
    let mut session = Session::start(checkpoint, after, Target::Slab, 2).unwrap();
    session.attach_slab(12).unwrap();
    drain(&mut session).unwrap();
    std::fs::write(&path, &original).unwrap();
    assert_eq!(session.finish().unwrap_err().kind(), ErrorKind::Changed);
    nothing_remains(&path);
}
