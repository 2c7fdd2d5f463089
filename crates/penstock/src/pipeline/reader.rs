//! What a reader does: take a block, bring it in, say what has landed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::landing::{Spent, to_device, to_host};
use super::queue::Kind;
use super::shared::{Shared, Take};
use crate::device::{CopyStream, Device, Mark, Piece};
use crate::error::{Error, Result};
use crate::memory::{Lease, Region, Slot};
use crate::plan::Block;
use crate::stats::LoadStats;
use crate::store::{Lane, Object};

/// Slots of one reader: one is being filled while the other is on its way. More of them, or larger ones, would be out of
/// the processor's cache by the time the device reads them.
pub(super) const DEPTH: usize = 2;
/// How often a reader that waits for a slot looks whether the load was cancelled.
const SLOT_WAIT: Duration = Duration::from_millis(20);

/// What every reader keeps, whatever it reads to: scratch for its store and its own counts.
#[derive(Default)]
struct Account {
    lane: Lane,
    stats: LoadStats,
}

impl Account {
    fn spent(&mut self, shared: &Shared, block: &Block, kind: Kind, spent: &Spent) {
        self.stats.reading += spent.reading;
        self.stats.copying += spent.copying;
        match kind {
            Kind::Copy => self.stats.cached_reading += spent.reading,
            Kind::Fetch => shared.fetched(block, spent.reading),
        }
    }

    fn hand_in(mut self, shared: &Shared) {
        self.stats.cached_bytes = self.lane.cached_bytes;
        self.stats.direct_bytes = self.lane.direct_bytes;
        self.stats.buffered_bytes = self.lane.buffered_bytes;
        self.stats.network_bytes = self.lane.network_bytes;
        self.stats.read_bytes = self.lane.bytes();
        self.stats.calls = self.lane.calls;
        shared.with_stats(|stats| stats.add(&self.stats));
    }
}

/// Reads blocks to host memory.
#[derive(Default)]
pub(super) struct HostReader {
    account: Account,
    scratch: Option<Region>,
}

impl HostReader {
    /// Reads until nothing is left.
    pub(super) fn run(mut self, shared: &Shared) -> Result<()> {
        let mut done = None;
        loop {
            match shared.take(done.take()) {
                Take::Block(index, kind) => {
                    self.block(shared, index, kind)?;
                    done = Some(kind);
                }
                Take::Nothing => shared.wait_for_work(),
                Take::Over => break,
            }
        }
        self.account.hand_in(shared);
        Ok(())
    }

    /// Reads all blocks that are ready, in the thread of the caller.
    pub(super) fn run_inline(&mut self, shared: &Shared) -> Result<()> {
        let mut done = None;
        while let Take::Block(index, kind) = shared.take(done) {
            self.block(shared, index, kind)?;
            done = Some(kind);
        }
        Ok(())
    }

    fn block(&mut self, shared: &Shared, index: usize, kind: Kind) -> Result<()> {
        let block = &shared.plan.blocks()[index];
        let object = shared.objects.get(block.object)?;
        let Account { lane, .. } = &mut self.account;
        let spent =
            to_host(&shared.plan, block, object.as_ref(), &shared.destinations, lane, &mut self.scratch)
                .map_err(|error| name_tensor(error, shared, block, object.as_ref()))?;
        self.account.spent(shared, block, kind, &spent);
        shared.landed(block);
        Ok(())
    }

    /// Ends a reader that was driven block by block.
    pub(super) fn finish(self, shared: &Shared) {
        self.account.hand_in(shared);
    }
}

/// A slot on its way to the device.
struct InFlight {
    slot: Slot,
    mark: Mark,
    block: usize,
}

/// Reads blocks to device memory, through staging slots.
///
/// The order of the fields is the order in which they are dropped: the stream first, which waits for its copies, and
/// only then the slots that those copies read from.
pub(super) struct DeviceReader {
    stream: Option<Box<dyn CopyStream>>,
    in_flight: VecDeque<InFlight>,
    spare: Vec<Slot>,
    device: Arc<dyn Device>,
    staging: Arc<Lease>,
    /// The last of the consumer's fences that the stream waits for.
    fence: u64,
    pieces: Vec<Piece>,
    account: Account,
}

impl DeviceReader {
    pub(super) fn new(device: Arc<dyn Device>, staging: Arc<Lease>) -> Self {
        Self {
            stream: None,
            in_flight: VecDeque::new(),
            spare: Vec::new(),
            device,
            staging,
            fence: 0,
            pieces: Vec::new(),
            account: Account::default(),
        }
    }

    /// Reads until nothing is left and everything has landed.
    pub(super) fn run(mut self, shared: &Shared) -> Result<()> {
        let mut done = None;
        loop {
            self.land_what_is_done(shared)?;
            match shared.take(done.take()) {
                Take::Block(index, kind) => {
                    self.block(shared, index, kind)?;
                    done = Some(kind);
                }
                Take::Nothing => {
                    self.let_go(shared)?;
                    shared.wait_for_work();
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

    /// Idle readers hold nothing: another load may need the slots, and the consumer the tensors.
    fn let_go(&mut self, shared: &Shared) -> Result<()> {
        self.drain(shared)?;
        self.spare.clear();
        Ok(())
    }

    fn block(&mut self, shared: &Shared, index: usize, kind: Kind) -> Result<()> {
        let Some(mut slot) = self.slot(shared)? else { return Ok(()) };
        let block = &shared.plan.blocks()[index];
        let object = shared.objects.get(block.object)?;
        let stream = match &mut self.stream {
            Some(stream) => stream,
            // Made when there is something to copy: a reader that is never wanted costs nothing of the device.
            none => none.insert(self.device.stream()?),
        };
        if let Some((number, fence)) = shared.fence_after(self.fence) {
            stream.wait_for(fence.as_ref())?;
            self.fence = number;
        }
        let (lane, pieces) = (&mut self.account.lane, &mut self.pieces);
        let (plan, to) = (&shared.plan, &shared.destinations);
        let read = to_device(plan, block, object.as_ref(), to, lane, &mut slot, stream.as_mut(), pieces);
        let marked = read.and_then(|spent| Ok((spent, stream.mark()?)));
        match marked {
            Ok((spent, mark)) => {
                self.account.spent(shared, block, kind, &spent);
                self.in_flight.push_back(InFlight { slot, mark, block: index });
                Ok(())
            }
            Err(error) => {
                // Copies from the slot may be on their way: it goes when the reader goes, after its stream.
                self.spare.push(slot);
                Err(name_tensor(error, shared, block, object.as_ref()))
            }
        }
    }

    /// A slot to fill; none where the load was cancelled while waiting for one.
    fn slot(&mut self, shared: &Shared) -> Result<Option<Slot>> {
        loop {
            if let Some(slot) = self.spare.pop() {
                return Ok(Some(slot));
            }
            if self.in_flight.len() < DEPTH
                && let Some(slot) = self.staging.try_acquire()?
            {
                return Ok(Some(slot));
            }
            if self.in_flight.is_empty() {
                if shared.is_cancelled() {
                    return Ok(None);
                }
                self.staging.wait(SLOT_WAIT);
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
            self.account.stats.device_wait += began.elapsed();
            self.land_first(shared);
        }
        Ok(())
    }

    fn land_first(&mut self, shared: &Shared) {
        if let Some(first) = self.in_flight.pop_front() {
            self.spare.push(first.slot);
            shared.landed(&shared.plan.blocks()[first.block]);
        }
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
    match hit {
        Some(segment) => error.tensor(&*shared.plan.tensors()[segment.tensor as usize].name),
        None => error,
    }
}
