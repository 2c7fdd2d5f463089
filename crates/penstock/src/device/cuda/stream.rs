//! A CUDA stream of one reader, and the events that say how far it has come. Events are reused.

use super::driver::{Context, Driver, EventHandle, StreamHandle};
use crate::device::{CopyStream, Fence, Mark, Piece};
use crate::error::Result;

pub(super) struct CudaStream {
    driver: &'static Driver,
    context: Context,
    stream: StreamHandle,
    /// Events that no mark uses.
    spare: Vec<EventHandle>,
    /// Events that marks use; only ever a handful.
    used: Vec<EventHandle>,
}

impl CudaStream {
    pub(super) fn new(driver: &'static Driver, context: Context) -> Result<Self> {
        driver.make_current(context)?;
        let stream = driver.stream_create()?;
        Ok(Self { driver, context, stream, spare: Vec::new(), used: Vec::new() })
    }

    fn take_back(&mut self, event: EventHandle) {
        self.used.retain(|used| *used != event);
        self.spare.push(event);
    }
}

impl CopyStream for CudaStream {
    fn wait_for(&mut self, fence: &dyn Fence) -> Result<()> {
        self.driver.stream_wait(self.stream, EventHandle::from_raw(fence.handle()))
    }

    unsafe fn copy(&mut self, pieces: &[Piece]) -> Result<()> {
        // One by one, although drivers have `cuMemcpyBatchAsync`: version 580 corrupts its command stream with it (Xid 32),
        // always with 512 copies in a call, now and then with 128. Several readers make up for most of what calls cost.
        pieces.iter().try_for_each(|piece| {
            // SAFETY: the caller keeps both ends alive until a later mark is done; `new` made the context current on this
            // reader's thread.
            unsafe { self.driver.copy(piece.destination, piece.source, piece.len, self.stream) }
        })
    }

    fn mark(&mut self) -> Result<Mark> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => self.driver.event_create()?,
        };
        self.used.push(event);
        self.driver.event_record(event, self.stream)?;
        Ok(Mark(event.to_raw()))
    }

    fn is_done(&mut self, mark: Mark) -> Result<bool> {
        let event = EventHandle::from_raw(mark.0);
        let done = self.driver.event_done(event)?;
        if done {
            self.take_back(event);
        }
        Ok(done)
    }

    fn wait(&mut self, mark: Mark) -> Result<()> {
        let event = EventHandle::from_raw(mark.0);
        self.driver.event_wait(event)?;
        self.take_back(event);
        Ok(())
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // The owner of a stream may go without having waited (an error, a cancel): slots and destinations may be
        // reused only after this. A failure means that the context is lost, and with it every copy.
        let _ = self.driver.enter(self.context, || {
            let _ = self.driver.stream_synchronize(self.stream);
            for event in self.spare.drain(..).chain(self.used.drain(..)) {
                self.driver.event_destroy(event);
            }
            self.driver.stream_destroy(self.stream);
            Ok(())
        });
    }
}
