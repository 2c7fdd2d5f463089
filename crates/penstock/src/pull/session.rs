//! One pull: its threads, how far it is, how it ends.
//!
//! A child after `fork` has a copy of the pull but none of its threads: its copy can be dropped, and refuses to be waited
//! for.

use std::collections::HashSet;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::ledger::{self, Known};
use super::partial_file::{BLOCK_BYTES, MOST_BLOCKS, PartialFile, map_name};
use super::source::Item;
use super::tree::{self, Tree};
use super::work::{RequestSize, Task, Work};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Owner, Region};
use crate::store::{ReadContext, RemoteStore, Store, shown};
use crate::threads;

/// Requests in flight, where nothing is said: as many as a load from an object store begins with.
const READERS: usize = 32;

/// What became of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// It came whole.
    Pulled,
    /// Part of it was there from a pull that was cut off.
    Resumed,
    /// It was there, of the same size and version.
    Kept,
}

/// A file of the destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledFile {
    /// Where it is, relative to the destination.
    pub path: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// What became of it.
    pub how: How,
}

/// What a pull did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulled {
    /// The files, in the order of the items.
    pub files: Vec<PulledFile>,
    /// Bytes that came over the network.
    pub fetched_bytes: u64,
    /// Wall-clock time.
    pub wall: Duration,
}

/// How far a pull is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are there.
    pub done_bytes: u64,
    /// Bytes in all, as far as known.
    pub bytes: u64,
    /// Files that are complete.
    pub done_files: usize,
    /// Files in all.
    pub files: usize,
}

/// A pull under way. Dropping it stops it; what came so far is kept for the next one.
pub struct Pull {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    ended: Option<Receiver<Result<Pulled>>>,
    owner: Owner,
}

struct Shared {
    store: RemoteStore,
    items: Vec<Item>,
    cancelled: AtomicBool,
    work: Work,
    failure: Mutex<Option<Error>>,
    files: Mutex<Vec<Option<PulledFile>>>,
    done_bytes: AtomicU64,
    bytes: AtomicU64,
    fetched_bytes: AtomicU64,
}

/// Refuses items whose paths would lead out of the destination, or two that would be one file.
///
/// # Errors
/// `Access`, naming the object.
pub(super) fn check(items: &[Item]) -> Result<()> {
    let mut paths = HashSet::new();
    for item in items {
        let refuse = |error: Error| error.object(shown(&item.location));
        tree::check(&item.path).map_err(refuse)?;
        if !paths.insert(&*item.path) {
            let cause = format!("another object would be the same file, {:?}", item.path);
            return Err(refuse(Error::new(ErrorKind::Access, cause)));
        }
    }
    Ok(())
}

impl Pull {
    /// Begins to pull `items`, with at most `readers` requests in flight, to the directory `destination`. Waits for
    /// another pull to the same directory to end, then finds what that one has done.
    ///
    /// # Errors
    /// `Access` where an item's path would lead out of the destination, `Memory` where no thread can be started.
    pub fn start(
        store: &RemoteStore,
        items: Vec<Item>,
        destination: &Path,
        readers: Option<usize>,
    ) -> Result<Self> {
        check(&items)?;
        let shared = Arc::new(Shared {
            files: Mutex::new(vec![None; items.len()]),
            bytes: AtomicU64::new(items.iter().map(|item| item.bytes).sum()),
            // Stopping this pull is not stopping whatever else the store is used for.
            store: store.for_another_load(),
            items,
            cancelled: AtomicBool::new(false),
            work: Work::default(),
            failure: Mutex::default(),
            done_bytes: AtomicU64::new(0),
            fetched_bytes: AtomicU64::new(0),
        });
        let (sender, ended) = channel();
        let (working, destination) = (Arc::clone(&shared), destination.to_owned());
        let readers = readers.unwrap_or(READERS).clamp(1, crate::config::MAX_READERS);
        let run = move || {
            let done = catch_unwind(AssertUnwindSafe(|| working.run(&destination, readers)));
            drop(sender.send(done.unwrap_or_else(|_| Err(panicked()))));
        };
        let thread = std::thread::Builder::new().name("penstock-pull".into()).spawn(run);
        let thread = thread.map_err(|error| threads::not_started(&error))?;
        Ok(Self { shared, thread: Some(thread), ended: Some(ended), owner: Owner::current() })
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        let done_bytes = self.shared.done_bytes.load(Ordering::Relaxed);
        let files = lock(&self.shared.files);
        Progress {
            done_bytes,
            bytes: self.shared.bytes.load(Ordering::Relaxed).max(done_bytes),
            done_files: files.iter().flatten().count(),
            files: files.len(),
        }
    }

    /// Waits for the end, at most for `timeout`; `None` while it goes on.
    ///
    /// # Errors
    /// The first failure: what the store or the file system reports, naming the object or the file. `Cancelled` once
    /// stopped, and in a child of the process that began it.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<Pulled>> {
        if !self.owner.is_current() {
            let cause = "the pull belongs to the process that this one was forked from";
            return Err(
                Error::new(ErrorKind::Cancelled, cause).remedy("Begin a pull of its own in the child")
            );
        }
        let Some(ended) = &self.ended else { return Err(cancelled()) };
        match ended.recv_timeout(timeout) {
            Ok(done) => {
                self.join();
                done.map(Some)
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(cancelled()),
        }
    }

    /// Stops it, and returns when nothing of it runs any more. In a forked child nothing of it runs.
    pub fn stop(&mut self) {
        if !self.owner.is_current() {
            // To the child's C library the threads do not exist, and what they held when the process forked stays locked.
            let _ = ManuallyDrop::new((self.thread.take(), self.ended.take(), Arc::clone(&self.shared)));
            return;
        }
        self.shared.cancel();
        self.join();
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic was turned into the pull's failure.
            let _ = thread.join();
        }
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.store.interrupt();
        self.work.end();
    }

    fn fail(&self, error: Error) {
        lock(&self.failure).get_or_insert(error);
        self.cancel();
    }

    fn run(&self, destination: &Path, readers: usize) -> Result<Pulled> {
        let began = Instant::now();
        let Some(tree) = Tree::open(destination, || self.is_cancelled())? else { return Err(cancelled()) };
        let mut wanted = Vec::new();
        for (number, item) in self.items.iter().enumerate() {
            match known(&tree, item)? {
                (_, Known::Same) => self.done(number, item.bytes, How::Kept),
                _ => wanted.push(number),
            }
        }
        let bytes: u64 = wanted.iter().map(|number| self.items[*number].bytes).sum();
        let needed = bytes.saturating_sub(tree.allocated());
        if let Some(room) = tree.room().filter(|room| needed > *room) {
            return Err(Error::new(
                ErrorKind::Storage,
                format!("{needed} bytes are to come, and the disk has room for {room}"),
            )
            .object(tree.shown(""))
            .remedy(
                "Free some space, or pull to another disk. What came of earlier pulls is in .penstock there",
            ));
        }
        let blocks =
            wanted.iter().map(|number| 1 + self.items[*number].bytes / RequestSize::FIRST_BYTES).sum::<u64>();
        self.work.begin(wanted);
        let workers: Vec<_> = (0..readers.min(usize::try_from(blocks).unwrap_or(readers))).collect();
        let work = |_: &usize| {
            let done = catch_unwind(AssertUnwindSafe(|| self.work(&tree)));
            done.unwrap_or_else(|_| Err(panicked())).or_else(|error| {
                self.fail(error);
                Ok(())
            })
        };
        // The first failure is the pull's; those of other threads are of their being stopped.
        let _ = threads::in_order(&workers, workers.len(), "penstock-pull", work);
        let failure = lock(&self.failure).take();
        if let Some(error) = failure {
            return Err(error);
        }
        if self.is_cancelled() {
            return Err(cancelled());
        }
        Ok(Pulled {
            files: lock(&self.files).iter().flatten().cloned().collect(),
            fetched_bytes: self.fetched_bytes.load(Ordering::Relaxed),
            wall: began.elapsed(),
        })
    }

    /// What a thread does until nothing is left.
    fn work(&self, tree: &Tree) -> Result<()> {
        let (mut buffer, mut cx, mut size) = (None, ReadContext::default(), RequestSize::default());
        loop {
            let task = self.work.next(size.blocks());
            if matches!(task, Task::Over) {
                return Ok(());
            }
            let buffer = match &mut buffer {
                Some(buffer) => buffer,
                none => {
                    none.insert(Region::reserve(MOST_BLOCKS * usize::try_from(BLOCK_BYTES).unwrap_or(0))?)
                }
            };
            match task {
                Task::Over => {}
                Task::Open(number) => {
                    let opened = self.open(tree, number, buffer);
                    self.work.opened(opened.as_ref().ok().and_then(Option::as_ref));
                    opened?;
                }
                Task::Blocks(part, blocks) => {
                    let (came, last) =
                        part.fetch_blocks(tree, blocks, buffer, &mut cx, &|| self.is_cancelled())?;
                    size.learn(&came);
                    self.fetched_bytes.fetch_add(came.fetched, Ordering::Relaxed);
                    self.done_bytes.fetch_add(came.resumed + came.fetched, Ordering::Relaxed);
                    if last {
                        self.finish(tree, &part)?;
                    }
                }
            }
        }
    }

    /// Opens an item; none where that was all there was to do.
    fn open(&self, tree: &Tree, number: usize, buffer: &mut Region) -> Result<Option<Arc<PartialFile>>> {
        let item = &self.items[number];
        if self.is_there(tree, item, buffer)? {
            self.done(number, item.bytes, How::Kept);
            return Ok(None);
        }
        let object = self.store.open(&item.location)?;
        // Its listing may not have said which version it is, or how large.
        let opened = Item { bytes: object.bytes(), identity: object.identity(), ..item.clone() };
        if opened.bytes != item.bytes {
            self.bytes.fetch_add(opened.bytes, Ordering::Relaxed);
            self.bytes.fetch_sub(item.bytes, Ordering::Relaxed);
        }
        if self.is_there(tree, &opened, buffer)? {
            self.done(number, opened.bytes, How::Kept);
            return Ok(None);
        }
        if self.is_cancelled() {
            return Err(cancelled());
        }
        let part = Arc::new(PartialFile::begin(tree, number, item, object)?);
        if part.blocks() == 0 {
            self.finish(tree, &part)?;
            return Ok(None);
        }
        Ok(Some(part))
    }

    /// Whether an item's file is there already. Reads it where only its bytes can tell.
    fn is_there(&self, tree: &Tree, item: &Item, buffer: &mut Region) -> Result<bool> {
        let (directory, known) = known(tree, item)?;
        let map = match known {
            Known::Same => return Ok(true),
            Known::No => return Ok(false),
            Known::If(map) => map,
        };
        let intact =
            tree.compare(&directory, &item.path, &map, buffer.as_mut_slice(), || self.is_cancelled());
        // A map that cannot be written to costs the next pull time, not this one its success.
        Ok(intact.map(|stat| map.set_seal(ledger::times(&stat))).is_some())
    }

    fn finish(&self, tree: &Tree, part: &PartialFile) -> Result<()> {
        part.finish(tree)?;
        let item = &self.items[part.item];
        let how = if part.resumed.load(Ordering::Relaxed) { How::Resumed } else { How::Pulled };
        // Its bytes were counted as they came.
        let file = PulledFile { path: item.path.clone(), bytes: part.object.bytes(), how };
        lock(&self.files)[part.item] = Some(file);
        Ok(())
    }

    fn done(&self, number: usize, bytes: u64, how: How) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
        lock(&self.files)[number] = Some(PulledFile { path: self.items[number].path.clone(), bytes, how });
    }
}

/// The directory of an item's file, and what is known of the file if it is there.
fn known(tree: &Tree, item: &Item) -> Result<(OwnedFd, Known)> {
    let directory = tree.directory_of(&item.path)?;
    let stat = tree.stat(&directory, &item.path)?;
    let map = stat.and_then(|stat| Some((tree.map_of_pulled(&map_name(&item.path))?, stat)));
    Ok((directory, map.map_or(Known::No, |(map, stat)| ledger::holds(map, item, &stat))))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, "the pull was stopped").remedy("Pull again: what came so far is kept")
}

fn panicked() -> Error {
    Error::new(ErrorKind::Storage, "a thread of the pull panicked; this is a bug of Penstock")
}
