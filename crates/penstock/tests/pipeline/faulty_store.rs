//! A store that fails, dawdles, waits or panics when told to, over real files.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use penstock::memory::{FileMapping, Window};
use penstock::store::{Entry, Identity, LocalStore, Object, ReadContext, Store};
use penstock::{Error, Result};

/// What the store does; shared with the test, changed at any time.
#[derive(Default)]
pub struct Control {
    /// Reads begun since the last [`Control::reset`].
    pub reads: AtomicUsize,
    /// The read, counted from 1, that fails with `EIO`.
    pub fail_at: AtomicUsize,
    /// The read, counted from 1, that panics.
    pub panic_at: AtomicUsize,
    /// The read, counted from 1, from which on reads wait until [`Control::release`].
    pub block_from: AtomicUsize,
    /// How long every read takes at least.
    pub delay_us: AtomicU64,
    /// Whether reads come in small pieces, and to an odd place of a buffer.
    pub piecemeal: AtomicBool,
    /// Whether objects cannot tell what of them is cached.
    pub silent: AtomicBool,
    /// How often objects were asked, and what reads were told of the answer.
    pub asked_cached: AtomicUsize,
    pub told_cached: Mutex<Vec<Option<bool>>>,
    /// Whether objects map less than they hold.
    pub maps_less: AtomicBool,
    /// The ranges that were read.
    pub log: Mutex<Vec<Range<u64>>>,
    /// The ranges that were asked to be read ahead, none of which is ever there before.
    pub asked: Mutex<Vec<Range<u64>>>,
    /// How often somebody asked where an object lies.
    pub located: AtomicUsize,
    gate: Mutex<bool>,
    opened: Condvar,
}

impl Control {
    /// Forgets reads and faults.
    pub fn reset(&self) {
        for number in [&self.reads, &self.fail_at, &self.panic_at, &self.block_from, &self.located] {
            number.store(0, SeqCst);
        }
        self.delay_us.store(0, SeqCst);
        self.piecemeal.store(false, SeqCst);
        self.silent.store(false, SeqCst);
        self.asked_cached.store(0, SeqCst);
        self.told_cached.lock().unwrap().clear();
        self.log.lock().unwrap().clear();
        self.asked.lock().unwrap().clear();
        *self.gate.lock().unwrap() = false;
    }

    /// Lets waiting reads go on.
    pub fn release(&self) {
        *self.gate.lock().unwrap() = true;
        self.opened.notify_all();
    }

    /// Waits until at least `reads` reads have begun.
    pub fn wait_for_reads(&self, reads: usize) {
        super::eventually("reads begin", || self.reads.load(SeqCst) >= reads);
    }

    fn before(&self, location: &str, range: Range<u64>) -> Result<()> {
        let number = self.reads.fetch_add(1, SeqCst) + 1;
        self.log.lock().unwrap().push(range.clone());
        let is = |asked: &AtomicUsize| asked.load(SeqCst) == number;
        let from = self.block_from.load(SeqCst);
        if from != 0 && number >= from {
            let closed = self.gate.lock().unwrap();
            drop(self.opened.wait_while(closed, |open| !*open).unwrap());
        }
        std::thread::sleep(Duration::from_micros(self.delay_us.load(SeqCst)));
        assert!(!is(&self.panic_at), "told to panic");
        if is(&self.fail_at) {
            let error = std::io::Error::from_raw_os_error(libc::EIO);
            return Err(Error::from_io("reading", &error).object(location).range(range));
        }
        Ok(())
    }
}

/// The store.
#[derive(Default)]
pub struct FaultyStore {
    pub inner: LocalStore,
    pub control: Arc<Control>,
}

impl Store for FaultyStore {
    fn open(&self, location: &str) -> Result<Arc<dyn Object>> {
        let object = self.inner.open(location)?;
        Ok(Arc::new(FaultyObject { object, control: Arc::clone(&self.control) }))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        self.inner.list(prefix)
    }

    fn directories(&self, prefix: &str) -> Vec<String> {
        self.inner.directories(prefix)
    }

    fn file_of(&self, location: &str, identity: &Identity) -> Option<PathBuf> {
        self.control.located.fetch_add(1, SeqCst);
        self.inner.file_of(location, identity)
    }
}

struct FaultyObject {
    object: Arc<dyn Object>,
    control: Arc<Control>,
}

impl Object for FaultyObject {
    fn location(&self) -> &str {
        self.object.location()
    }

    fn bytes(&self) -> u64 {
        self.object.bytes()
    }

    fn identity(&self) -> Identity {
        self.object.identity()
    }

    fn is_cached(&self, range: &Range<u64>) -> Option<bool> {
        self.control.asked_cached.fetch_add(1, SeqCst);
        if self.control.silent.load(SeqCst) { None } else { self.object.is_cached(range) }
    }

    fn map(&self) -> Result<FileMapping> {
        if self.control.maps_less.load(SeqCst) {
            return FileMapping::map(std::fs::File::open(self.location()).unwrap(), self.bytes() - 1);
        }
        self.object.map()
    }

    fn prefetch(&self, range: Range<u64>) -> bool {
        self.control.asked.lock().unwrap().push(range);
        true
    }

    fn read_into(&self, offset: u64, mut into: Window<'_>, cx: &mut ReadContext) -> Result<()> {
        self.control.told_cached.lock().unwrap().push(cx.cached);
        self.control.before(self.location(), offset..offset + into.len() as u64)?;
        if !self.control.piecemeal.load(SeqCst) {
            return self.object.read_into(offset, into, cx);
        }
        let mut done = 0;
        while done < into.len() {
            let piece = (into.len() - done).min(1 + done * 7 % 70_001);
            self.object.read_into(offset + done as u64, into.part(done, piece), cx)?;
            done += piece;
            std::thread::yield_now();
        }
        Ok(())
    }

    fn read_to_staging(
        &self,
        range: Range<u64>,
        mut buffer: Window<'_>,
        cx: &mut ReadContext,
    ) -> Result<usize> {
        if self.control.piecemeal.load(SeqCst) {
            const ODD: usize = 4097;
            let len = usize::try_from(range.end - range.start).unwrap();
            self.read_into(range.start, buffer.part(ODD, len), cx)?;
            return Ok(ODD);
        }
        self.control.told_cached.lock().unwrap().push(cx.cached);
        self.control.before(self.location(), range.clone())?;
        self.object.read_to_staging(range, buffer, cx)
    }

    fn verify_unchanged(&self) -> Result<()> {
        self.object.verify_unchanged()
    }
}
