//! What a reader does: take a block, bring it in, say what has landed.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::landing::{Destinations, Fetched, Timing, fetch, land, requests, to_host};
use super::queue::ReadKind;
use super::reader_stats::ReaderStats;
use super::shared::{Shared, Take};
use crate::device::{CopyEvent, CopyRegion, CopyStream, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Lease, PinnedSpan, Region, StagingBuffer, Window};
use crate::plan::{Block, Segment};
use crate::store::{ALIGNMENT_PADDING, Object};
use crate::trace::Activity;

/// Buffers of one reader: one is being filled while the other is on its way. More of them, or larger ones, would be out of
/// the processor's cache by the time the device reads them.
pub(super) const DEPTH: usize = 2;
/// How often a reader that waits for a buffer looks whether the load was cancelled.
const BUFFER_WAIT: Duration = Duration::from_millis(20);

/// Reads blocks to host memory.
pub(super) struct HostReader {
    account: ReaderStats,
    scratch: Option<Region>,
}

impl HostReader {
    pub(super) fn new(shared: &Shared) -> Self {
        Self { account: ReaderStats::new(shared), scratch: None }
    }

    /// Reads until nothing is left.
    pub(super) fn run(mut self, shared: &Arc<Shared>) -> Result<()> {
        let mut done = None;
        loop {
            match shared.take(done.take()) {
                Take::Block(index, kind) => {
                    self.block(shared, index, kind)?;
                    done = Some((index, kind));
                }
                Take::Nothing => self.account.wait_for_work(shared),
                Take::Over => break,
            }
        }
        self.account.hand_in(shared);
        Ok(())
    }

    fn block(&mut self, shared: &Arc<Shared>, index: usize, kind: ReadKind) -> Result<()> {
        let block = &shared.plan.blocks()[index];
        self.account.begins(shared, index, block, kind);
        let object = shared.objects.get(block.object)?;
        let (to, request) = (&shared.destinations, shared.request_bytes());
        let (ReaderStats { cx, .. }, began) = (&mut self.account, Instant::now());
        let spent = to_host(&shared.plan, block, object.as_ref(), to, request, cx, &mut self.scratch)
            .map_err(|error| name_tensor(error, shared, block, object.as_ref()))?;
        self.account.brought(began, &spent);
        self.account.spent(shared, block, kind, &spent);
        shared.landed(block);
        Ok(())
    }
}

/// A block on its way to the device.
struct InFlight {
    source: Source,
    mark: CopyEvent,
    block: usize,
}

/// What a block is copied from.
enum Source {
    Staging(StagingBuffer),
    /// Kept until the copy has ended.
    Pinned(PinnedSpan),
}

impl Source {
    /// Of a staging buffer: where it lies.
    fn address(&mut self) -> Option<usize> {
        match self {
            Self::Staging(buffer) => Some(buffer.window().as_ptr().addr()),
            Self::Pinned(_) => None,
        }
    }
}

/// Reads blocks to device memory, through staging buffers.
///
/// The order of the fields is the order in which they are dropped: the stream first, which waits for its copies, and
/// only then the buffers that those copies read from.
pub(super) struct DeviceReader {
    stream: Option<Box<dyn CopyStream>>,
    in_flight: VecDeque<InFlight>,
    spare: Vec<StagingBuffer>,
    /// Of copies that failed, which may be on their way all the same.
    failed: Option<Source>,
    device: Arc<dyn Device>,
    staging: Arc<Lease>,
    /// The last of the consumer's fences that the stream waits for.
    fence: u64,
    pieces: Vec<CopyRegion>,
    account: ReaderStats,
}

impl DeviceReader {
    pub(super) fn new(shared: &Shared, device: Arc<dyn Device>, staging: Arc<Lease>) -> Self {
        Self {
            stream: None,
            in_flight: VecDeque::new(),
            spare: Vec::new(),
            failed: None,
            device,
            staging,
            fence: 0,
            pieces: Vec::new(),
            account: ReaderStats::new(shared),
        }
    }

    /// Reads until nothing is left and everything has landed.
    pub(super) fn run(mut self, shared: &Arc<Shared>) -> Result<()> {
        let mut done = None;
        loop {
            self.land_what_is_done(shared)?;
            match shared.take(done.take()) {
                Take::Block(index, kind) => {
                    self.block(shared, index, kind)?;
                    done = Some((index, kind));
                }
                Take::Nothing => {
                    self.let_go(shared)?;
                    self.account.wait_for_work(shared);
                }
                Take::Over => break,
            }
        }
        self.drain(shared)?;
        self.account.hand_in(shared);
        Ok(())
    }

    fn land_what_is_done(&mut self, shared: &Shared) -> Result<()> {
        while let (Some(stream), Some(first)) = (&mut self.stream, self.in_flight.front()) {
            let (mark, block) = (first.mark, first.block);
            if !stream.is_done(mark).map_err(|error| name_block(error, shared, block))? {
                break;
            }
            self.land_first(shared);
        }
        Ok(())
    }

    /// Idle readers hold nothing: another load may need the buffers, and the consumer the tensors.
    fn let_go(&mut self, shared: &Shared) -> Result<()> {
        self.drain(shared)?;
        self.spare.clear();
        Ok(())
    }

    fn block(&mut self, shared: &Arc<Shared>, index: usize, kind: ReadKind) -> Result<()> {
        let block = &shared.plan.blocks()[index];
        self.account.begins(shared, index, block, kind);
        let object = shared.objects.get(block.object)?;
        let source = match object.pinned(&block.range) {
            Some(span) => {
                while self.in_flight.len() >= DEPTH {
                    self.wait_first(shared)?;
                }
                Source::Pinned(span)
            }
            None => match self.buffer(shared)? {
                Some(buffer) => Source::Staging(buffer),
                None => return Ok(()),
            },
        };
        let stream = match &mut self.stream {
            Some(stream) => stream,
            // Made when there is something to copy: a reader that is never wanted costs nothing of the device.
            none => {
                self.device.bind_thread()?;
                none.insert(self.device.stream()?)
            }
        };
        for (number, fence) in shared.fences_after(self.fence) {
            stream.wait_for(fence.as_ref())?;
            self.fence = number;
        }
        // Held by the reader, after its stream, however this ends: a panic included.
        let source = self.failed.insert(source);
        let mut way = BlockCopy {
            buffer: source.address(),
            segments: shared.plan.segments(block),
            object: object.as_ref(),
            to: &shared.destinations,
            stream: stream.as_mut(),
            pieces: &mut self.pieces,
            account: &mut self.account,
        };
        let request = shared.request_bytes();
        let copied = match source {
            Source::Staging(buffer)
                if kind == ReadKind::Fetch && way.goes_in_parts(block, request, buffer) =>
            {
                way.copy_pipelined(block, request, buffer).map(|spent| (spent, None))
            }
            Source::Staging(buffer) => {
                way.copy(&block.range, buffer.window()).map(|(spent, mark)| (spent, Some(mark)))
            }
            Source::Pinned(span) => {
                way.copy_pinned(&block.range, span).map(|(spent, mark)| (spent, Some(mark)))
            }
        };
        match copied {
            Ok((spent, mark)) => {
                self.account.spent(shared, block, kind, &spent);
                let Some(source) = self.failed.take() else { return Ok(()) };
                if let Some(mark) = mark {
                    self.in_flight.push_back(InFlight { source, mark, block: index });
                } else {
                    self.take_back(source);
                    shared.landed(block);
                }
                Ok(())
            }
            Err(error) => Err(name_tensor(error, shared, block, object.as_ref())),
        }
    }

    fn take_back(&mut self, source: Source) {
        if let Source::Staging(buffer) = source {
            self.spare.push(buffer);
        }
    }

    /// A buffer to fill; none where the load was cancelled while waiting for one.
    fn buffer(&mut self, shared: &Shared) -> Result<Option<StagingBuffer>> {
        loop {
            if let Some(buffer) = self.spare.pop() {
                return Ok(Some(buffer));
            }
            if self.in_flight.len() < DEPTH
                && let Some(buffer) = self.staging.try_acquire()?
            {
                return Ok(Some(buffer));
            }
            if self.in_flight.is_empty() {
                if shared.is_cancelled() {
                    return Ok(None);
                }
                let began = Instant::now();
                self.staging.wait(BUFFER_WAIT);
                self.account.waited(Activity::WaitForBuffer, began);
            } else {
                self.wait_first(shared)?;
            }
        }
    }

    fn drain(&mut self, shared: &Shared) -> Result<()> {
        while !self.in_flight.is_empty() {
            self.wait_first(shared)?;
        }
        Ok(())
    }

    fn wait_first(&mut self, shared: &Shared) -> Result<()> {
        if let (Some(stream), Some(first)) = (&mut self.stream, self.in_flight.front()) {
            let (mark, block) = (first.mark, first.block);
            let began = Instant::now();
            stream.wait(mark).map_err(|error| name_block(error, shared, block))?;
            self.account.waited_for_copy(began);
            self.land_first(shared);
        }
        Ok(())
    }

    fn land_first(&mut self, shared: &Shared) {
        if let Some(first) = self.in_flight.pop_front() {
            self.account.landed(first.mark);
            self.take_back(first.source);
            shared.landed(&shared.plan.blocks()[first.block]);
        }
    }
}

/// The way of one block to the device.
struct BlockCopy<'a> {
    /// Of the staging buffer.
    buffer: Option<usize>,
    segments: &'a [Segment],
    object: &'a dyn Object,
    to: &'a Destinations,
    stream: &'a mut dyn CopyStream,
    pieces: &'a mut Vec<CopyRegion>,
    account: &'a mut ReaderStats,
}

impl BlockCopy<'_> {
    /// Reads `range` to `buffer` and sends it on.
    fn copy(&mut self, range: &Range<u64>, buffer: Window<'_>) -> Result<(Timing, CopyEvent)> {
        let began = Instant::now();
        let fetched = fetch(self.object, range, buffer, &mut self.account.cx)?;
        self.land(range, fetched, began, began.elapsed())
    }

    /// Sends `range` on from where it lies.
    fn copy_pinned(&mut self, range: &Range<u64>, span: &PinnedSpan) -> Result<(Timing, CopyEvent)> {
        self.land(range, Fetched::Pinned(span), Instant::now(), Duration::ZERO)
    }

    fn land(
        &mut self,
        range: &Range<u64>,
        fetched: Fetched<'_>,
        began: Instant,
        reading: Duration,
    ) -> Result<(Timing, CopyEvent)> {
        let place = match &fetched {
            Fetched::Staging(part, _) => self.buffer.map(|buffer| (buffer, part.as_ptr().addr() - buffer)),
            Fetched::Pinned(_) => None,
        };
        land(self.segments, range, fetched, self.to, self.stream, self.pieces)?;
        let spent = Timing { reading, copying: began.elapsed().saturating_sub(reading) };
        let mark = self.stream.mark()?;
        self.account.brought(began, &spent);
        self.account.enqueued(mark, place, began, range.end - range.start);
        Ok((spent, mark))
    }

    /// Whether the block is larger than one request, can be cut anywhere, and has a buffer with room for two requests.
    fn goes_in_parts(&self, block: &Block, request: u64, buffer: &StagingBuffer) -> bool {
        let room = (buffer.len() / 2).saturating_sub(ALIGNMENT_PADDING) as u64;
        let more_than_one = block.range.end - block.range.start > request;
        more_than_one && request <= room && self.segments.iter().all(|segment| segment.count == 1)
    }

    /// Brings the block by requests, which take turns in two places of the buffer, and waits for the last of them, so that
    /// the next block begins in the same buffer. Storage that copies (a virtual disk's host) then writes to memory that is
    /// still in the processor's cache: 5.4 instead of 4.4 GB/s.
    fn copy_pipelined(&mut self, block: &Block, request: u64, buffer: &mut StagingBuffer) -> Result<Timing> {
        let room = usize::try_from(request).unwrap_or(usize::MAX) + ALIGNMENT_PADDING;
        let mut spent = Timing::default();
        let mut sent = VecDeque::with_capacity(2);
        for (number, range) in requests(block.range.clone(), request).enumerate() {
            if sent.len() == 2
                && let Some(mark) = sent.pop_front()
            {
                self.wait(mark)?;
            }
            let (took, mark) = self.copy(&range, buffer.window().part(number % 2 * room, room))?;
            spent += took;
            sent.push_back(mark);
        }
        sent.into_iter().try_for_each(|mark| self.wait(mark))?;
        Ok(spent)
    }

    fn wait(&mut self, mark: CopyEvent) -> Result<()> {
        let began = Instant::now();
        let done = self.stream.wait(mark);
        self.account.waited_for_copy(began);
        self.account.landed(mark);
        done
    }
}

/// Adds what the device could not know: which block was on its way when a copy was found to have failed. A driver may
/// tell of a failure late, so this is the first block that is not known to have landed.
fn name_block(error: Error, shared: &Shared, block: usize) -> Error {
    let block = &shared.plan.blocks()[block];
    match shared.objects.get(block.object) {
        Ok(object) => name_tensor(error, shared, block, object.as_ref()),
        Err(_) => error,
    }
}

/// Adds what the store could not know: which tensor the failed bytes belong to.
fn name_tensor(error: Error, shared: &Shared, block: &Block, object: &dyn Object) -> Error {
    let at = error.byte_range().map_or(block.range.start, |range| range.start);
    let segments = shared.plan.segments(block);
    let hit = segments.iter().rev().find(|segment| segment.src <= at).or(segments.first());
    let error = error.object(object.location()).range(block.range.clone());
    if error.kind() == ErrorKind::Integrity {
        return name_all(error, shared, block);
    }
    match hit {
        Some(segment) => error.tensor(&*shared.plan.tensors()[segment.tensor as usize].name),
        None => error,
    }
}

/// Adds all tensors that the damaged bytes of a block belong to.
fn name_all(error: Error, shared: &Shared, block: &Block) -> Error {
    let range = error.byte_range().unwrap_or_else(|| block.range.clone());
    let mut names: Vec<&str> = Vec::new();
    for segment in shared.plan.segments(block) {
        let name = &*shared.plan.tensors()[segment.tensor as usize].name;
        if segment.src < range.end && range.start < segment.src + segment.span() && !names.contains(&name) {
            names.push(name);
        }
    }
    let error = error.detail("tensors", names.join(", "));
    match names.first() {
        Some(name) => error.tensor(*name),
        None => error,
    }
}
