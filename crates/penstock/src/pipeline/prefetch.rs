//! Bringing files into the page cache while their loader is still busy with something else, such as building the model.
//!
//! Where nothing else waits for the disk, whatever it brings before the load begins is won. One thread asks the kernel for
//! stretch after stretch, in the order in which a load reads them, and waits until an earlier one is there before it asks
//! for another: so whoever stops it never leaves more than [`WINDOW`] stretches behind that the disk still works on. The
//! load itself needs to know nothing of it: it looks block by block what is cached, as always.
//!
//! A hint from end to end. What is cached is not asked for again, what cannot be read is left to the load, which says why;
//! it stops before it would fill more than half of the memory that is free, since what comes in last would push out what
//! came first. It does nothing for objects that are no files, and where files lie on something that is best read in
//! another way than through the page cache (FUSE mounts, parallel file systems): its bytes would be read twice.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use super::mapped::steps;
use crate::checkpoint::Checkpoint;
use crate::memory::{Owner, Window, spare_bytes};
use crate::store::{LocalStore, Object, ReadContext, Store, is_remote};

/// Stretches that the kernel works on at once: 64 MiB keep any single disk busy.
const WINDOW: usize = 8;

/// Of free memory, what may be filled.
const SHARE: u64 = 2;

/// Reading ahead that is under way.
pub struct Prefetch {
    shared: Arc<Shared>,
    thread: ManuallyDrop<Option<JoinHandle<()>>>,
    owner: Owner,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    bytes: AtomicU64,
}

impl Prefetch {
    /// Begins with the bytes of `tensors` (indices into the checkpoint's).
    pub fn begin(checkpoint: Arc<Checkpoint>, tensors: &[usize]) -> Self {
        let shared = Arc::new(Shared::default());
        let wanted = steps(&checkpoint, tensors);
        let told = Arc::clone(&shared);
        let work = move || prefetch_all(&checkpoint, wanted, &told);
        // Without a thread nothing is read ahead, and nothing is wrong.
        let thread = std::thread::Builder::new().name("penstock-ahead".into()).spawn(work).ok();
        Self { shared, thread: ManuallyDrop::new(thread), owner: Owner::current() }
    }

    /// Nothing to do.
    pub fn none() -> Self {
        Self { shared: Arc::default(), thread: ManuallyDrop::new(None), owner: Owner::current() }
    }

    /// Bytes that were not cached and were asked for so far.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// Whether all of it was asked for, or nothing more will be.
    pub fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Asks for nothing more, and waits until the thread has ended, which may be waiting for a stretch.
    pub fn stop(&mut self) {
        // Its panic would be a bug, and is on the standard error stream; a hint fails nobody.
        let _ = self.end().map(JoinHandle::join);
    }

    /// Has the thread end. To a forked child's C library it does not exist: there it is neither joined nor let go.
    fn end(&mut self) -> Option<JoinHandle<()>> {
        self.shared.stop.store(true, Ordering::Relaxed);
        if self.owner.is_current() { self.thread.take() } else { None }
    }
}

impl Drop for Prefetch {
    /// Without waiting: the thread ends by itself, be its storage as slow as it may.
    fn drop(&mut self) {
        drop(self.end());
    }
}

fn prefetch_all(checkpoint: &Checkpoint, wanted: Vec<(usize, Range<u64>)>, shared: &Shared) {
    let most = spare_bytes().map_or(u64::MAX, |bytes| bytes / SHARE);
    // Steps come object by object; where one lies is looked up once, which costs system calls for a URL.
    let mut current: Option<(usize, Option<Arc<dyn Object>>)> = None;
    let mut asked: VecDeque<(Arc<dyn Object>, u64)> = VecDeque::with_capacity(WINDOW);
    for (index, range) in wanted {
        if current.as_ref().is_none_or(|(open, _)| *open != index) {
            // A server is never asked. So what is not on this machine is left out, and of what is, its file is opened and
            // not the object, which would have fetched what the disk fails to give.
            let place = checkpoint.local_path(index);
            let opened = match (is_remote(&place), is_remote(&checkpoint.objects()[index].location)) {
                (true, _) => None,
                (false, true) => LocalStore::default().open(&place).ok(),
                (false, false) => match checkpoint.open_object(index) {
                    Ok(opened) => Some(opened),
                    Err(_) => return,
                },
            };
            current = Some((index, opened));
        }
        let Some((_, Some(file))) = &current else { continue };
        if shared.stop.load(Ordering::Relaxed) || shared.bytes.load(Ordering::Relaxed) >= most {
            return;
        }
        let last = range.end - 1;
        let bytes = range.end - range.start;
        if !file.prefetch(range) {
            continue;
        }
        shared.bytes.fetch_add(bytes, Ordering::Relaxed);
        asked.push_back((Arc::clone(file), last));
        if asked.len() == WINDOW
            && let Some((file, last)) = asked.pop_front()
        {
            // A page that is on its way makes its reader wait. One that never came is read now, one by one: such a disk
            // has no time to spare either.
            let mut byte = [0];
            if file.read_into(last, Window::from_slice(&mut byte), &mut ReadContext::default()).is_err() {
                return;
            }
        }
    }
}
