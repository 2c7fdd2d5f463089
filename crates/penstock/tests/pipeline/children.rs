//! Children after `fork`: they start clean, load for themselves, and do no harm to their parent.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use penstock::ErrorKind;
use penstock::memory::{Arena, ArenaUse};
use penstock::pipeline::Next;

use super::{KIB, LONG, Load, LoadTarget, Model, alone, load, nothing_remains};
use crate::simulated_device::SimulatedDevice;

/// Runs `body` in a forked child and waits until it has ended.
#[track_caller]
pub fn in_child(body: impl FnOnce()) {
    // SAFETY: the child ends without returning; the C library keeps its allocator usable there.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    let (began, mut status) = (Instant::now(), 0);
    // SAFETY: writes one int.
    while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
        if began.elapsed() > LONG {
            // SAFETY: our own child.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        std::thread::yield_now();
    }
    assert_eq!(status, 0, "the child failed or hung");
}

#[test]
fn a_child_starts_with_no_staging_memory_and_leaves_its_parent_s_alone() {
    let _alone = alone();
    let model = Model::new();
    let device = SimulatedDevice::new();
    let target = LoadTarget::Device(Arc::clone(&device), 16 << 20);
    load(&model, &model.plan(64 * KIB), &target, 4);
    let before = Arena::usage_all();
    assert!(before.buffers > 0);
    in_child(|| {
        assert_eq!(Arena::usage_all(), ArenaUse::default());
        assert_eq!(Arena::release_all(), 0);
        let target = LoadTarget::Device(SimulatedDevice::new(), 16 << 20);
        load(&model, &model.plan(64 * KIB), &target, 4);
        nothing_remains(&model, &target);
        assert!(Arena::release_all() > 0);
        assert_eq!(device.pinning.unregistered.load(SeqCst), 0);
    });
    assert_eq!(Arena::usage_all(), before);
    load(&model, &model.plan(64 * KIB), &target, 4);
}

#[test]
fn a_child_of_a_process_that_is_loading_loads_for_itself_and_may_drop_its_copy_of_the_load() {
    let _alone = alone();
    // The running load's model has locks that its readers may hold when the child begins.
    let (model, for_the_child) = (Model::new(), Model::new());
    for target in [LoadTarget::Slab, LoadTarget::Host, LoadTarget::Device(SimulatedDevice::new(), 1 << 20)] {
        model.control.delay_us.store(500, SeqCst);
        let plan = model.plan(16 * KIB);
        let mut running = Load::begin(&model, &plan, &target, 8);
        running.attach_all();
        running.take(2);
        let running = std::cell::RefCell::new(Some(running));
        in_child(|| {
            let mut copy = running.take().unwrap();
            assert_eq!(copy.session.next(LONG).unwrap_err().kind(), ErrorKind::Cancelled);
            copy.session.stop();
            drop(copy);
            let own = match &target {
                LoadTarget::Device(..) => LoadTarget::Device(SimulatedDevice::new(), 1 << 20),
                host => host.clone(),
            };
            load(&for_the_child, &for_the_child.plan(16 * KIB), &own, 8);
            assert_eq!(Arena::usage_all().buffers_taken, 0);
            if let LoadTarget::Device(device, _) = &target {
                assert_eq!(device.pinning.unregistered.load(SeqCst), 0);
            }
        });
        let mut running = running.take().unwrap();
        while running.next().unwrap() != Next::Done {}
        running.check(&model, &[]);
        drop(running);
        model.control.delay_us.store(0, SeqCst);
        nothing_remains(&model, &target);
    }
}
