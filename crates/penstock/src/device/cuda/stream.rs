//! A CUDA stream of one reader, and the events that say how far it has come. Events are reused.

use super::driver::{Context, Driver, EventHandle, StreamHandle};
use crate::device::{CopyStream, Fence, Mark, Piece};
use crate::error::Result;

pub(super) struct CudaStream {
    driver: &'static Driver,
    context: Context,
    stream: StreamHandle,
    /// Whether many copies may go in one call. Not where the driver cannot, or has refused once.
    batches: bool,
    batch: Batch,
    /// Events that no mark uses.
    spare: Vec<EventHandle>,
    /// Events that marks use; only ever a handful.
    used: Vec<EventHandle>,
}

/// The most copies that one call hands over. A load whose calls had 512 of them died of SIGSEGV (driver 580), loads with
/// 256 did not. The cause was not established; the driver using the stack of the calling thread (2 MiB then) would explain
/// it. More gain nothing: 128 copies of 16 KiB in a call already reach 0.9 of PCIe 5.
const MOST_IN_A_BATCH: usize = 128;

/// The columns in which the driver takes many copies.
#[derive(Default)]
struct Batch {
    to: Vec<u64>,
    from: Vec<u64>,
    lens: Vec<usize>,
}

impl Batch {
    fn fill(&mut self, pieces: &[Piece]) {
        self.to.clear();
        self.from.clear();
        self.lens.clear();
        self.to.extend(pieces.iter().map(|piece| piece.destination));
        self.from.extend(pieces.iter().map(|piece| piece.source as usize as u64));
        self.lens.extend(pieces.iter().map(|piece| piece.len));
    }
}

impl CudaStream {
    pub(super) fn new(driver: &'static Driver, context: Context) -> Result<Self> {
        driver.make_current(context)?;
        let stream = driver.stream_create()?;
        let batches = driver.has_batches();
        Ok(Self {
            driver,
            context,
            stream,
            batches,
            batch: Batch::default(),
            spare: Vec::new(),
            used: Vec::new(),
        })
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
        for batch in pieces.chunks(MOST_IN_A_BATCH) {
            if self.batches && batch.len() > 1 {
                self.batch.fill(batch);
                let Batch { to, from, lens } = &mut self.batch;
                // SAFETY: the caller keeps both ends alive until a later mark is done; `new` made the context current
                // on this reader's thread.
                if unsafe { self.driver.copy_batch(to, from, lens, self.stream) }.is_ok() {
                    continue;
                }
                // A driver may refuse batches for this memory or at all. The copies one by one say whether that was
                // it; those that are carried out twice write the same bytes.
                self.batches = false;
            }
            for piece in batch {
                // SAFETY: as above.
                unsafe { self.driver.copy(piece.destination, piece.source, piece.len, self.stream)? };
            }
        }
        Ok(())
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
