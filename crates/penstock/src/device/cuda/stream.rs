//! A CUDA stream of one reader, and the events that say how far it has come. Both outlive the reader: the next one takes
//! them over, since the driver makes a stream in 0.3 ms while copies are under way, one after the other.

use std::sync::{Arc, Mutex, PoisonError};

use super::driver::{Context, Driver, EventHandle, StreamHandle};
use crate::device::{CopyEvent, CopyRegion, CopyStream, Fence, ReadBackRegion};
use crate::error::Result;

/// More streams than this are not kept for later: as many as a load has readers.
const MOST_IDLE: usize = 64;

/// A stream all of whose work is done, and events that no mark uses.
struct Kept {
    stream: StreamHandle,
    events: Vec<EventHandle>,
}

/// The streams of one device that no reader uses.
#[derive(Default)]
pub(super) struct Idle(Mutex<Vec<Kept>>);

impl Idle {
    fn take(&self) -> Option<Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Keeps a stream, or hands it back if there are enough.
    fn keep(&self, kept: Kept) -> Option<Kept> {
        let mut idle = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() >= MOST_IDLE {
            return Some(kept);
        }
        idle.push(kept);
        None
    }
}

pub(super) struct CudaStream {
    /// The GPU's.
    name: String,
    driver: &'static Driver,
    context: Context,
    idle: Arc<Idle>,
    stream: StreamHandle,
    /// Events that no mark uses.
    spare: Vec<EventHandle>,
    /// Events that marks use; only ever a handful.
    used: Vec<EventHandle>,
}

impl CudaStream {
    /// A stream, for a thread on which the context is current when it uses it. On this one, it is left as it is.
    pub(super) fn new(
        name: &str,
        driver: &'static Driver,
        context: Context,
        idle: Arc<Idle>,
    ) -> Result<Self> {
        let Kept { stream, events } = match idle.take() {
            Some(kept) => kept,
            None => Kept { stream: driver.enter(context, || driver.stream_create())?, events: Vec::new() },
        };
        Ok(Self { name: name.to_owned(), driver, context, idle, stream, spare: events, used: Vec::new() })
    }

    /// What the driver did, naming the GPU where it failed.
    fn named<T>(&self, done: Result<T>) -> Result<T> {
        done.map_err(|error| error.on(&self.name))
    }

    fn take_back(&mut self, event: EventHandle) {
        self.used.retain(|used| *used != event);
        self.spare.push(event);
    }
}

impl CopyStream for CudaStream {
    fn wait_for(&mut self, fence: &dyn Fence) -> Result<()> {
        self.named(self.driver.stream_wait(self.stream, EventHandle::from_raw(fence.handle())))
    }

    unsafe fn copy(&mut self, pieces: &[CopyRegion]) -> Result<()> {
        // One by one, although drivers have `cuMemcpyBatchAsync`: version 580 corrupts its command stream with it (Xid 32),
        // always with 512 copies in a call, now and then with 128. Several readers make up for most of what calls cost.
        let copied = pieces.iter().try_for_each(|piece| {
            // SAFETY: the caller keeps both ends alive until a later mark is done. Where the context is not current on
            // this thread, the driver refuses.
            unsafe { self.driver.copy(piece.destination, piece.source, piece.len, self.stream) }
        });
        self.named(copied)
    }

    unsafe fn read_back(&mut self, pieces: &[ReadBackRegion]) -> Result<()> {
        let copied = pieces.iter().try_for_each(|piece| {
            // SAFETY: as in `copy`.
            unsafe { self.driver.read_back(piece.destination, piece.source, piece.len, self.stream) }
        });
        self.named(copied)
    }

    fn mark(&mut self) -> Result<CopyEvent> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => self.named(self.driver.event_create())?,
        };
        self.used.push(event);
        self.named(self.driver.event_record(event, self.stream))?;
        Ok(CopyEvent(event.to_raw()))
    }

    fn is_done(&mut self, mark: CopyEvent) -> Result<bool> {
        let event = EventHandle::from_raw(mark.0);
        let done = self.named(self.driver.event_done(event))?;
        if done {
            self.take_back(event);
        }
        Ok(done)
    }

    fn wait(&mut self, mark: CopyEvent) -> Result<()> {
        let event = EventHandle::from_raw(mark.0);
        self.named(self.driver.event_wait(event))?;
        self.take_back(event);
        Ok(())
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // The owner of a stream may go without having waited (an error, a cancel): buffers and destinations may be
        // reused only after this. A failure means that the context is lost, and with it every copy.
        let _ = self.driver.enter(self.context, || {
            let done = self.driver.stream_synchronize(self.stream).is_ok();
            let events = self.spare.drain(..).chain(self.used.drain(..)).collect();
            let kept = Kept { stream: self.stream, events };
            let surplus = if done { self.idle.keep(kept) } else { Some(kept) };
            if let Some(Kept { stream, events }) = surplus {
                events.into_iter().for_each(|event| self.driver.event_destroy(event));
                self.driver.stream_destroy(stream);
            }
            Ok(())
        });
    }
}
