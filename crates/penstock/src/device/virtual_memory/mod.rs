//! Device memory at addresses that stay: a range of addresses is reserved once, physical memory comes and goes under it.
//!
//! A [`DeviceRange`] (`range`) is mapped from its beginning to any chunk and unmapped from its end. Chunks that one range gives up
//! are kept for the next one, without the driver: a component that goes hands its memory to the one that comes. A range
//! is made of large chunks, since a map costs the same for any size, and of a tail of powers of two, so that less than
//! one granule is wasted and kept chunks fit other ranges too.
//!
//! Promises that a call that fails leaves everything as it was; that the books are exact; that memory is unmapped before
//! it is released and released before its addresses are freed; and that a forked child, which does not have the memory,
//! leaves it alone. Whoever unmaps has waited for the work that uses the memory. Knows no CUDA: that is a [`Space`].

mod range;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, ErrorKind, Result};
use crate::memory::Owner;

pub use range::DeviceRange;

/// Bytes of a large chunk. On an H100, 24 GB are mapped in 4.6 ms and unmapped in 2.5; in chunks of 64 MiB in 15 and 10.
pub const DEVICE_CHUNK: usize = 256 << 20;
/// What the scratch granule is filled with: NaN in every floating-point format of 16 bits and more.
const SCRATCH: u8 = 0xFF;

/// Addresses and physical memory of one device, as its driver gives them. Lengths and addresses are multiples of
/// [`Space::granularity`].
pub trait Space: Send + Sync {
    /// The device's name in errors.
    fn name(&self) -> &str;

    /// The least number of bytes that can be mapped.
    fn granularity(&self) -> usize;

    /// Physical memory that the driver could give.
    ///
    /// # Errors
    /// `Device` where the driver refuses, as all of these.
    fn free_bytes(&self) -> Result<usize>;

    /// Addresses without memory.
    ///
    /// # Errors
    /// `Memory` where there are none left.
    fn reserve(&self, len: usize) -> Result<u64>;

    /// Gives addresses back.
    ///
    /// # Safety
    /// Reserved in one piece; nothing is mapped there, and nobody uses the addresses.
    ///
    /// # Errors
    /// As above.
    unsafe fn unreserve(&self, start: u64, len: usize) -> Result<()>;

    /// A chunk of physical memory, mapped nowhere.
    ///
    /// # Errors
    /// `Memory` where there is none left.
    fn create(&self, len: usize) -> Result<u64>;

    /// Gives a chunk back.
    ///
    /// # Safety
    /// Created here, mapped nowhere, released once.
    ///
    /// # Errors
    /// As above.
    unsafe fn release(&self, chunk: u64) -> Result<()>;

    /// Maps all of a chunk, without access to it.
    ///
    /// # Safety
    /// The addresses are reserved and nothing is mapped there; the chunk has that length.
    ///
    /// # Errors
    /// As above.
    unsafe fn map(&self, start: u64, len: usize, chunk: u64) -> Result<()>;

    /// Lets the device read and write what is mapped there. The dearest call: once for many chunks.
    ///
    /// # Safety
    /// All of it is mapped.
    ///
    /// # Errors
    /// As above.
    unsafe fn allow(&self, start: u64, len: usize) -> Result<()>;

    /// Takes the mapping of one chunk back.
    ///
    /// # Safety
    /// One whole mapping; no work on the device uses it any more.
    ///
    /// # Errors
    /// As above.
    unsafe fn unmap(&self, start: u64, len: usize) -> Result<()>;

    /// Fills memory, and waits for that.
    ///
    /// # Safety
    /// Mapped with access, and used by nobody else.
    ///
    /// # Errors
    /// As above.
    unsafe fn fill(&self, start: u64, len: usize, byte: u8) -> Result<()>;

    /// Copies memory to the host, and waits for that.
    ///
    /// # Safety
    /// Mapped with access.
    ///
    /// # Errors
    /// As above.
    unsafe fn read(&self, start: u64, into: &mut [u8]) -> Result<()>;

    /// Waits for all work of the process on the device.
    ///
    /// # Errors
    /// `Device` also where such work failed, or a graph is being captured.
    fn synchronize(&self) -> Result<()>;
}

/// Bytes of one [`DeviceMemory`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceUsage {
    /// Addresses of all ranges.
    pub reserved: usize,
    /// Physical memory that ranges have.
    pub mapped: usize,
    /// Physical memory that no range has, kept for the next one.
    pub kept: usize,
}

#[derive(Default)]
struct Books {
    usage: DeviceUsage,
    /// Chunks that no range has, by their length.
    kept: BTreeMap<usize, Vec<u64>>,
}

/// Physical memory that a range has or is about to have.
#[derive(Clone, Copy)]
struct Chunk {
    id: u64,
    len: usize,
    /// Whether the driver made it for the call under way, which gives it back to the driver if it fails.
    is_new: bool,
}

/// Where the debug mode's granule lies when nothing is mapped over it.
struct Scratch {
    chunk: u64,
    start: u64,
}

/// The ranges of one device and the chunks that are kept for them.
pub struct DeviceMemory {
    space: Box<dyn Space>,
    granularity: usize,
    chunk_bytes: usize,
    scratch: Option<Scratch>,
    made_by: Owner,
    books: Mutex<Books>,
}

impl DeviceMemory {
    /// No ranges yet. Chunks are at least `chunk_bytes` long, tails aside. With `debug`, addresses without memory of
    /// their own lead to one scratch granule that holds NaN, in place of a fault.
    ///
    /// # Errors
    /// `Memory` or `Device` where the scratch granule cannot be had.
    pub fn new(space: Box<dyn Space>, chunk_bytes: usize, debug: bool) -> Result<Arc<Self>> {
        let granularity = space.granularity();
        let granules = chunk_bytes.clamp(granularity, 1 << 40).div_ceil(granularity).next_power_of_two();
        let mut made = Self {
            space,
            granularity,
            chunk_bytes: granules * granularity,
            scratch: None,
            made_by: Owner::current(),
            books: Mutex::default(),
        };
        if debug {
            made.scratch = Some(made.make_scratch()?);
        }
        Ok(Arc::new(made))
    }

    /// Addresses for `len` bytes, without memory.
    ///
    /// # Errors
    /// `Memory` where there are no addresses left; `Device` in a forked child.
    pub fn reserve(self: &Arc<Self>, len: usize) -> Result<DeviceRange> {
        self.check_process()?;
        DeviceRange::new(Arc::clone(self), len)
    }

    /// Gives kept chunks back to the driver, as far as at least `keep` bytes are left. Returns the bytes given back.
    ///
    /// # Errors
    /// `Device` where the driver refuses, or in a forked child.
    pub fn trim(&self, keep: usize) -> Result<usize> {
        self.check_process()?;
        let mut given = 0;
        while let Some((len, chunk)) = self.take_surplus(keep) {
            // SAFETY: kept chunks are mapped nowhere, and this one was just taken out.
            if let Err(error) = unsafe { self.space.release(chunk) } {
                self.keep(len, chunk);
                return Err(error);
            }
            given += len;
        }
        Ok(given)
    }

    /// Bytes now; all zero in a forked child, which has none of it.
    pub fn usage(&self) -> DeviceUsage {
        if self.made_by.is_current() { self.books().usage } else { DeviceUsage::default() }
    }

    /// Bytes of a large chunk.
    pub fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// The least number of bytes that can be mapped.
    pub fn granularity(&self) -> usize {
        self.granularity
    }

    /// Whether nothing was written to addresses without memory of their own; always so without the debug mode. If
    /// something was, the scratch granule is filled anew. Whoever asks has waited for the work that may have written.
    ///
    /// # Errors
    /// `Device` where the driver refuses, or in a forked child.
    pub fn scratch_is_clean(&self) -> Result<bool> {
        self.check_process()?;
        let Some(scratch) = &self.scratch else { return Ok(true) };
        let mut bytes = vec![0; self.granularity];
        // SAFETY: mapped with access for as long as `self` exists.
        unsafe { self.space.read(scratch.start, &mut bytes) }?;
        let clean = bytes.iter().all(|byte| *byte == SCRATCH);
        if !clean {
            // SAFETY: as above; who uses it otherwise reads or writes what nobody relies on.
            unsafe { self.space.fill(scratch.start, self.granularity, SCRATCH) }?;
        }
        Ok(clean)
    }

    fn check_process(&self) -> Result<()> {
        if self.made_by.is_current() {
            return Ok(());
        }
        let cause = "memory of a parent process cannot be used in its forked child";
        Err(Error::new(ErrorKind::Device, cause).on(self.space.name()).remedy("Start workers with \"spawn\""))
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chunks of these lengths: kept ones first, then new ones. Kept chunks of other lengths go to the driver if it has
    /// no memory left.
    fn take(&self, lens: &[usize]) -> Result<Vec<Chunk>> {
        let mut taken = Vec::with_capacity(lens.len());
        for len in lens {
            match self.take_one(*len) {
                Ok(chunk) => taken.push(chunk),
                Err(error) => {
                    self.give_back(taken, true);
                    return Err(self.explained(error, lens.iter().sum()));
                }
            }
        }
        Ok(taken)
    }

    fn take_one(&self, len: usize) -> Result<Chunk> {
        {
            let mut books = self.books();
            if let Some(id) = books.kept.get_mut(&len).and_then(Vec::pop) {
                books.usage.kept -= len;
                books.usage.mapped += len;
                return Ok(Chunk { id, len, is_new: false });
            }
        }
        let id = match self.space.create(len) {
            Err(error) if error.kind() == ErrorKind::Memory && self.trim(0)? > 0 => {
                tracing::debug!(%error, "kept chunks went to the driver");
                self.space.create(len)?
            }
            created => created?,
        };
        self.books().usage.mapped += len;
        Ok(Chunk { id, len, is_new: true })
    }

    /// Takes chunks back that are mapped nowhere. Where a call is undone, new ones go to the driver.
    fn give_back(&self, chunks: Vec<Chunk>, undo: bool) {
        for Chunk { id, len, is_new } in chunks {
            self.books().usage.mapped -= len;
            // SAFETY: created for the call that is undone, and mapped nowhere.
            if !(undo && is_new && unsafe { self.space.release(id) }.is_ok()) {
                self.keep(len, id);
            }
        }
    }

    fn keep(&self, len: usize, chunk: u64) {
        let mut books = self.books();
        books.kept.entry(len).or_default().push(chunk);
        books.usage.kept += len;
    }

    /// The largest kept chunk without which at least `keep` bytes are kept; if there is none, nothing.
    fn take_surplus(&self, keep: usize) -> Option<(usize, u64)> {
        let mut books = self.books();
        let surplus = books.usage.kept.checked_sub(keep)?;
        let (len, chunks) = books.kept.range_mut(..=surplus).rev().find(|(_, chunks)| !chunks.is_empty())?;
        let (len, chunk) = (*len, chunks.pop()?);
        books.usage.kept -= len;
        Some((len, chunk))
    }

    /// Says of a lack of memory how much was wanted and how much there is.
    fn explained(&self, error: Error, wanted: usize) -> Error {
        if error.kind() != ErrorKind::Memory {
            return error;
        }
        let (free, kept) = (self.space.free_bytes().unwrap_or(0), self.usage().kept);
        let mib = |bytes: usize| bytes.div_ceil(1 << 20);
        let cause = format!("{} MiB more are wanted, and {} MiB are free", mib(wanted), free >> 20);
        Error::new(ErrorKind::Memory, cause)
            .on(self.space.name())
            .detail("wanted", wanted)
            .detail("free", free)
            .detail("kept", kept)
            .remedy("Evict other components, or free memory of the device that is used outside of the pool")
    }

    fn make_scratch(&self) -> Result<Scratch> {
        let len = self.granularity;
        let chunk = self.space.create(len)?;
        let placed = self.space.reserve(len).and_then(|start| {
            // SAFETY: reserved and created just now, with this length.
            let filled = unsafe { self.space.map(start, len, chunk) }.and_then(|()| {
                // SAFETY: mapped just now; nobody knows of it yet.
                unsafe { self.space.allow(start, len).and_then(|()| self.space.fill(start, len, SCRATCH)) }
                    // SAFETY: nothing uses it.
                    .inspect_err(|_| drop(unsafe { self.space.unmap(start, len) }))
            });
            // SAFETY: nothing is mapped there any more.
            filled
                .inspect_err(|_| drop(unsafe { self.space.unreserve(start, len) }))
                .map(|()| Scratch { chunk, start })
        });
        // SAFETY: mapped nowhere any more.
        placed.inspect_err(|_| drop(unsafe { self.space.release(chunk) }))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if !self.made_by.is_current() {
            return;
        }
        // Its ranges hold it, so there are none left. Where the driver refuses, it is gone or going, with all memory.
        let _ = self.trim(0);
        if let Some(Scratch { chunk, start }) = self.scratch.take() {
            // SAFETY: ranges have unmapped it when they went; mapped here once, by `make_scratch`.
            let _ = unsafe {
                self.space
                    .unmap(start, self.granularity)
                    .and_then(|()| self.space.release(chunk))
                    .and_then(|()| self.space.unreserve(start, self.granularity))
            };
        }
    }
}
