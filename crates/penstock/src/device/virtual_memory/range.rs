//! One range of addresses, and the chunks and scratch granules that are mapped there.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Chunk, DeviceMemory};
use crate::error::{Error, ErrorKind, Result};

/// Addresses for one component, for as long as it exists. Its methods may be called by any thread.
pub struct DeviceRange {
    memory: Arc<DeviceMemory>,
    start: u64,
    len: usize,
    reserved: usize,
    /// Lengths of its chunks, from the beginning.
    chunks: Box<[usize]>,
    state: Mutex<Mapped>,
}

/// What is mapped: chunks from the beginning, then nothing, then scratch granules to the end in the debug mode.
struct Mapped {
    chunks: Vec<Chunk>,
    /// Bytes of `chunks`.
    bytes: usize,
    /// Those of them that the device may use; all of them, unless undoing a failed call failed too.
    allowed: usize,
    /// Where scratch granules begin; the end of the range without any.
    scratch: usize,
    closed: bool,
}

impl DeviceRange {
    pub(super) fn new(memory: Arc<DeviceMemory>, len: usize) -> Result<Self> {
        let granule = memory.granularity;
        let too_long =
            || Error::new(ErrorKind::Memory, format!("{len} bytes are more than there are addresses"));
        let total = len.checked_next_multiple_of(granule).ok_or_else(too_long)?;
        let reserved = total.max(granule);
        let start = memory.space.reserve(reserved)?;
        memory.books().usage.reserved += reserved;
        let chunks = lengths(total, memory.chunk_bytes, granule);
        let state = Mapped { chunks: Vec::new(), bytes: 0, allowed: 0, scratch: total, closed: false };
        let made = Self { memory, start, len, reserved, chunks, state: Mutex::new(state) };
        // From here on, dropping it gives back what there is.
        let covered = made.cover(&mut made.lock());
        covered.map(|()| made)
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.start
    }

    /// The bytes that were asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it was reserved for no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of memory when all of it is mapped: `len`, rounded up to a granule.
    pub fn whole(&self) -> usize {
        self.chunks.iter().sum()
    }

    /// Bytes from the beginning that have memory; none in a forked child.
    pub fn mapped(&self) -> usize {
        if self.memory.made_by.is_current() { self.lock().bytes } else { 0 }
    }

    /// Gives memory to the first `bytes`, rounded up to a chunk. What has memory keeps it, with its content; the content
    /// of the rest is undefined. Returns the bytes from the beginning that have memory now.
    ///
    /// # Errors
    /// `Memory` where there is not enough, and `Device` where the driver refuses; then nothing has changed, but that kept
    /// chunks may have gone to the driver. `Config` for more bytes than the range has, and after [`DeviceRange::close`].
    pub fn map(&self, bytes: usize) -> Result<usize> {
        self.memory.check_process()?;
        let mut state = self.lock();
        if state.closed || bytes > self.len {
            let cause = match state.closed {
                true => "the range was closed".to_owned(),
                false => format!("{bytes} bytes are wanted of a range of {}", self.len),
            };
            return Err(Error::new(ErrorKind::Config, cause).on(self.memory.space.name()));
        }
        let mut end = state.bytes;
        let missing = self.chunks[state.chunks.len()..].iter().take_while(|len| {
            let wanted = end < bytes;
            end += if wanted { **len } else { 0 };
            wanted
        });
        let lens: Vec<_> = missing.copied().collect();
        if end == state.allowed {
            return Ok(end);
        }
        let (had, mut taken) = (state.chunks.len(), self.memory.take(&lens)?);
        if let Err(error) = self.place(&mut state, &taken, end) {
            while state.chunks.len() > had && self.unmap_last(&mut state).is_ok() {}
            // What the driver does not unmap either stays where it is, in the books too.
            taken.drain(..state.chunks.len() - had);
            self.memory.give_back(taken, true);
            let _ = self.cover(&mut state);
            return Err(error);
        }
        Ok(end)
    }

    /// Takes the memory from every chunk that begins at `from` or later, and keeps it for other ranges. Returns the bytes
    /// of these chunks.
    ///
    /// # Safety
    /// No work on the device uses these chunks any more.
    ///
    /// # Errors
    /// `Device` where the driver refuses, or in a forked child. Chunks from the end may have gone already.
    pub unsafe fn unmap(&self, from: usize) -> Result<usize> {
        self.memory.check_process()?;
        let mut state = self.lock();
        let freed = self.unmap_from(&mut state, from)?;
        self.cover(&mut state)?;
        Ok(freed)
    }

    /// Takes all memory away, for good. The addresses stay reserved until the range is dropped: who still knows them must
    /// not find the memory of others there.
    ///
    /// # Safety
    /// As [`DeviceRange::unmap`].
    ///
    /// # Errors
    /// As [`DeviceRange::unmap`].
    pub unsafe fn close(&self) -> Result<()> {
        self.memory.check_process()?;
        self.lock().closed = true;
        // SAFETY: as the caller promises.
        unsafe { self.unmap(0) }.map(drop)
    }

    fn lock(&self) -> MutexGuard<'_, Mapped> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn at(&self, offset: usize) -> u64 {
        self.start + offset as u64
    }

    /// Maps chunks behind those that are mapped, up to `end`, and lets the device use them.
    fn place(&self, state: &mut Mapped, chunks: &[Chunk], end: usize) -> Result<()> {
        self.uncover(state, end)?;
        for chunk in chunks {
            // SAFETY: reserved by this range; chunks follow each other, and scratch granules are gone from there.
            unsafe { self.memory.space.map(self.at(state.bytes), chunk.len, chunk.id) }?;
            state.bytes += chunk.len;
            state.chunks.push(*chunk);
        }
        // SAFETY: all of it is mapped.
        unsafe { self.memory.space.allow(self.at(state.allowed), end - state.allowed) }?;
        state.allowed = end;
        Ok(())
    }

    fn unmap_from(&self, state: &mut Mapped, from: usize) -> Result<usize> {
        let (before, mut free) = (state.bytes, Vec::new());
        let unmapped = loop {
            match state.chunks.last() {
                Some(last) if state.bytes - last.len >= from => match self.unmap_last(state) {
                    Ok(chunk) => free.push(chunk),
                    Err(error) => break Err(error),
                },
                _ => break Ok(()),
            }
        };
        self.memory.give_back(free, false);
        unmapped.map(|()| before - state.bytes)
    }

    /// Unmaps the last chunk. It is the caller's then.
    fn unmap_last(&self, state: &mut Mapped) -> Result<Chunk> {
        let Some(chunk) = state.chunks.last().copied() else { unreachable!("the caller has looked") };
        let offset = state.bytes - chunk.len;
        // SAFETY: one whole mapping; whoever unmaps has promised that nothing uses it.
        unsafe { self.memory.space.unmap(self.at(offset), chunk.len) }?;
        state.chunks.pop();
        state.bytes = offset;
        state.allowed = state.allowed.min(offset);
        Ok(chunk)
    }

    /// In the debug mode, has everything without memory lead to the scratch granule.
    fn cover(&self, state: &mut Mapped) -> Result<()> {
        let (Some(scratch), granule) = (&self.memory.scratch, self.memory.granularity) else { return Ok(()) };
        let end = state.scratch;
        while state.scratch > state.bytes {
            let offset = state.scratch - granule;
            // SAFETY: reserved by this range, and nothing is mapped there; the chunk is one granule.
            unsafe { self.memory.space.map(self.at(offset), granule, scratch.chunk) }?;
            state.scratch = offset;
        }
        if state.scratch < end {
            // SAFETY: all of it was just mapped.
            unsafe { self.memory.space.allow(self.at(state.scratch), end - state.scratch) }?;
        }
        Ok(())
    }

    /// Unmaps scratch granules before `end`.
    fn uncover(&self, state: &mut Mapped, end: usize) -> Result<()> {
        while state.scratch < end {
            // SAFETY: one whole mapping, which nobody relies on.
            unsafe { self.memory.space.unmap(self.at(state.scratch), self.memory.granularity) }?;
            state.scratch += self.memory.granularity;
        }
        Ok(())
    }

    /// Gives everything back.
    fn end(&self) -> Result<()> {
        let (mut state, whole) = (self.lock(), self.whole());
        if state.bytes > 0 || state.scratch < whole {
            // Whoever dropped it with memory has waited for nothing.
            self.memory.space.synchronize()?;
        }
        self.unmap_from(&mut state, 0)?;
        self.uncover(&mut state, whole)?;
        // SAFETY: nothing is mapped there, and nobody has the range any more.
        unsafe { self.memory.space.unreserve(self.start, self.reserved) }?;
        self.memory.books().usage.reserved -= self.reserved;
        Ok(())
    }
}

impl fmt::Debug for DeviceRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceRange")
            .field("start", &self.start)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl Drop for DeviceRange {
    fn drop(&mut self) {
        if self.memory.made_by.is_current()
            && let Err(error) = self.end()
        {
            // The driver is gone or going, or the context is lost: what is still mapped stays so until the process ends.
            tracing::debug!(%error, "device memory was not given back");
        }
    }
}

/// How a range of `total` bytes is cut: large chunks, then powers of two of granules, from the largest on.
fn lengths(total: usize, chunk_bytes: usize, granule: usize) -> Box<[usize]> {
    let mut lens = vec![chunk_bytes; total / chunk_bytes];
    let (mut left, mut len) = (total % chunk_bytes, chunk_bytes);
    while left > 0 {
        len /= 2;
        if left >= len.max(granule) {
            lens.push(len);
            left -= len;
        }
    }
    lens.into()
}
