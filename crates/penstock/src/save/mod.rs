//! Bytes of memory brought to a [`Sink`]: many writers, copies from devices while others write, hashes on the way.
//!
//! A [`Save`] is given files one after the other, each as pieces of memory in the order of its bytes. Files are cut into the
//! sink's parts (`parts`). A writer takes a part, brings its bytes together where they do not lie together, hashes its blocks
//! if there is to be a manifest, and writes it. What lies together in host memory already is written from where it is.
//!
//! Promises: nothing is visible before [`Save::publish`]. After a failure, a cancel or a drop the sink has discarded what it
//! had, and no writer runs. The memory of a file is not touched any more once [`Save::wait_for`] has said that it is written,
//! or the save has ended.
//!
//! Knows neither tensors nor headers.

mod parts;

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::device::{Gatherer, SourceBytes, SourceDevice};
use crate::error::{Error, ErrorKind, Result};
use crate::manifest::{self, BLOCK_BYTES, FileHashes, MANIFEST_NAME, Manifest, block_values};
use crate::memory::{Lease, Owner};
use crate::store::sink::{DIRECT_ALIGNMENT, Sink};
use crate::threads::not_started;

use parts::{Part, Queue, SavedFile};

/// Staging memory of a save, at most, where devices take part.
const STAGING_BYTES: usize = 512 << 20;
/// Pieces that are shorter on average are brought together before they are written: a copy costs less than a call.
const SHORT_PIECE: usize = 64 << 10;
/// The largest part that any sink has; buffers are made for those that the files at hand need.
const LARGEST_PART: u64 = 1 << 30;

/// A save under way.
pub struct Save {
    sink: Arc<dyn Sink>,
    queue: Arc<Queue>,
    devices: Arc<Vec<SourceDevice>>,
    with_manifest: bool,
    most_writers: usize,
    writers: Vec<JoinHandle<()>>,
    files: Vec<Arc<SavedFile>>,
    lease: Option<Arc<Lease>>,
    buffer_bytes: usize,
    owner: Owner,
    ended: bool,
}

impl Save {
    /// Begins a save to `sink`, with at most `writers` threads (what the sink says where nothing is given). `devices` are those
    /// that pieces may lie on. `with_manifest` has a manifest made of what is written.
    pub fn new(
        sink: Arc<dyn Sink>,
        devices: Vec<SourceDevice>,
        writers: Option<usize>,
        with_manifest: bool,
    ) -> Self {
        let most_writers = writers.unwrap_or_else(|| sink.writers()).max(1);
        Self {
            sink,
            queue: Arc::default(),
            devices: Arc::new(devices),
            with_manifest,
            most_writers,
            writers: Vec::new(),
            files: Vec::new(),
            lease: None,
            buffer_bytes: 0,
            owner: Owner::current(),
            ended: false,
        }
    }

    /// Adds the file `name`, made of these pieces, and returns its number. Its parts are written from now on.
    ///
    /// # Errors
    /// What the sink says of a new object; `Memory` where no thread can be started; what ended the save before.
    pub fn add(&mut self, name: &str, pieces: Vec<SourceBytes>) -> Result<usize> {
        self.check()?;
        let bytes = pieces.iter().map(|piece| piece.len() as u64).sum();
        let object = self.sink.begin(name, bytes)?;
        let part_bytes = object.part_bytes().min(LARGEST_PART);
        let file = Arc::new(SavedFile::new(name, bytes, part_bytes, pieces, object));
        let largest = bytes.min(part_bytes);
        let buffer = usize::try_from(largest).unwrap_or(usize::MAX).next_multiple_of(DIRECT_ALIGNMENT);
        self.start_writers(buffer, file.parts())?;
        self.files.push(Arc::clone(&file));
        self.queue.push(&file);
        Ok(self.files.len() - 1)
    }

    /// Has enough writers for so many parts, with buffers that are large enough.
    fn start_writers(&mut self, buffer_bytes: usize, parts: u64) -> Result<()> {
        if buffer_bytes > self.buffer_bytes && !self.writers.is_empty() {
            // A larger file than those before: they end with what is queued, and others go on.
            self.queue.close();
            self.writers.drain(..).for_each(|writer| drop(writer.join()));
            self.check()?;
            self.queue.reopen();
        }
        if self.writers.is_empty() {
            self.buffer_bytes = buffer_bytes.max(self.buffer_bytes);
            self.lease = self.devices.first().map(|(device, _)| {
                let wanted = self.most_writers;
                Arc::new(Lease::begin(self.buffer_bytes, STAGING_BYTES, wanted, device.pinning()))
            });
        }
        let wanted = self.most_writers.min(usize::try_from(parts).unwrap_or(usize::MAX)).max(1);
        while self.writers.len() < wanted {
            let (queue, devices, lease) =
                (Arc::clone(&self.queue), Arc::clone(&self.devices), self.lease.clone());
            let (hashes, buffer_bytes) = (self.with_manifest, self.buffer_bytes);
            let work = move || {
                let _panicking = EndOnPanic(&queue);
                let done = Gatherer::new(&devices, lease, buffer_bytes)
                    .and_then(|mut gatherer| write_parts(&queue, &mut gatherer, hashes));
                if let Err(error) = done {
                    queue.fail(error);
                }
            };
            match std::thread::Builder::new().name("penstock-save".into()).spawn(work) {
                Ok(writer) => self.writers.push(writer),
                Err(error) if self.writers.is_empty() => return Err(not_started(&error)),
                Err(_) => break,
            }
        }
        Ok(())
    }

    /// Waits at most `timeout` for the file of that number to be written; whether it is. Its memory is not read any more then.
    ///
    /// # Errors
    /// What ended the save.
    pub fn wait_for(&self, file: usize, timeout: Duration) -> Result<bool> {
        let Some(file) = self.files.get(file) else { return Ok(true) };
        self.queue.wait_until(Instant::now() + timeout, || file.is_done())?;
        self.check()?;
        Ok(file.is_done())
    }

    /// Bytes written so far.
    pub fn written(&self) -> u64 {
        self.queue.written.load(Ordering::Relaxed)
    }

    /// What the save's owner may want to know.
    pub fn notes(&self) -> Vec<String> {
        let staging = self.lease.as_ref().map(|lease| lease.notes()).unwrap_or_default();
        self.sink.notes().into_iter().chain(staging).collect()
    }

    /// Ends the save once all files are written: puts `last`, a small file that says that all others are there, beside them,
    /// after the manifest, and shows everything. Returns the files with their bytes and BLAKE3 roots (where there is a
    /// manifest), in the order of their names.
    ///
    /// # Errors
    /// What ended the save; `Exists`, `Storage` or `Access` where the last step fails. Nothing is left then.
    pub fn publish(mut self, last: Option<(&str, &[u8])>) -> Result<Vec<Published>> {
        self.queue.close();
        self.writers.drain(..).for_each(|writer| drop(writer.join()));
        self.check()?;
        let mut published: Vec<_> = self
            .files
            .iter()
            .map(|file| Published { name: file.name.clone(), bytes: file.bytes, root: None })
            .collect();
        if let Some((name, bytes)) = last {
            published.push(Published { name: name.to_owned(), bytes: bytes.len() as u64, root: None });
        }
        if self.with_manifest {
            let manifest = self.manifest(last)?;
            for file in &mut published {
                file.root = manifest.file(&file.name).map(|hashes| *hashes.root());
            }
            let bytes = manifest.to_bytes();
            self.sink.put(MANIFEST_NAME, &bytes)?;
            published.push(Published {
                name: MANIFEST_NAME.to_owned(),
                bytes: bytes.len() as u64,
                root: None,
            });
        }
        if let Some((name, bytes)) = last {
            self.sink.put(name, bytes)?;
        }
        self.sink.publish()?;
        self.ended = true;
        published.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(published)
    }

    fn manifest(&self, last: Option<(&str, &[u8])>) -> Result<Manifest> {
        let mut hashes = self.files.iter().map(|file| file.hashes()).collect::<Result<Vec<_>>>()?;
        for (name, path) in self.sink.kept() {
            // As where a manifest is made of a directory.
            if !name.split('/').any(|part| part.starts_with('.')) && path.is_file() {
                hashes.push(manifest::hash_file(&path, &name)?);
            }
        }
        if let Some((name, bytes)) = last {
            let len = bytes.len() as u64;
            hashes.push(FileHashes::new(name, len, BLOCK_BYTES, block_values([bytes], 0, len, BLOCK_BYTES))?);
        }
        Manifest::new(hashes).map_err(|error| error.object(self.sink.location()))
    }

    /// Ends the save where it is; nothing of it is left. Returns when no writer runs.
    pub fn stop(&mut self) {
        if self.ended || !self.owner.is_current() {
            return;
        }
        self.ended = true;
        self.queue.fail(Error::new(ErrorKind::Cancelled, "the save was stopped"));
        self.sink.interrupt();
        self.writers.drain(..).for_each(|writer| drop(writer.join()));
        self.files.clear();
        self.sink.discard();
    }

    fn check(&self) -> Result<()> {
        if !self.owner.is_current() {
            let cause = "the save belongs to the process that this one was forked from";
            return Err(Error::new(ErrorKind::Cancelled, cause));
        }
        self.queue.failure().map_or(Ok(()), Err)
    }
}

impl Drop for Save {
    fn drop(&mut self) {
        if self.owner.is_current() {
            self.stop();
        } else {
            // Its threads and their locks are the parent's; a child leaves them alone.
            let threads = (std::mem::take(&mut self.writers), std::mem::take(&mut self.files));
            let shared = (Arc::clone(&self.queue), Arc::clone(&self.sink), self.lease.take());
            let _ = ManuallyDrop::new((threads, shared));
        }
    }
}

/// Ends the save where a writer panics: nobody would wait for its part in vain.
struct EndOnPanic<'a>(&'a Queue);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Error::new(ErrorKind::Storage, "a writer panicked; this is a bug of Penstock"));
        }
    }
}

/// A file that was saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// Its name below the location.
    pub name: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Its BLAKE3 hash, where there is a manifest.
    pub root: Option<[u8; 32]>,
}

/// What one thread does: takes parts until there are none and will be none.
fn write_parts(queue: &Queue, gatherer: &mut Gatherer, hashes: bool) -> Result<()> {
    while let Some(part) = queue.take() {
        write_part(queue, &part, gatherer, hashes).map_err(|error| error.object(&*part.file.name))?;
    }
    Ok(())
}

fn write_part(queue: &Queue, part: &Part, gatherer: &mut Gatherer, hashes: bool) -> Result<()> {
    let (file, range) = (&part.file, part.range.clone());
    let object = &file.object;
    let pieces: Vec<(&SourceBytes, Range<usize>)> = file.pieces_of(&range);
    let align = object.alignment();
    let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
    // What lies in host memory, and needs no padding, is written from where it is: through the page cache that is the only
    // copy. A direct write wants memory of whole pages, and a request all of its part.
    let there: Option<Vec<&[u8]>> = pieces.iter().map(in_place).collect();
    let long_enough = |slices: &Vec<&[u8]>| slices.len() == 1 || slices.len() * SHORT_PIECE <= len;
    let suits = |slices: &Vec<&[u8]>| match &slices[..] {
        [bytes] => align == 1 || (bytes.as_ptr().addr() | bytes.len()).is_multiple_of(align),
        _ => object.takes_pieces() && long_enough(slices),
    };
    let slices = match there.filter(suits) {
        Some(slices) => slices,
        None => vec![gatherer.gather(&pieces, align, || queue.is_stopped())?],
    };
    if hashes {
        let own = slices.iter().map(|bytes| &bytes[..bytes.len().min(len)]);
        file.hashed(range.start, block_values(own, range.start, file.bytes, BLOCK_BYTES));
    }
    let mut at = range.start;
    for bytes in slices.iter().filter(|bytes| !bytes.is_empty()) {
        object.write(at, bytes)?;
        at += bytes.len() as u64;
    }
    gatherer.release();
    queue.written.fetch_add(len as u64, Ordering::Relaxed);
    if file.part_done() {
        object.finish()?;
        file.finished();
    }
    queue.progressed();
    Ok(())
}

/// The bytes of a piece, where the host can read them as they lie.
fn in_place<'s>((source, of): &(&'s SourceBytes, Range<usize>)) -> Option<&'s [u8]> {
    Some(&source.in_host_memory()?[of.clone()])
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
