//! The pipeline, driven through a store that fails on demand and a device that copies late: what is delivered is
//! right, what fails is reported once and leaves nothing behind, and nothing waits for ever.
#![allow(unsafe_code, unreachable_pub, clippy::unwrap_used, clippy::panic, clippy::single_range_in_vec_init)]

mod children;
mod faulty_store;
mod pinned;
mod prefetch;
mod simulated_device;
mod staging;
mod trace;
mod verified;

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use faulty_store::{Control, FaultyStore};
use penstock::checkpoint::{Checkpoint, Dtype, TensorInfo};
use penstock::config::Config;
use penstock::memory::Arena;
use penstock::pipeline::{Mapped, Next, Session, Target};
use penstock::plan::{Plan, Selection};
use penstock::store::{ALIGNMENT_PADDING, CachePolicy, LocalStore};
use penstock::tune::{Bounds, Readers, Settings, Storage};
use penstock::{Error, ErrorKind};
use serde_json::json;
use simulated_device::SimulatedDevice;

/// Longer than anything here takes unless it hangs.
const LONG: Duration = Duration::from_secs(30);
const KIB: u64 = 1 << 10;

/// Threads, files and buffers are the process's, so one test at a time counts them.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Arena::release_all();
    guard
}

#[track_caller]
fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < LONG, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

// A checkpoint to load

/// Two files of tensors, and what a test changes about reading them.
struct Model {
    dir: tempfile::TempDir,
    files: Vec<Vec<u8>>,
    control: Arc<Control>,
    checkpoint: Arc<Checkpoint>,
}

/// Tensors smaller and larger than blocks of 4 KiB and 1 MiB, empty ones, scalars, and many tiny ones.
fn shapes() -> Vec<Vec<(String, Dtype, Vec<u64>)>> {
    let named = |name: &str, dtype, shape: &[u64]| (name.to_owned(), dtype, shape.to_vec());
    let mut first = vec![
        named("empty.first", Dtype::F32, &[0, 7]),
        named("byte", Dtype::U8, &[1]),
        named("large", Dtype::F32, &[640, 1024]),
        named("scalar", Dtype::F64, &[]),
        named("matrix", Dtype::Bf16, &[301, 130]),
        named("empty.middle", Dtype::U8, &[0]),
    ];
    first.extend((0..200).map(|i| named(&format!("small.{i:03}"), Dtype::Bf16, &[i % 17, 3])));
    let second = vec![
        named("packed", Dtype::F4, &[64, 100]),
        named("wide", Dtype::U8, &[8, 50_000]),
        named("odd", Dtype::U8, &[5000]),
        named("empty.last", Dtype::I64, &[3, 0]),
    ];
    vec![first, second]
}

fn file_bytes(tensors: &[(String, Dtype, Vec<u64>)], seed: u64) -> Vec<u8> {
    let (mut header, mut end) = (serde_json::Map::new(), 0u64);
    for (name, dtype, shape) in tensors {
        let start = end;
        end += shape.iter().product::<u64>() * dtype.bits() / 8;
        let entry = json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [start, end]});
        header.insert(name.clone(), entry);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    // Bytes that differ from their neighbours and from those a block further on.
    bytes.extend((0..end).map(|at| {
        let mixed = (at ^ seed << 40).wrapping_add(0x9E37_79B9_7F4A_7C15).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed >> 56) as u8
    }));
    bytes
}

impl Model {
    fn new() -> Self {
        Self::cached_as(CachePolicy::Auto)
    }

    fn cached_as(cache: CachePolicy) -> Self {
        Self::of(&shapes(), cache)
    }

    fn of(shards: &[Vec<(String, Dtype, Vec<u64>)>], cache: CachePolicy) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let files: Vec<_> = shards.iter().zip(1..).map(|(tensors, seed)| file_bytes(tensors, seed)).collect();
        for (index, bytes) in files.iter().enumerate() {
            fs::write(dir.path().join(format!("{index}.safetensors")), bytes).unwrap();
        }
        let store = FaultyStore { inner: LocalStore::new(cache), ..FaultyStore::default() };
        let control = Arc::clone(&store.control);
        let at = dir.path().to_str().unwrap().to_owned();
        let checkpoint = Arc::new(Checkpoint::open(Arc::new(store), &[at]).unwrap());
        control.reset();
        Self { dir, files, control, checkpoint }
    }

    fn path(&self, file: usize) -> String {
        self.checkpoint.objects()[file].location.clone()
    }

    fn plan(&self, block_bytes: u64) -> Arc<Plan> {
        self.plan_slices(block_bytes, &[])
    }

    fn plan_slices(&self, block_bytes: u64, slices: &[(&str, &[Range<u64>])]) -> Arc<Plan> {
        let slices: HashMap<_, _> = slices.iter().copied().collect();
        let wanted = self.checkpoint.tensors().iter().map(|tensor| {
            let ranges = slices.get(&*tensor.name).copied().unwrap_or_default();
            (tensor, Selection::of(tensor, ranges).unwrap())
        });
        Arc::new(Plan::new(wanted.collect(), block_bytes, 512))
    }

    /// The tensor's bytes, or those of a slice of it, element by element.
    fn expected(&self, name: &str, ranges: &[Range<u64>]) -> Vec<u8> {
        let tensor = self.checkpoint.require(name).unwrap();
        let range = usize::try_from(tensor.range.start).unwrap()..usize::try_from(tensor.range.end).unwrap();
        let bytes = &self.files[tensor.object as usize][range];
        if ranges.is_empty() { bytes.to_vec() } else { slice(tensor, bytes, ranges) }
    }

    fn start(&self, plan: &Arc<Plan>, target: Target, readers: usize) -> Session {
        Session::start(Arc::clone(&self.checkpoint), Arc::clone(plan), target, Readers::fixed(readers))
            .unwrap()
    }
}

/// The definition of slicing, for whole-byte elements.
fn slice(tensor: &TensorInfo, bytes: &[u8], ranges: &[Range<u64>]) -> Vec<u8> {
    let size = tensor.dtype.bits() / 8;
    let mut elements = vec![0];
    for (dimension, length) in tensor.shape.iter().enumerate() {
        let range = ranges.get(dimension).cloned().unwrap_or(0..*length);
        elements = elements.iter().flat_map(|e| range.clone().map(move |i| e * length + i)).collect();
    }
    let bytes_of =
        |element: u64| (element * size..(element + 1) * size).map(|at| bytes[usize::try_from(at).unwrap()]);
    elements.into_iter().flat_map(bytes_of).collect()
}

// Ways to load it

/// Where a test's tensors go.
#[derive(Clone)]
enum LoadTarget {
    Slab,
    Host,
    Device(Arc<SimulatedDevice>, usize),
}

impl LoadTarget {
    fn all() -> Vec<Self> {
        vec![Self::Slab, Self::Host, Self::Device(SimulatedDevice::new(), 16 << 20)]
    }

    fn target(&self) -> Target {
        match self {
            Self::Slab => Target::Slab,
            Self::Host => Target::Host,
            Self::Device(device, staging_bytes) => {
                Target::Device { device: Arc::clone(device) as _, staging_bytes: *staging_bytes }
            }
        }
    }
}

/// A load with the memory it goes to. The session is dropped first, so that the memory outlives all copies.
struct Load {
    session: Session,
    memory: Vec<Vec<u8>>,
    landed: Vec<bool>,
    slab: bool,
    /// The consumer's.
    stream: u64,
}

impl Load {
    fn begin(model: &Model, plan: &Arc<Plan>, target: &LoadTarget, readers: usize) -> Self {
        Self::begin_within(model, plan, target, Readers::fixed(readers))
    }

    fn begin_within(model: &Model, plan: &Arc<Plan>, target: &LoadTarget, readers: Readers) -> Self {
        let slab = matches!(target, LoadTarget::Slab);
        // One byte more, so that empty tensors have an address and writing too far is seen.
        let memory =
            |tensor: &penstock::plan::PlannedTensor| vec![0xA5; usize::try_from(tensor.bytes()).unwrap() + 1];
        let memory: Vec<_> = plan.tensors().iter().map(memory).collect();
        let landed = vec![false; memory.len()];
        let session =
            Session::start(Arc::clone(&model.checkpoint), Arc::clone(plan), target.target(), readers)
                .unwrap();
        Self { stream: 0, session, memory, landed, slab }
    }

    /// Attaches the next `count` tensors.
    fn attach(&mut self, count: usize) {
        let from = self.session.attached();
        let to = (from + count).min(self.memory.len());
        if self.slab {
            self.session.attach_slab(to - from).unwrap();
        } else {
            let addresses: Vec<_> =
                self.memory[from..to].iter_mut().map(|m| m.as_mut_ptr() as usize as u64).collect();
            // SAFETY: this memory is long enough, outlives the session and is read only once its tensor has landed.
            unsafe { self.session.attach(&addresses, self.stream) }.unwrap();
        }
    }

    fn attach_all(&mut self) {
        self.attach(self.memory.len());
    }

    /// The next event, which comes before long.
    fn next(&mut self) -> Result<Next, Error> {
        match self.session.next(LONG)? {
            Next::Waiting => panic!("nothing landed for {LONG:?}"),
            Next::Landed(tensor) => {
                let index = tensor as usize;
                assert!(!std::mem::replace(&mut self.landed[index], true), "a tensor landed twice");
                if self.slab {
                    let mut own = self.session.take_host(tensor).unwrap();
                    let len = own.len();
                    let filled = own.window();
                    // SAFETY: the tensor has landed, so all of it is filled.
                    self.memory[index][..len].copy_from_slice(unsafe { filled.assume_filled(0, len) });
                    assert!(self.session.take_host(tensor).is_err(), "a tensor's memory is given once");
                }
                Ok(Next::Landed(tensor))
            }
            Next::Done => Ok(Next::Done),
        }
    }

    /// Takes `count` tensors.
    fn take(&mut self, count: usize) {
        for _ in 0..count {
            assert!(matches!(self.next().unwrap(), Next::Landed(_)));
        }
    }

    fn run(&mut self) -> Result<(), Error> {
        while self.next()? != Next::Done {}
        Ok(())
    }

    /// Checks every tensor that has landed.
    #[track_caller]
    fn check(&self, model: &Model, slices: &[(&str, &[Range<u64>])]) {
        let slices: HashMap<_, _> = slices.iter().copied().collect();
        for (tensor, (landed, memory)) in
            self.session.plan().tensors().iter().zip(self.landed.iter().zip(&self.memory))
        {
            let (guard, bytes) = memory.split_last().unwrap();
            assert_eq!(*guard, 0xA5, "{} was written too far", tensor.name);
            if *landed {
                let ranges = slices.get(&*tensor.name).copied().unwrap_or_default();
                assert!(bytes == model.expected(&tensor.name, ranges), "wrong bytes of {}", tensor.name);
            }
        }
    }
}

/// Loads everything and checks it.
#[track_caller]
fn load(model: &Model, plan: &Arc<Plan>, target: &LoadTarget, readers: usize) {
    let mut load = Load::begin(model, plan, target, readers);
    load.attach_all();
    load.run().unwrap();
    assert!(load.landed.iter().all(|landed| *landed));
    load.check(model, &[]);
    let stats = load.session.finish().unwrap();
    assert_eq!((stats.bytes, stats.blocks), (plan.bytes(), plan.blocks().len() as u64));
}

// What may remain of it: nothing

fn threads() -> usize {
    let names = fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
    let names = names.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with("penstock")).count()
}

fn open_files(model: &Model) -> usize {
    let links = fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
    links.filter_map(|fd| fs::read_link(fd.path()).ok()).filter(|to| to.starts_with(model.dir.path())).count()
}

#[track_caller]
fn nothing_remains(model: &Model, target: &LoadTarget) {
    // A thread that was joined leaves the list of threads a moment later.
    eventually("threads have ended", || threads() == 0);
    assert_eq!(open_files(model), 0, "files are open");
    assert_eq!(Arena::usage_all().buffers_taken, 0, "buffers are taken");
    if let LoadTarget::Device(device, _) = target {
        let account = &device.account;
        assert_eq!(account.streams.load(SeqCst), 0, "streams remain");
        assert_eq!(account.fences.load(SeqCst), 0, "fences remain");
        assert_eq!(account.enqueued.load(SeqCst), account.ended.load(SeqCst), "copies are in flight");
    }
}

// The number of readers

#[test]
fn readers_are_added_while_that_pays_and_all_of_them_end() {
    let _alone = alone();
    let model = Model::cached_as(CachePolicy::Bypass);
    // Every read takes long and none slows another, as with a file server far away.
    model.control.delay_us.store(2_000, SeqCst);
    let readers = Readers {
        copies: 2,
        fetches: Bounds { initial: 2, start: 2, least: 1, most: 16 },
        threads: 18,
        per_reader_ranges: false,
    };
    for target in LoadTarget::all() {
        let mut load = Load::begin_within(&model, &model.plan(4 * KIB), &target, readers);
        load.attach_all();
        load.run().unwrap();
        load.check(&model, &[]);
        let stats = load.session.finish().unwrap();
        assert!((3..=16).contains(&stats.readers), "{stats:?}");
        assert!(stats.tried.len() > 1 && stats.tried[0].readers == 2, "{stats:?}");
        drop(load);
        nothing_remains(&model, &target);
    }
}

#[test]
fn a_load_that_ends_while_most_readers_were_never_started_leaves_nothing_behind() {
    let _alone = alone();
    let model = Model::cached_as(CachePolicy::Bypass);
    for target in LoadTarget::all() {
        let fetches = Bounds { initial: 2, start: 2, least: 1, most: 64 };
        let readers = Readers { copies: 1, fetches, threads: 65, per_reader_ranges: false };
        let mut load = Load::begin_within(&model, &model.plan(4 * KIB), &target, readers);
        load.attach(1);
        load.take(1);
        drop(load);
        nothing_remains(&model, &target);
    }
}

#[test]
fn a_load_that_ends_while_readers_are_parked_leaves_none_behind() {
    let _alone = alone();
    let model = Model::new();
    for target in LoadTarget::all() {
        let readers = Readers {
            copies: 1,
            fetches: Bounds { initial: 1, start: 1, least: 1, most: 64 },
            threads: 65,
            per_reader_ranges: false,
        };
        let mut load = Load::begin_within(&model, &model.plan(4 * KIB), &target, readers);
        load.attach(1);
        load.take(1);
        drop(load);
        nothing_remains(&model, &target);
    }
}

// Bytes

#[test]
fn every_byte_arrives_wherever_it_goes_with_any_block_size_and_any_number_of_readers() {
    let _alone = alone();
    for cache in [CachePolicy::Auto, CachePolicy::Bypass] {
        let model = Model::cached_as(cache);
        for target in LoadTarget::all() {
            for block_bytes in [4 * KIB, 1024 * KIB] {
                for readers in [1, 8] {
                    load(&model, &model.plan(block_bytes), &target, readers);
                    nothing_remains(&model, &target);
                }
            }
        }
    }
}

#[test]
fn reads_that_come_in_pieces_and_late_make_no_difference() {
    let _alone = alone();
    let model = Model::new();
    for target in LoadTarget::all() {
        model.control.piecemeal.store(true, SeqCst);
        model.control.delay_us.store(300, SeqCst);
        load(&model, &model.plan(64 * KIB), &target, 8);
    }
}

#[test]
fn slices_of_rows_and_of_columns_arrive_packed() {
    let _alone = alone();
    let model = Model::new();
    let slices: &[(&str, &[Range<u64>])] = &[
        ("large", &[3..637, 100..101]),
        ("matrix", &[0..301, 7..92]),
        ("wide", &[2..7, 1..49_999]),
        ("odd", &[4999..5000]),
        ("small.016", &[4..4]),
    ];
    for target in LoadTarget::all() {
        for block_bytes in [4 * KIB, 1024 * KIB] {
            for readers in [1, 8] {
                let mut load = Load::begin(&model, &model.plan_slices(block_bytes, slices), &target, readers);
                load.attach_all();
                load.run().unwrap();
                load.check(&model, slices);
            }
        }
    }
}

#[test]
fn parts_of_one_tensor_arrive_each_where_it_belongs_even_if_they_interleave_or_overlap() {
    let _alone = alone();
    let model = Model::new();
    let parts: &[(&str, &[Range<u64>])] = &[
        ("wide", &[0..8, 25_000..50_000]),
        ("wide", &[0..8, 0..25_000]),
        ("wide", &[3..5, 20_000..30_000]),
        ("matrix", &[0..301, 60..61]),
        ("matrix", &[0..301, 0..40]),
        ("matrix", &[0..301, 40..130]),
        ("large", &[]),
        ("large", &[600..640]),
        ("large", &[0..640, 0..512]),
    ];
    for target in LoadTarget::all() {
        for block_bytes in [4 * KIB, 1024 * KIB] {
            let wanted = parts.iter().map(|(name, ranges)| {
                let tensor = model.checkpoint.require(name).unwrap();
                (tensor, Selection::of(tensor, ranges).unwrap())
            });
            let plan = Arc::new(Plan::new(wanted.collect(), block_bytes, 512));
            let mut load = Load::begin(&model, &plan, &target, 4);
            load.attach_all();
            load.run().unwrap();
            for (tensor, memory) in plan.tensors().iter().zip(&load.memory) {
                let (name, ranges) = parts[tensor.item];
                let (guard, bytes) = memory.split_last().unwrap();
                assert_eq!((&*tensor.name, *guard), (name, 0xA5));
                assert!(bytes == model.expected(name, ranges), "wrong bytes of {name} {ranges:?}");
            }
            let read = load.session.finish().unwrap().read_bytes;
            let files: usize = model.files.iter().map(Vec::len).sum();
            assert!(
                read <= files as u64 + 8 * KIB,
                "{read} bytes read of {files}: shared bytes are read once"
            );
        }
    }
}

#[test]
fn a_checkpoint_without_bytes_is_done_at_once() {
    let _alone = alone();
    let model = Model::of(&[vec![("empty".to_owned(), Dtype::F32, vec![0])], vec![]], CachePolicy::Auto);
    for target in LoadTarget::all() {
        load(&model, &model.plan(4 * KIB), &target, 8);
        let nothing = Arc::new(Plan::new(Vec::new(), 4 * KIB, 0));
        assert_eq!(Load::begin(&model, &nothing, &target, 8).next().unwrap(), Next::Done);
    }
}

#[test]
fn a_load_that_is_paused_half_way_does_not_keep_another_from_its_end() {
    let _alone = alone();
    let model = Model::new();
    for buffers in [1, 2, 5] {
        let buffer_bytes = usize::try_from(16 * KIB).unwrap() + ALIGNMENT_PADDING;
        let target = LoadTarget::Device(SimulatedDevice::new(), buffers * buffer_bytes);
        let plan = model.plan(16 * KIB);
        let mut outer = Load::begin(&model, &plan, &target, 8);
        let half = plan.tensors().len() / 2;
        outer.attach(half);
        outer.take(1);
        load(&model, &plan, &target, 8);
        outer.attach_all();
        outer.run().unwrap();
        outer.check(&model, &[]);
        drop(outer);
        nothing_remains(&model, &target);
    }
}

// Order

#[test]
fn copies_wait_for_what_the_consumer_was_doing_with_the_memory() {
    let _alone = alone();
    let model = Model::new();
    let device = SimulatedDevice::new();
    let target = LoadTarget::Device(Arc::clone(&device), 16 << 20);
    let plan = model.plan(64 * KIB);
    let mut load = Load::begin(&model, &plan, &target, 4);
    let empty = plan.tensors().iter().filter(|tensor| tensor.bytes() == 0).count();
    let _busy = device.keep_consumer_busy();
    load.attach_all();
    load.take(empty);
    assert_eq!(
        load.session.next(Duration::from_millis(100)).unwrap(),
        Next::Waiting,
        "the memory is still in use"
    );
    assert_eq!(device.account.ended.load(SeqCst), 0);
    device.let_consumer_end();
    load.run().unwrap();
    load.check(&model, &[]);
}

#[test]
fn copies_wait_for_the_last_of_several_attachments() {
    let _alone = alone();
    let model = Model::new();
    let device = SimulatedDevice::new();
    let target = LoadTarget::Device(Arc::clone(&device), 16 << 20);
    let plan = model.plan(64 * KIB);
    let mut load = Load::begin(&model, &plan, &target, 1);
    let early = plan.tensors().iter().position(|tensor| &*tensor.name == "large").unwrap() + 1;
    load.attach(early);
    eventually("the first copies end", || device.account.ended.load(SeqCst) > 20);
    let _busy = device.keep_consumer_busy();
    load.attach_all();
    let late: Vec<_> = load.memory[early..].to_vec();
    std::thread::sleep(Duration::from_millis(50));
    assert!(load.memory[early..] == late[..], "a copy overtook the consumer");
    device.let_consumer_end();
    load.run().unwrap();
    load.check(&model, &[]);
}

#[test]
fn nothing_beyond_the_attached_tensors_is_read() {
    let _alone = alone();
    let model = Model::new();
    for target in LoadTarget::all() {
        for attached in [0, 1, 3, 5, 40] {
            let plan = model.plan(16 * KIB);
            model.control.reset();
            let mut load = Load::begin(&model, &plan, &target, 8);
            load.attach(attached);
            let can_land = plan.attached_to_land().iter().filter(|needed| **needed <= attached).count();
            load.take(can_land);
            assert_eq!(load.session.next(Duration::from_millis(20)).unwrap(), Next::Waiting);
            let end = plan.tensors()[..attached]
                .iter()
                .map(|t| model.checkpoint.require(&t.name).unwrap().range.end);
            let end = end.max().unwrap_or(0);
            let log = model.control.log.lock().unwrap();
            assert!(log.iter().all(|range| range.end <= end), "read {log:?}, attached until {end}");
        }
    }
}

// Failure

/// The tensor whose bytes, or the first of whose bytes, lie in the range.
fn holds(model: &Model, file: &str, tensor: &str, range: &Range<u64>) -> bool {
    let tensor = model.checkpoint.require(tensor).unwrap();
    let place = &tensor.range;
    model.path(tensor.object as usize) == file && place.start < range.end && range.start < place.end
}

/// Runs a load that fails, and checks what is said and what remains.
#[track_caller]
fn fails(model: &Model, plan: &Arc<Plan>, target: &LoadTarget, readers: usize) -> Error {
    let mut failing = Load::begin(model, plan, target, readers);
    failing.attach_all();
    let error = failing.run().unwrap_err();
    let again = failing.next().unwrap_err();
    assert_eq!(again.to_string(), error.to_string(), "there is one failure, and nothing after it");
    failing.check(model, &[]);
    drop(failing);
    nothing_remains(model, target);
    error
}

#[track_caller]
fn names_the_place(model: &Model, error: &Error) {
    let (file, range) = (error.object_name().unwrap(), error.byte_range().unwrap());
    assert!(holds(model, file, error.tensor_name().unwrap(), &range), "{error}");
}

#[test]
fn a_failing_read_is_reported_with_its_place_and_the_next_load_works() {
    let _alone = alone();
    let model = Model::new();
    for target in LoadTarget::all() {
        for (block_bytes, reads) in [(4 * KIB, vec![1, 2, 100, 600]), (1024 * KIB, vec![1, 3])] {
            for readers in [1, 8] {
                for read in &reads {
                    model.control.reset();
                    model.control.fail_at.store(*read, SeqCst);
                    let error = fails(&model, &model.plan(block_bytes), &target, readers);
                    assert_eq!(
                        (error.kind(), error.os_error()),
                        (ErrorKind::Storage, Some(libc::EIO)),
                        "{error}"
                    );
                    names_the_place(&model, &error);
                    model.control.reset();
                    load(&model, &model.plan(block_bytes), &target, readers);
                }
            }
        }
    }
}

#[test]
fn a_failing_read_of_a_load_too_small_for_threads_is_reported_likewise() {
    let _alone = alone();
    let model = Model::of(&[vec![("only".to_owned(), Dtype::U8, vec![100])]], CachePolicy::Auto);
    for target in LoadTarget::all() {
        model.control.reset();
        model.control.fail_at.store(1, SeqCst);
        let error = fails(&model, &model.plan(4 * KIB), &target, 8);
        assert_eq!(error.tensor_name(), Some("only"));
        model.control.reset();
        load(&model, &model.plan(4 * KIB), &target, 8);
    }
}

#[test]
fn a_copy_that_is_refused_is_reported_with_its_place_and_the_next_load_works() {
    let _alone = alone();
    let model = Model::new();
    for readers in [1, 8] {
        for copy in [1, 2, 50] {
            let device = SimulatedDevice::new();
            device.account.refuse_at.store(copy, SeqCst);
            let target = LoadTarget::Device(device, 1 << 20);
            let error = fails(&model, &model.plan(16 * KIB), &target, readers);
            assert_eq!(error.kind(), ErrorKind::Device);
            assert!(error.to_string().contains(&format!("copy {copy} was refused")), "{error}");
            names_the_place(&model, &error);
            load(&model, &model.plan(16 * KIB), &target, readers);
        }
    }
}

#[test]
fn a_copy_that_fails_later_is_reported_with_its_place_and_the_next_load_works() {
    let _alone = alone();
    let model = Model::new();
    for readers in [1, 8] {
        for copy in [1, 2, 50, 200] {
            let device = SimulatedDevice::new();
            device.account.fail_at.store(copy, SeqCst);
            let target = LoadTarget::Device(device, 1 << 20);
            let error = fails(&model, &model.plan(16 * KIB), &target, readers);
            assert_eq!((error.kind(), error.cause()), (ErrorKind::Device, &*format!("copy {copy} failed")));
            names_the_place(&model, &error);
            load(&model, &model.plan(16 * KIB), &target, readers);
        }
    }
}

#[test]
fn a_device_that_gives_no_streams_fails_the_start() {
    let _alone = alone();
    let model = Model::new();
    let device = SimulatedDevice::new();
    device.account.refuse_streams.store(true, SeqCst);
    let target = LoadTarget::Device(device, 1 << 20);
    let started = Session::start(
        Arc::clone(&model.checkpoint),
        model.plan(16 * KIB),
        target.target(),
        Readers::fixed(4),
    );
    assert_eq!(started.err().unwrap().kind(), ErrorKind::Device);
    nothing_remains(&model, &target);
}

#[test]
fn a_reader_that_panics_is_a_failure_and_not_a_hang() {
    let _alone = alone();
    let model = Model::new();
    for target in LoadTarget::all() {
        model.control.reset();
        model.control.panic_at.store(3, SeqCst);
        let error = fails(&model, &model.plan(64 * KIB), &target, 4);
        assert!(error.to_string().contains("a bug of Penstock"), "{error}");
        model.control.reset();
        load(&model, &model.plan(64 * KIB), &target, 4);
    }
}

#[test]
fn a_panic_of_a_load_too_small_for_threads_is_a_failure_likewise() {
    let _alone = alone();
    let model = Model::of(&[vec![("only".to_owned(), Dtype::U8, vec![100])]], CachePolicy::Auto);
    for target in LoadTarget::all() {
        model.control.reset();
        model.control.panic_at.store(1, SeqCst);
        let error = fails(&model, &model.plan(4 * KIB), &target, 8);
        assert!(error.to_string().contains("a bug of Penstock"), "{error}");
        model.control.reset();
        load(&model, &model.plan(4 * KIB), &target, 8);
    }
}

#[test]
fn too_many_destinations_are_refused() {
    let _alone = alone();
    let model = Model::new();
    let plan = model.plan(64 * KIB);
    let mut session = model.start(&plan, Target::Host, 1);
    let addresses = vec![0; plan.tensors().len() + 1];
    // SAFETY: nothing is read, since the attachment is refused.
    let error = unsafe { session.attach(&addresses, 0) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Destination);
    assert_eq!(session.attach_slab(1).unwrap_err().kind(), ErrorKind::Destination);
    let mut slab = model.start(&plan, Target::Slab, 1);
    // SAFETY: as above.
    assert_eq!(unsafe { slab.attach(&[0], 0) }.unwrap_err().kind(), ErrorKind::Destination);
    assert_eq!(slab.take_host(0).unwrap_err().kind(), ErrorKind::Destination, "it has not landed");
}

#[test]
fn what_was_not_taken_when_a_load_was_stopped_is_cancelled_even_if_all_was_delivered() {
    let _alone = alone();
    let model = Model::new();
    let plan = model.plan(64 * KIB);
    let mut session = model.start(&plan, Target::Slab, 1);
    session.attach_slab(plan.tensors().len()).unwrap();
    while !matches!(session.next(Duration::from_secs(10)).unwrap(), Next::Done) {}
    session.take_host(0).unwrap();
    session.canceller().cancel();
    session.stop();
    assert_eq!(session.take_host(1).unwrap_err().kind(), ErrorKind::Cancelled);
}

#[test]
fn addresses_where_no_memory_can_be_are_refused_by_tensor_and_nothing_is_attached() {
    let _alone = alone();
    let model = Model::new();
    let plan = model.plan(64 * KIB);
    for target in LoadTarget::all().into_iter().filter(|target| !matches!(target, LoadTarget::Slab)) {
        for (bad, words) in [
            (0, "has no memory"),
            (8, "has no memory"),
            (u64::MAX - 1, "past the end"),
            (i64::MAX as u64, "past the end"),
        ] {
            let mut load = Load::begin(&model, &plan, &target, 2);
            let wanted = (0..plan.tensors().len()).rev().find(|t| plan.tensors()[*t].bytes() > 1).unwrap();
            let mut addresses: Vec<_> =
                load.memory.iter_mut().map(|memory| memory.as_mut_ptr() as usize as u64).collect();
            addresses[wanted] = bad;
            // SAFETY: nothing is written, since the attachment is refused.
            let error = unsafe { load.session.attach(&addresses, 0) }.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Destination);
            assert_eq!(error.tensor_name(), Some(&*plan.tensors()[wanted].name));
            assert!(error.to_string().contains(words), "{error}");
            assert_eq!(load.session.attached(), 0);
            drop(load.session);
            assert!(load.memory.iter().flatten().all(|byte| *byte == 0xA5), "something was written");
        }
    }
}

// Ending early

#[test]
fn dropping_a_load_half_way_ends_it_at_once_and_leaves_nothing() {
    let _alone = alone();
    let model = Model::new();
    for target in LoadTarget::all() {
        for readers in [1, 8] {
            model.control.reset();
            model.control.delay_us.store(2000, SeqCst);
            let plan = model.plan(16 * KIB);
            let mut half = Load::begin(&model, &plan, &target, readers);
            half.attach_all();
            half.take(3);
            let Load { session, memory, .. } = half;
            let began = Instant::now();
            drop(session);
            let took = began.elapsed();
            assert!(took < Duration::from_millis(200), "dropping took {took:?}");
            let then = memory.clone();
            nothing_remains(&model, &target);
            assert!(memory == then, "something was written afterwards");
            model.control.reset();
            load(&model, &plan, &target, readers);
        }
    }
}

#[test]
fn dropping_a_load_that_waits_for_destinations_or_buffers_ends_it_at_once() {
    let _alone = alone();
    let model = Model::new();
    let target = LoadTarget::Device(SimulatedDevice::new(), 1);
    let plan = model.plan(16 * KIB);
    let mut idle = Load::begin(&model, &plan, &target, 8);
    idle.attach(10);
    std::thread::sleep(Duration::from_millis(30));
    let mut starved = Load::begin(&model, &plan, &target, 8);
    starved.attach_all();
    for load in [idle, starved] {
        let began = Instant::now();
        drop(load.session);
        assert!(began.elapsed() < Duration::from_millis(200), "{:?}", began.elapsed());
    }
    nothing_remains(&model, &target);
}

/// A load all of whose reads but the first two wait, and whoever waits for its tensors in a thread of its own, until
/// `cancel` has been called; returns what that thread was told.
#[track_caller]
fn cancelled_meanwhile(model: &Model, load: &mut Load) -> Error {
    model.control.wait_for_reads(3);
    let canceller = load.session.canceller();
    assert!(!canceller.is_cancelled());
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            loop {
                match load.session.next(LONG) {
                    Ok(Next::Landed(_)) => {}
                    Ok(other) => panic!("{other:?}: nobody said that the load was cancelled"),
                    Err(error) => return error,
                }
            }
        });
        canceller.cancel();
        waiter.join().unwrap()
    })
}

#[test]
fn a_load_cancelled_by_another_thread_wakes_whoever_waits_for_it_while_reads_hang() {
    let _alone = alone();
    let model = Model::new();
    for target in LoadTarget::all() {
        for readers in [1, 8] {
            model.control.reset();
            // The first two of one reader, and so of several.
            model.control.block_from.store(3, SeqCst);
            let mut load = Load::begin(&model, &model.plan(16 * KIB), &target, readers);
            load.attach(load.memory.len() - 1);
            let error = cancelled_meanwhile(&model, &mut load);
            assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
            // As is whoever gives it more to do.
            let attached = match target {
                LoadTarget::Slab => load.session.attach_slab(1),
                // SAFETY: refused, so nothing is written there.
                _ => unsafe { load.session.attach(&[0], 0) },
            };
            assert_eq!(attached.unwrap_err().kind(), ErrorKind::Cancelled);
            assert_eq!(load.session.ended_early().unwrap().kind(), ErrorKind::Cancelled);
            model.control.release();
            drop(load);
            nothing_remains(&model, &target);
        }
    }
}

#[test]
fn a_load_that_was_stopped_says_so_whoever_asks_afterwards() {
    let _alone = alone();
    let model = Model::new();
    for target in LoadTarget::all() {
        let plan = model.plan(16 * KIB);
        let mut stopped = Load::begin(&model, &plan, &target, 4);
        stopped.attach_all();
        stopped.take(2);
        stopped.session.stop();
        assert_eq!(stopped.session.next(LONG).unwrap_err().kind(), ErrorKind::Cancelled);
        drop(stopped);
        nothing_remains(&model, &target);
        // One that came to its end is none that was cancelled.
        let mut whole = Load::begin(&model, &plan, &target, 4);
        whole.attach_all();
        whole.run().unwrap();
        whole.session.finish().unwrap();
        assert_eq!(whole.session.next(LONG).unwrap(), Next::Done);
        assert!(whole.session.ended_early().is_none());
    }
}

#[test]
fn a_load_too_small_for_threads_is_cancelled_likewise() {
    let _alone = alone();
    let model = Model::of(
        &[vec![("a".to_owned(), Dtype::U8, vec![400 << 10]), ("b".to_owned(), Dtype::U8, vec![100])]],
        CachePolicy::Auto,
    );
    let mut load = Load::begin(&model, &model.plan(1024 * KIB), &LoadTarget::Slab, 4);
    load.attach_all();
    load.session.canceller().cancel();
    assert_eq!(load.session.next(LONG).unwrap_err().kind(), ErrorKind::Cancelled);
}

#[test]
fn readers_that_were_not_started_begin_however_busy_the_consumer_is() {
    let _alone = alone();
    let model = Model::cached_as(CachePolicy::Bypass);
    model.control.delay_us.store(20_000, SeqCst);
    let fetches = Bounds { initial: 1, start: 1, least: 1, most: 12 };
    let readers = Readers { copies: 1, fetches, threads: 13, per_reader_ranges: false };
    for target in LoadTarget::all() {
        let mut load = Load::begin_within(&model, &model.plan(4 * KIB), &target, readers);
        load.attach_all();
        // Nobody takes what lands.
        eventually("the others are started", || threads() > 2);
        drop(load);
        nothing_remains(&model, &target);
    }
}

// The consumer's thread

#[test]
fn a_device_is_never_made_current_on_the_thread_of_the_consumer() {
    let _alone = alone();
    let model = Model::new();
    let plan = model.plan(64 * KIB);
    for ending in ["whole", "stopped", "failed", "refused"] {
        let device = SimulatedDevice::new();
        let target = LoadTarget::Device(Arc::clone(&device), 1 << 20);
        match ending {
            "failed" => device.account.fail_at.store(2, SeqCst),
            "refused" => device.account.refuse_streams.store(true, SeqCst),
            _ => {}
        }
        if ending == "refused" {
            let readers = Readers::fixed(4);
            assert!(
                Session::start(Arc::clone(&model.checkpoint), plan.clone(), target.target(), readers)
                    .is_err()
            );
        } else {
            let mut load = Load::begin(&model, &plan, &target, 4);
            load.attach_all();
            if ending == "stopped" {
                load.take(2);
                load.session.stop();
            } else {
                assert_eq!(load.run().is_ok(), ending == "whole");
            }
        }
        let bound = device.account.bound.lock().unwrap();
        assert!(!bound.contains(&std::thread::current().id()), "{ending}");
    }
}

// What is cached

#[test]
fn what_of_a_block_is_cached_is_asked_once_however_many_requests_read_it() {
    let _alone = alone();
    let settings = Settings {
        request_bytes: 16 * KIB,
        ..Settings::choose(&Config::default(), &Storage::unknown(), true)
    };
    for (cache, silent, told) in [
        (CachePolicy::Use, false, Some(true)),
        (CachePolicy::Bypass, false, Some(false)),
        (CachePolicy::Auto, true, None),
    ] {
        let model = Model::cached_as(cache);
        for target in LoadTarget::all() {
            model.control.reset();
            model.control.silent.store(silent, SeqCst);
            let plan = model.plan(64 * KIB);
            let mut load = Load::begin(&model, &plan, &target, 3);
            load.session.on_storage(&Storage::unknown(), &settings);
            load.attach_all();
            load.run().unwrap();
            load.check(&model, &[]);
            assert_eq!(model.control.asked_cached.load(SeqCst), plan.blocks().len());
            let reads = model.control.told_cached.lock().unwrap();
            assert!(
                reads.len() >= plan.blocks().len() && reads.iter().all(|cached| *cached == told),
                "{reads:?}"
            );
        }
    }
}

#[test]
fn a_store_that_maps_less_than_the_object_is_refused() {
    let model = Model::new();
    let all: Vec<_> = (0..model.checkpoint.tensors().len()).collect();
    assert!(Mapped::new(Arc::clone(&model.checkpoint), &all).is_ok());
    model.control.maps_less.store(true, SeqCst);
    let error = Mapped::new(Arc::clone(&model.checkpoint), &all).err().unwrap();
    assert_eq!((error.kind(), error.object_name()), (ErrorKind::Storage, Some(&*model.path(0))), "{error}");
}

// Files that change

/// Makes sure that the next write has another time than the last.
fn a_moment_later() {
    std::thread::sleep(Duration::from_millis(20));
}

fn replace(model: &Model, file: usize) {
    let other = model.dir.path().join("other");
    fs::write(&other, &model.files[file]).unwrap();
    fs::rename(&other, model.path(file)).unwrap();
}

fn truncate(model: &Model, file: usize) {
    fs::File::options().write(true).open(model.path(file)).unwrap().set_len(100_000).unwrap();
}

fn rewrite(model: &Model, file: usize) {
    a_moment_later();
    fs::write(model.path(file), &model.files[file]).unwrap();
}

#[test]
fn a_file_that_changed_since_the_checkpoint_was_opened_is_not_loaded() {
    let _alone = alone();
    for change in [replace, truncate, rewrite] {
        for target in LoadTarget::all() {
            let model = Model::new();
            change(&model, 1);
            let error = fails(&model, &model.plan(64 * KIB), &target, 4);
            assert_eq!(
                (error.kind(), error.object_name()),
                (ErrorKind::Changed, Some(&*model.path(1))),
                "{error}"
            );
        }
    }
}

#[test]
fn a_file_that_vanished_since_the_checkpoint_was_opened_is_not_found() {
    let _alone = alone();
    let model = Model::new();
    fs::remove_file(model.path(1)).unwrap();
    let error = fails(&model, &model.plan(64 * KIB), &LoadTarget::Slab, 4);
    assert_eq!((error.kind(), error.object_name()), (ErrorKind::NotFound, Some(&*model.path(1))), "{error}");
}

#[test]
fn a_file_that_is_truncated_during_the_load_fails_it() {
    let _alone = alone();
    for target in LoadTarget::all() {
        for readers in [1, 8] {
            let model = Model::new();
            model.control.block_from.store(3, SeqCst);
            let mut load = Load::begin(&model, &model.plan(64 * KIB), &target, readers);
            load.attach_all();
            model.control.wait_for_reads(3);
            truncate(&model, 0);
            model.control.release();
            let error = load.run().unwrap_err();
            assert_eq!(
                (error.kind(), error.object_name()),
                (ErrorKind::Changed, Some(&*model.path(0))),
                "{error}"
            );
            names_the_place(&model, &error);
            drop(load);
            nothing_remains(&model, &target);
        }
    }
}

#[test]
fn a_file_that_is_replaced_or_rewritten_during_the_load_fails_its_end() {
    let _alone = alone();
    for change in [replace, rewrite] {
        for target in LoadTarget::all() {
            let model = Model::new();
            model.control.block_from.store(3, SeqCst);
            let mut load = Load::begin(&model, &model.plan(64 * KIB), &target, 4);
            load.attach_all();
            model.control.wait_for_reads(3);
            change(&model, 0);
            model.control.release();
            load.run().unwrap();
            let error = load.session.finish().unwrap_err();
            assert_eq!(
                (error.kind(), error.object_name()),
                (ErrorKind::Changed, Some(&*model.path(0))),
                "{error}"
            );
            drop(load);
            nothing_remains(&model, &target);
        }
    }
}

#[test]
fn a_file_that_is_deleted_during_the_load_is_still_read() {
    let _alone = alone();
    let model = Model::new();
    model.control.block_from.store(3, SeqCst);
    let mut load = Load::begin(
        &model,
        &Arc::new(Plan::new(
            vec![{
                let tensor = model.checkpoint.require("large").unwrap();
                (tensor, Selection::all(tensor))
            }],
            64 * KIB,
            0,
        )),
        &LoadTarget::Slab,
        4,
    );
    load.attach_all();
    model.control.wait_for_reads(3);
    fs::remove_file(model.path(0)).unwrap();
    model.control.release();
    load.run().unwrap();
    load.check(&model, &[]);
    load.session.finish().unwrap();
}

#[test]
fn copies_wait_for_every_stream_under_which_memory_was_attached() {
    let _alone = alone();
    let model = Model::new();
    let device = SimulatedDevice::new();
    let target = LoadTarget::Device(Arc::clone(&device), 16 << 20);
    let plan = model.plan(64 * KIB);
    let mut load = Load::begin(&model, &plan, &target, 1);
    let first = plan.tensors().iter().position(|tensor| tensor.bytes() > 0).unwrap() + 1;
    let busy = device.keep_consumer_busy();
    load.attach(first);
    // Another stream, whose work ends at once.
    load.stream = 1;
    let _busy = device.keep_consumer_busy();
    load.attach_all();
    device.let_consumer_end();
    std::thread::sleep(Duration::from_millis(200));
    let untouched = load.memory[first - 1].iter().all(|byte| *byte == 0xA5);
    busy.open();
    assert!(untouched, "a copy overtook the consumer's work in the first stream");
    load.run().unwrap();
    load.check(&model, &[]);
    load.session.finish().unwrap();
}
