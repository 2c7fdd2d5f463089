//! Bytes that lie in several places of host and device memory, brought together in one buffer: what a save writes at once.
//!
//! What comes from a device goes through pinned staging memory, on a stream of the thread that gathers. The thread waits for
//! its own copies; it is the other threads that write meanwhile, so copies and writes overlap. What was queued on the
//! consumer's stream before the save began is waited for by the stream, by a fence, and not by the thread.
//!
//! Knows neither files nor tensors.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::{CopyStream, Device, Fence, ReadBackRegion};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{HostBytes, Lease, Region, StagingBuffer, Window};

/// How long a wait for a staging buffer goes on before it looks whether it should end.
const LOOK_AROUND: Duration = Duration::from_millis(50);

/// A device that bytes come from, and what its copies wait for.
pub type SourceDevice = (Arc<dyn Device>, Arc<dyn Fence>);

/// Bytes of a device's memory that are to be read.
#[derive(Debug)]
pub struct DeviceBytes {
    device: usize,
    start: u64,
    len: usize,
}

impl DeviceBytes {
    /// `len` bytes from the address `start` of the device with that number among those of the save.
    ///
    /// # Safety
    /// The bytes must be allocated on that device, and neither written to nor freed as long as this exists, but for work
    /// that was queued before the device's fence was made.
    pub unsafe fn new(device: usize, start: u64, len: usize) -> Self {
        Self { device, start, len }
    }
}

/// Bytes wherever they lie.
#[derive(Debug)]
pub enum SourceBytes {
    /// In memory of our own.
    Owned(Vec<u8>),
    /// In host memory of the caller.
    Host(HostBytes),
    /// In device memory of the caller.
    Device(DeviceBytes),
}

impl SourceBytes {
    /// Their number.
    pub fn len(&self) -> usize {
        match self {
            Self::Owned(bytes) => bytes.len(),
            Self::Host(bytes) => bytes.as_slice().len(),
            Self::Device(bytes) => bytes.len,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, where the host can read them as they lie.
    pub fn in_host_memory(&self) -> Option<&[u8]> {
        match self {
            Self::Owned(bytes) => Some(bytes),
            Self::Host(bytes) => Some(bytes.as_slice()),
            Self::Device(_) => None,
        }
    }
}

/// The buffer of one thread, and its streams. Streams go first: dropping one waits for its copies to the buffer.
pub struct Gatherer {
    streams: Vec<(Arc<dyn Device>, Box<dyn CopyStream>)>,
    staged: Option<StagingBuffer>,
    lease: Option<Arc<Lease>>,
    plain: Option<Region>,
    buffer_bytes: usize,
}

impl Gatherer {
    /// A gatherer of at most `buffer_bytes` at once. Where there are devices, each with the fence that its copies wait for,
    /// `lease` gives the buffers that they copy to, of as many bytes.
    ///
    /// # Errors
    /// `Device` where a driver refuses.
    pub fn new(devices: &[SourceDevice], lease: Option<Arc<Lease>>, buffer_bytes: usize) -> Result<Self> {
        let mut streams = Vec::new();
        for (device, fence) in devices {
            device.bind_thread()?;
            let mut stream = device.stream()?;
            stream.wait_for(&**fence)?;
            streams.push((Arc::clone(device), stream));
        }
        Ok(Self { streams, staged: None, lease, plain: None, buffer_bytes })
    }

    /// The bytes of these ranges of sources, one after the other, and zeros after them up to a multiple of `align`. They
    /// stay until the next call; [`Gatherer::release`] gives a staging buffer back before.
    ///
    /// # Errors
    /// `Device` where a copy fails, `Memory` where there is no memory, `Cancelled` where `is_stopped` says so while a
    /// staging buffer is waited for.
    ///
    /// # Panics
    /// Where the bytes do not fit into the buffer, or a range does not lie in its source: a bug of the caller.
    pub fn gather(
        &mut self,
        pieces: &[(&SourceBytes, Range<usize>)],
        align: usize,
        is_stopped: impl Fn() -> bool,
    ) -> Result<&[u8]> {
        let bytes: usize = pieces.iter().map(|(_, range)| range.len()).sum();
        let padded = bytes.next_multiple_of(align.max(1));
        assert!(padded <= self.buffer_bytes, "more bytes than the buffer holds");
        let of_device = |(source, _): &(&SourceBytes, Range<usize>)| matches!(source, SourceBytes::Device(_));
        if pieces.iter().any(of_device) {
            self.stage(is_stopped)?;
            return self.copy_back(pieces, bytes, padded);
        }
        if self.plain.is_none() {
            self.plain = Some(Region::reserve(self.buffer_bytes)?);
        }
        let Some(region) = &mut self.plain else { unreachable!("it was just made") };
        let buffer = &mut region.as_mut_slice()[..padded];
        let mut at = 0;
        for (source, range) in pieces {
            let Some(from) = source.in_host_memory() else { unreachable!("there is none of a device") };
            buffer[at..at + range.len()].copy_from_slice(&from[range.clone()]);
            at += range.len();
        }
        buffer[at..].fill(0);
        Ok(buffer)
    }

    /// Gives the staging buffer back, so that another thread can use it.
    pub fn release(&mut self) {
        self.staged = None;
    }

    fn stage(&mut self, is_stopped: impl Fn() -> bool) -> Result<()> {
        let Some(lease) = &self.lease else {
            return Err(Error::new(
                ErrorKind::Device,
                "there is no staging memory for the bytes of a device",
            ));
        };
        while self.staged.is_none() {
            if is_stopped() {
                return Err(Error::new(ErrorKind::Cancelled, "it was stopped"));
            }
            self.staged = lease.try_acquire()?;
            if self.staged.is_none() {
                lease.wait(LOOK_AROUND);
            }
        }
        Ok(())
    }

    fn copy_back(
        &mut self,
        pieces: &[(&SourceBytes, Range<usize>)],
        bytes: usize,
        padded: usize,
    ) -> Result<&[u8]> {
        let in_order = |(source, _): &(&SourceBytes, Range<usize>)| match source {
            SourceBytes::Device(from) => from.device < self.streams.len(),
            _ => true,
        };
        assert!(pieces.iter().all(in_order), "bytes of a device that is none of the save's");
        let Self { streams, staged, .. } = self;
        let Some(buffer) = staged else { unreachable!("it was just taken") };
        assert!(padded <= buffer.len(), "more bytes than the staging buffer holds");
        let start = buffer.as_ptr();
        for (number, (device, stream)) in streams.iter_mut().enumerate() {
            let mut regions = Vec::new();
            let mut at = 0;
            for (source, range) in pieces {
                if let SourceBytes::Device(from) = source
                    && from.device == number
                {
                    assert!(range.end <= from.len, "a range outside of its tensor");
                    // SAFETY: inside the buffer, as the sum of all ranges is.
                    let destination = unsafe { start.add(at) };
                    regions.push(ReadBackRegion {
                        source: from.start + range.start as u64,
                        destination,
                        len: range.len(),
                    });
                }
                at += range.len();
            }
            if regions.is_empty() {
                continue;
            }
            let mut copy = || {
                device.bind_thread()?;
                // SAFETY: whoever made the sources keeps them. The parts of the buffer do not overlap, and the buffer is this
                // thread's until the mark below is done, or the stream is dropped, which waits for its copies.
                unsafe { stream.read_back(&regions)? };
                let mark = stream.mark()?;
                stream.wait(mark)
            };
            if let Err(error) = copy() {
                streams.clear();
                return Err(error);
            }
        }
        let mut window: Window<'_> = buffer.window();
        let mut at = 0;
        for (source, range) in pieces {
            if let Some(from) = source.in_host_memory() {
                window.write(at, &from[range.clone()]);
            }
            at += range.len();
        }
        window.write(bytes, &[0; crate::memory::PAGE][..padded - bytes]);
        // SAFETY: every byte of it was copied from a device or from the host, or is a zero behind them. The buffer is
        // borrowed for as long as the bytes are.
        Ok(unsafe { std::slice::from_raw_parts(start, padded) })
    }
}
