//! Staging memory: bounded, registered once, reused, given back, whatever becomes of the load.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use penstock::ErrorKind;
use penstock::config::Config;
use penstock::memory::Arena;
use penstock::pipeline::Next;
use penstock::store::{ALIGNMENT_PADDING, CachePolicy};
use penstock::tune::{Settings, Storage};

use super::{KIB, Load, LoadTarget, Model, alone, load, nothing_remains};
use crate::simulated_device::SimulatedDevice;

#[test]
fn many_readers_get_by_with_one_buffer() {
    let _alone = alone();
    let model = Model::new();
    let target = LoadTarget::Device(SimulatedDevice::new(), 1);
    load(&model, &model.plan(16 * KIB), &target, 8);
    assert_eq!(Arena::usage_all().buffers, 1);
    let mut load = Load::begin(&model, &model.plan(16 * KIB), &target, 8);
    while load.session.attached() < load.memory.len() {
        load.attach(3);
        while matches!(load.session.next(Duration::from_millis(5)).unwrap(), Next::Landed(_)) {}
    }
    assert_eq!(Arena::usage_all().buffers, 1, "the budget holds for a load in small steps too");
}

#[test]
fn staging_memory_is_registered_once_kept_for_the_next_load_and_given_back_on_request() {
    let _alone = alone();
    let model = Model::new();
    let device = SimulatedDevice::new();
    let target = LoadTarget::Device(Arc::clone(&device), 64 << 20);
    load(&model, &model.plan(1024 * KIB), &target, 1);
    let registered = device.pinning.made.load(SeqCst);
    assert!(registered > 0);
    load(&model, &model.plan(1024 * KIB), &target, 1);
    assert_eq!(device.pinning.made.load(SeqCst), registered, "the second load needs no new memory");
    assert!(Arena::release_all() > 0);
    assert!(device.pinning.registered.lock().unwrap().is_empty());
    load(&model, &model.plan(1024 * KIB), &target, 1);
}

#[test]
fn memory_that_cannot_be_registered_is_used_and_noted() {
    let _alone = alone();
    let model = Model::new();
    let device = SimulatedDevice::new();
    device.pinning.refuse.store(true, SeqCst);
    let mut load = Load::begin(&model, &model.plan(64 * KIB), &LoadTarget::Device(device, 1 << 20), 4);
    load.attach_all();
    load.run().unwrap();
    load.check(&model, &[]);
    let stats = load.session.finish().unwrap();
    assert!(!stats.pinned && stats.notes.iter().any(|note| note.contains("RLIMIT_MEMLOCK")), "{stats:?}");
}

/// Settings with requests that are smaller than blocks of 64 KiB, and two of which fit into their buffers.
fn small_requests() -> Settings {
    let usual = Settings::choose(&Config::default(), &Storage::unknown(), true);
    Settings { request_bytes: 16 * KIB, ..usual }
}

#[test]
fn blocks_are_fetched_by_requests_that_take_turns_in_one_buffer() {
    let _alone = alone();
    // Not from the page cache: what is there is copied a block at a time.
    let model = Model::cached_as(CachePolicy::Bypass);
    for target in LoadTarget::all() {
        for slices in [&[][..], &[("matrix", &[0..301, 3..90][..]), ("large", &[7..9, 0..1000])]] {
            let plan = model.plan_slices(64 * KIB, slices);
            let mut load = Load::begin(&model, &plan, &target, 3);
            load.session.on_storage(&Storage::unknown(), &small_requests());
            load.attach_all();
            load.run().unwrap();
            load.check(&model, slices);
            let stats = load.session.finish().unwrap();
            assert!(stats.calls > stats.blocks, "{stats:?}");
            drop(load);
            nothing_remains(&model, &target);
        }
    }
}

#[test]
fn a_copy_that_fails_between_two_requests_of_a_block_leaves_nothing_behind() {
    let _alone = alone();
    let model = Model::cached_as(CachePolicy::Bypass);
    for copy in [1, 2, 3, 20] {
        let device = SimulatedDevice::new();
        device.account.fail_at.store(copy, SeqCst);
        let target = LoadTarget::Device(device, 16 << 20);
        let mut load = Load::begin(&model, &model.plan(64 * KIB), &target, 2);
        load.session.on_storage(&Storage::unknown(), &small_requests());
        load.attach_all();
        assert_eq!(load.run().unwrap_err().kind(), ErrorKind::Device, "copy {copy}");
        drop(load);
        nothing_remains(&model, &target);
    }
}

#[test]
fn two_loads_at_once_share_the_staging_memory_and_its_budget() {
    let _alone = alone();
    let model = Model::new();
    let buffers = 6;
    let buffer_bytes = usize::try_from(16 * KIB).unwrap() + ALIGNMENT_PADDING;
    let target = LoadTarget::Device(SimulatedDevice::new(), buffers * buffer_bytes);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| load(&model, &model.plan(16 * KIB), &target, 8));
        }
    });
    assert!(Arena::usage_all().buffers <= buffers, "{:?}", Arena::usage_all());
    nothing_remains(&model, &target);
}

#[test]
fn a_load_makes_no_more_than_its_readers_and_its_blocks_can_use() {
    let _alone = alone();
    let model = Model::new();
    let plan = model.plan(16 * KIB);
    for (readers, at_most) in [(2, 4), (5, 10), (256, plan.blocks().len())] {
        Arena::release_all();
        let device = SimulatedDevice::new();
        device.account.delay_us.store(500, SeqCst);
        let target = LoadTarget::Device(Arc::clone(&device), 512 << 20);
        load(&model, &plan, &target, readers);
        let buffers = Arena::usage_all().buffers;
        assert!((1..=at_most).contains(&buffers), "{buffers} buffers for {readers} readers");
        load(&model, &plan, &target, readers);
        assert!(Arena::usage_all().buffers <= at_most, "a later load uses the same");
    }
}

#[test]
fn a_later_load_tries_again_to_register_memory() {
    let _alone = alone();
    let model = Model::new();
    let device = SimulatedDevice::new();
    // One buffer, so that the last load needs no more than was registered.
    let target = LoadTarget::Device(Arc::clone(&device), 1);
    for refuse in [true, false, true] {
        device.pinning.refuse.store(refuse, SeqCst);
        let mut load = Load::begin(&model, &model.plan(64 * KIB), &target, 4);
        load.attach_all();
        load.run().unwrap();
        load.check(&model, &[]);
        // What was registered once stays so.
        let expected = device.pinning.made.load(SeqCst) > 0;
        assert_eq!(load.session.finish().unwrap().pinned, expected, "refused: {refuse}");
    }
}

#[test]
fn however_a_load_ends_its_buffers_are_back_and_nothing_stays_registered_on_request() {
    let _alone = alone();
    let model = Model::new();
    for ending in
        ["taken in full", "stopped half target", "dropped at once", "a copy fails", "a copy is refused"]
    {
        let device = SimulatedDevice::new();
        let target = LoadTarget::Device(Arc::clone(&device), 16 << 20);
        let mut load = Load::begin(&model, &model.plan(64 * KIB), &target, 4);
        match ending {
            "a copy fails" => device.account.fail_at.store(9, SeqCst),
            "a copy is refused" => device.account.refuse_at.store(9, SeqCst),
            _ => {}
        }
        load.attach_all();
        match ending {
            "taken in full" => load.run().unwrap(),
            "stopped half target" => load.take(3),
            "dropped at once" => {}
            _ => drop(load.run().unwrap_err()),
        }
        drop(load);
        nothing_remains(&model, &target);
        Arena::release_all();
        assert_eq!(Arena::usage_all().bytes, 0, "{ending}");
        assert_eq!(device.pinning.made.load(SeqCst), device.pinning.unregistered.load(SeqCst), "{ending}");
    }
}

#[test]
fn another_kind_of_load_gets_the_budget_that_idle_memory_would_exceed() {
    let _alone = alone();
    let model = Model::new();
    let device = SimulatedDevice::new();
    let target = LoadTarget::Device(Arc::clone(&device), 256 << 10);
    for block_bytes in [16, 64, 32, 16] {
        load(&model, &model.plan(block_bytes * KIB), &target, 8);
        let usage = Arena::usage_all();
        assert!(usage.bytes <= 256 << 10, "{usage:?} after blocks of {block_bytes} KiB");
    }
}
