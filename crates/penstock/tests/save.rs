//! Saves: bytes of host memory and of a device that copies late, to files, by many writers; and how saves end.
#![allow(unsafe_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

#[path = "pipeline/simulated_device.rs"]
#[allow(dead_code)]
mod simulated_device;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use penstock::device::{Device, DeviceBytes, SourceBytes, SourceDevice};
use penstock::manifest::{MANIFEST_NAME, Manifest};
use penstock::memory::HostBytes;
use penstock::save::Save;
use penstock::store::sink::{LocalSink, Sink, SinkObject};
use penstock::{Code, Error, ErrorKind, Result};

use simulated_device::SimulatedDevice;

fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 31 + seed * 7 + i / 251) % 253) as u8).collect()
}

fn host(of: &[u8]) -> SourceBytes {
    // SAFETY: tests keep what they save.
    SourceBytes::Host(unsafe { HostBytes::new(of.as_ptr(), of.len()) })
}

fn on_device(of: &[u8]) -> SourceBytes {
    // SAFETY: as above; the device's memory is ordinary memory.
    SourceBytes::Device(unsafe { DeviceBytes::new(0, of.as_ptr() as usize as u64, of.len()) })
}

fn device() -> (Arc<SimulatedDevice>, SourceDevice) {
    let device = SimulatedDevice::new();
    let fence = device.fence(0).unwrap();
    (Arc::clone(&device), (device as Arc<dyn Device>, fence))
}

fn sink(place: &Path) -> Arc<dyn Sink> {
    Arc::new(LocalSink::create(place, true, false, true).unwrap())
}

fn written(save: &Save, file: usize) {
    while !save.wait_for(file, Duration::from_secs(1)).unwrap() {}
}

#[test]
fn bytes_of_a_device_and_of_the_host_are_written_in_their_order() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("m");
    let (device, saved) = device();
    // Around the borders of parts, blocks and pages; in one file larger than what is written past the page cache.
    let lens = [1, 4095, 4096, 4097, (1 << 20) + 3, 9 << 20, 0, (4 << 20) - 1, 5 << 20, 77];
    let pieces: Vec<_> = lens.iter().enumerate().map(|(seed, len)| bytes(*len, seed)).collect();
    let mut save = Save::new(sink(&place), vec![saved], Some(4), true);
    let mut whole = Vec::new();
    for number in 0..2 {
        let of = |(i, piece): (usize, &Vec<u8>)| {
            if (i + number) % 3 == 0 { host(piece) } else { on_device(piece) }
        };
        let mut sources = vec![SourceBytes::Owned(b"the header".to_vec())];
        sources.extend(pieces.iter().enumerate().map(of));
        let file = save.add(&format!("f{number}"), sources).unwrap();
        written(&save, file);
    }
    whole.extend_from_slice(b"the header");
    pieces.iter().for_each(|piece| whole.extend_from_slice(piece));
    assert!(!place.exists());
    let published = save.publish(Some(("index", b"last"))).unwrap();
    for number in 0..2 {
        assert!(std::fs::read(place.join(format!("f{number}"))).unwrap() == whole, "file {number}");
    }
    let names: Vec<_> = published.iter().map(|file| &*file.name).collect();
    assert_eq!(names, ["f0", "f1", "index", MANIFEST_NAME]);
    assert_eq!(published[0].root.as_ref(), Some(blake3::hash(&whole).as_bytes()));
    let manifest = Manifest::parse(&std::fs::read(place.join(MANIFEST_NAME)).unwrap()).unwrap();
    assert_eq!(manifest.file("index").unwrap().root(), blake3::hash(b"last").as_bytes());
    assert_eq!((device.account.streams.load(SeqCst), device.account.fences.load(SeqCst)), (0, 0));
    assert!(device.pinning.made.load(SeqCst) > 0, "the staging memory was not pinned");
}

#[test]
fn copies_wait_for_what_was_queued_before_the_save() {
    let directory = tempfile::tempdir().unwrap();
    let device = SimulatedDevice::new();
    let work = device.keep_consumer_busy();
    let fence = device.fence(0).unwrap();
    let mut tensor = bytes(3 << 20, 1);
    let mut save =
        Save::new(sink(&directory.path().join("m")), vec![(Arc::clone(&device) as _, fence)], Some(2), false);
    let file = save.add("f", vec![on_device(&tensor)]).unwrap();
    assert!(!save.wait_for(file, Duration::from_millis(50)).unwrap());
    assert_eq!(save.written(), 0);
    // What the consumer's stream does last. The save has not read any of it.
    tensor.fill(9);
    work.open();
    written(&save, file);
    save.publish(None).unwrap();
    assert!(std::fs::read(directory.path().join("m/f")).unwrap() == tensor);
}

#[test]
fn a_copy_that_fails_ends_the_save_and_leaves_nothing() {
    let tensor = bytes(40 << 20, 2);
    for (refuse_at, fail_at) in [(3, 0), (0, 3), (1, 0), (0, 1)] {
        let directory = tempfile::tempdir().unwrap();
        let (device, saved) = device();
        device.account.refuse_at.store(refuse_at, SeqCst);
        device.account.fail_at.store(fail_at, SeqCst);
        let mut save = Save::new(sink(&directory.path().join("m")), vec![saved], Some(3), false);
        let file = save.add("f", vec![on_device(&tensor)]).unwrap();
        let error = loop {
            match save.wait_for(file, Duration::from_secs(5)) {
                Ok(done) => assert!(!done),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::Device, "{error}");
        drop(save);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        let account = &device.account;
        assert_eq!((account.streams.load(SeqCst), account.fences.load(SeqCst)), (0, 0));
    }
}

/// A sink that fails at one of its calls, and counts.
struct Failing {
    fails_at: usize,
    calls: AtomicUsize,
    published: AtomicUsize,
    discarded: AtomicUsize,
}

struct FailingObject(Arc<Failing>);

impl Failing {
    fn call(&self) -> Result<()> {
        match self.calls.fetch_add(1, SeqCst) + 1 == self.fails_at {
            true => Err(Error::new(ErrorKind::Storage, "not this one").code(Code::Throttled)),
            false => Ok(()),
        }
    }
}

struct Handle(Arc<Failing>);

impl Sink for Handle {
    fn location(&self) -> &str {
        "nowhere"
    }

    fn begin(&self, _: &str, _: u64) -> Result<Arc<dyn SinkObject>> {
        self.0.call()?;
        Ok(Arc::new(FailingObject(Arc::clone(&self.0))))
    }

    fn put(&self, _: &str, _: &[u8]) -> Result<()> {
        self.0.call()
    }

    fn publish(&self) -> Result<()> {
        self.0.call()?;
        self.0.published.fetch_add(1, SeqCst);
        Ok(())
    }

    fn discard(&self) {
        self.0.discarded.fetch_add(1, SeqCst);
    }

    fn writers(&self) -> usize {
        3
    }
}

impl SinkObject for FailingObject {
    fn part_bytes(&self) -> u64 {
        1 << 20
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<()> {
        self.0.call()
    }

    fn finish(&self) -> Result<()> {
        self.0.call()
    }
}

#[test]
fn whatever_call_of_the_sink_fails_the_save_fails_with_that_and_discards_everything_once() {
    let tensor = bytes(5 << 20, 3);
    let run = |fails_at: usize| {
        let failing = Arc::new(Failing {
            fails_at,
            calls: AtomicUsize::new(0),
            published: AtomicUsize::new(0),
            discarded: AtomicUsize::new(0),
        });
        let done = || -> Result<()> {
            let mut save = Save::new(Arc::new(Handle(Arc::clone(&failing))), Vec::new(), None, true);
            for name in ["a", "b"] {
                save.add(name, vec![host(&tensor)])?;
            }
            for file in 0..2 {
                while !save.wait_for(file, Duration::from_secs(1))? {}
            }
            save.publish(Some(("last", b"x"))).map(drop)
        };
        (done(), failing)
    };
    let (done, whole) = run(0);
    done.unwrap();
    let calls = whole.calls.load(SeqCst);
    assert_eq!((whole.published.load(SeqCst), whole.discarded.load(SeqCst)), (1, 0));
    // Two begun, five parts and an end each, a manifest, an index, the last step.
    assert_eq!(calls, 2 * 7 + 3);
    for fails_at in 1..=calls {
        let (done, failing) = run(fails_at);
        let error = done.unwrap_err();
        assert_eq!(
            (error.kind(), error.error_code()),
            (ErrorKind::Storage, Code::Throttled),
            "call {fails_at}"
        );
        let ends = (failing.published.load(SeqCst), failing.discarded.load(SeqCst));
        assert_eq!(ends, (0, 1), "call {fails_at}");
    }
}

#[test]
fn a_file_without_bytes_and_a_larger_one_after_smaller_ones_are_written() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("m");
    let mut save = Save::new(sink(&place), Vec::new(), Some(2), true);
    let (small, large) = (bytes(10, 1), bytes(20 << 20, 2));
    save.add("empty", Vec::new()).unwrap();
    save.add("small", vec![host(&small), host(&small)]).unwrap();
    save.add("large", vec![host(&small), host(&large)]).unwrap();
    for file in 0..3 {
        written(&save, file);
    }
    assert_eq!(save.written(), 20 + 10 + (20 << 20));
    save.publish(None).unwrap();
    assert_eq!(std::fs::read(place.join("empty")).unwrap(), b"");
    assert_eq!(std::fs::read(place.join("small")).unwrap(), [&small[..], &small].concat());
    assert!(std::fs::read(place.join("large")).unwrap() == [&small[..], &large].concat());
}
