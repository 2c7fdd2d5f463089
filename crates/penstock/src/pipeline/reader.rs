//! What a reader does: take a block, bring it in, say what has landed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::landing::{Spent, to_device, to_host};
use super::shared::{Shared, Take};
use crate::device::{CopyStream, Device, Mark, Piece};
use crate::error::{Error, Result};
use crate::memory::{Arena, Region, Slot};
use crate::plan::Block;
use crate::stats::LoadStats;
use crate::store::{Lane, Object};

/// Slots of one reader in flight: one being filled while others are on their way.
const DEPTH: usize = 4;
/// How often a reader that waits for a slot looks whether the load was cancelled.
const SLOT_WAIT: Duration = Duration::from_millis(20);

/// What every reader keeps, whatever it reads to: scratch for its store and its own counts.
#[derive(Default)]
struct Account {
    lane: Lane,
    stats: LoadStats,
}

impl Account {
    fn spent(&mut self, spent: &Spent) {
        self.stats.reading += spent.reading;
        self.stats.copying += spent.copying;
    }

    fn hand_in(mut self, shared: &Shared) {
        self.stats.cached_bytes = self.lane.cached_bytes;
        self.stats.direct_bytes = self.lane.direct_bytes;
        self.stats.buffered_bytes = self.lane.buffered_bytes;
        self.stats.read_bytes = self.lane.cached_bytes + self.lane.direct_bytes + self.lane.buffered_bytes;
        self.stats.calls = self.lane.calls;
        shared.with_stats(|stats| stats.add(&self.stats));
    }
}

/// Reads blocks to host memory.
#[derive(Default)]
pub(super) struct HostReader {
    number: usize,
    account: Account,
    scratch: Option<Region>,
}

impl HostReader {
    pub(super) fn new(number: usize) -> Self {
        Self { number, ..Self::default() }
    }

    /// Reads until nothing is left.
    pub(super) fn run(mut self, shared: &Shared) -> Result<()> {
        loop {
            match shared.take(self.number) {
                Take::Block(index) => self.block(shared, index)?,
                Take::NotYet => self.account.stats.consumer_wait += shared.wait_for_blocks(self.number),
                Take::Parked => shared.wait_until_wanted(self.number),
                Take::Over => break,
            }
        }
        self.account.hand_in(shared);
        Ok(())
    }

    /// Reads one block.
    pub(super) fn block(&mut self, shared: &Shared, index: usize) -> Result<()> {
        let block = &shared.plan.blocks()[index];
        let object = shared.objects.get(block.object)?;
        let Account { lane, .. } = &mut self.account;
        let spent =
            to_host(&shared.plan, block, object.as_ref(), &shared.destinations, lane, &mut self.scratch)
                .map_err(|error| name_tensor(error, shared, block, object.as_ref()))?;
        self.account.spent(&spent);
        shared.count(block, spent.reading);
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
    number: usize,
    stream: Box<dyn CopyStream>,
    in_flight: VecDeque<InFlight>,
    spare: Vec<Slot>,
    arena: Arc<Arena>,
    /// The last of the consumer's fences that the stream waits for.
    fence: u64,
    pieces: Vec<Piece>,
    account: Account,
}

impl DeviceReader {
    pub(super) fn new(number: usize, device: &dyn Device, arena: Arc<Arena>) -> Result<Self> {
        Ok(Self {
            number,
            stream: device.stream()?,
            in_flight: VecDeque::new(),
            spare: Vec::new(),
            arena,
            fence: 0,
            pieces: Vec::new(),
            account: Account::default(),
        })
    }

    /// Reads until nothing is left and everything has landed.
    pub(super) fn run(mut self, shared: &Shared) -> Result<()> {
        loop {
            while let Some(first) = self.in_flight.front() {
                let (mark, block) = (first.mark, first.block);
                if !self.stream.is_done(mark).map_err(|error| name_block(error, shared, block))? {
                    break;
                }
                self.land_first(shared);
            }
            match shared.take(self.number) {
                Take::Block(index) => self.block(shared, index)?,
                Take::NotYet => {
                    self.let_go(shared)?;
                    self.account.stats.consumer_wait += shared.wait_for_blocks(self.number);
                }
                Take::Parked => {
                    self.let_go(shared)?;
                    shared.wait_until_wanted(self.number);
                }
                Take::Over => break,
            }
        }
        self.drain(shared)?;
        self.account.hand_in(shared);
        Ok(())
    }

    /// Idle readers hold nothing: another load may need the slots, and the consumer the tensors.
    fn let_go(&mut self, shared: &Shared) -> Result<()> {
        self.drain(shared)?;
        self.spare.clear();
        Ok(())
    }

    fn block(&mut self, shared: &Shared, index: usize) -> Result<()> {
        let Some(mut slot) = self.slot(shared)? else { return Ok(()) };
        let block = &shared.plan.blocks()[index];
        let object = shared.objects.get(block.object)?;
        if let Some((number, fence)) = shared.fence_after(self.fence) {
            self.stream.wait_for(fence.as_ref())?;
            self.fence = number;
        }
        let Account { lane, .. } = &mut self.account;
        let (stream, pieces) = (self.stream.as_mut(), &mut self.pieces);
        let (plan, to) = (&shared.plan, &shared.destinations);
        let read = to_device(plan, block, object.as_ref(), to, lane, &mut slot, stream, pieces);
        let marked = read.and_then(|spent| Ok((spent, self.stream.mark()?)));
        match marked {
            Ok((spent, mark)) => {
                self.account.spent(&spent);
                shared.count(block, spent.reading);
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
                && let Some(slot) = self.arena.try_acquire()?
            {
                return Ok(Some(slot));
            }
            if self.in_flight.is_empty() {
                if shared.is_cancelled() {
                    return Ok(None);
                }
                self.arena.wait(SLOT_WAIT);
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
        if let Some(first) = self.in_flight.front() {
            let (mark, block) = (first.mark, first.block);
            let began = Instant::now();
            self.stream.wait(mark).map_err(|error| name_block(error, shared, block))?;
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
