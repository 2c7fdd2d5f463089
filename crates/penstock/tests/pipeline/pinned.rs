//! Objects whose bytes lie in pinned memory already: a load to a device copies from there, and neither reads nor stages.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use penstock::Result;
use penstock::checkpoint::Checkpoint;
use penstock::memory::{Arena, PinnedSpan, Window};
use penstock::store::{CachePolicy, Entry, Identity, LocalStore, Object, ReadContext, Store};

use super::simulated_device::SimulatedDevice;
use super::{Load, LoadTarget, Model, alone, nothing_remains};

/// Local files, all of whose bytes it keeps in memory.
#[derive(Default)]
struct PinningStore {
    inner: LocalStore,
    kept: Arc<Mutex<HashMap<String, Arc<Vec<u8>>>>>,
    reads: Arc<AtomicUsize>,
}

struct PinnedObject {
    object: Arc<dyn Object>,
    bytes: Arc<Vec<u8>>,
    reads: Arc<AtomicUsize>,
}

impl Store for PinningStore {
    fn open(&self, location: &str) -> Result<Arc<dyn Object>> {
        let object = self.inner.open(location)?;
        let read = || Arc::new(std::fs::read(location).unwrap());
        let bytes = Arc::clone(self.kept.lock().unwrap().entry(location.to_owned()).or_insert_with(read));
        Ok(Arc::new(PinnedObject { object, bytes, reads: Arc::clone(&self.reads) }))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        self.inner.list(prefix)
    }

    fn directories(&self, prefix: &str) -> Vec<String> {
        self.inner.directories(prefix)
    }
}

impl Object for PinnedObject {
    fn location(&self) -> &str {
        self.object.location()
    }

    fn bytes(&self) -> u64 {
        self.object.bytes()
    }

    fn identity(&self) -> Identity {
        self.object.identity()
    }

    fn read_into(&self, offset: u64, into: Window<'_>, cx: &mut ReadContext) -> Result<()> {
        self.reads.fetch_add(1, SeqCst);
        self.object.read_into(offset, into, cx)
    }

    fn read_to_staging(&self, range: Range<u64>, buffer: Window<'_>, cx: &mut ReadContext) -> Result<usize> {
        self.reads.fetch_add(1, SeqCst);
        self.object.read_to_staging(range, buffer, cx)
    }

    fn pinned(&self, range: &Range<u64>) -> Option<PinnedSpan> {
        let lies = &self.bytes[usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()];
        // SAFETY: the vector stays as long as its owner, and nobody writes to it. The simulated device copies from anywhere.
        Some(unsafe { PinnedSpan::new(lies.as_ptr(), lies.len(), Arc::clone(&self.bytes) as _) })
    }

    fn verify_unchanged(&self) -> Result<()> {
        self.object.verify_unchanged()
    }
}

#[test]
fn what_is_pinned_already_is_neither_read_nor_staged_and_is_kept_until_its_copies_end() {
    let _alone = alone();
    let mut model = Model::cached_as(CachePolicy::Auto);
    let store = PinningStore::default();
    let (kept, reads) = (Arc::clone(&store.kept), Arc::clone(&store.reads));
    let at = model.dir.path().to_str().unwrap().to_owned();
    model.checkpoint = Arc::new(Checkpoint::open(Arc::new(store), &[at]).unwrap());
    for (block, slices) in [(4 << 10, false), (1 << 20, false), (4 << 10, true)] {
        Arena::release_all();
        reads.store(0, SeqCst);
        let some: &[(&str, &[Range<u64>])] = if slices { &[("wide", &[2..7, 100..40_000])] } else { &[] };
        let target = LoadTarget::Device(SimulatedDevice::new(), 16 << 20);
        let mut load = Load::begin(&model, &model.plan_slices(block, some), &target, 3);
        load.attach_all();
        load.run().unwrap();
        load.check(&model, some);
        let stats = load.session.finish().unwrap();
        assert_eq!((reads.load(SeqCst), stats.read_bytes, Arena::usage_all().bytes), (0, 0, 0), "{stats:?}");
        drop(load);
        nothing_remains(&model, &target);
    }
    drop(model);
    for bytes in kept.lock().unwrap().values() {
        assert_eq!(Arc::strong_count(bytes), 1, "a span outlived its load");
    }
}
