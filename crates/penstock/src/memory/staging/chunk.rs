//! A few buffers that are touched and registered in one piece, and go in one piece; and the addresses they lie on.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use super::Pinning;
use crate::error::Result;
use crate::memory::fork::Owner;
use crate::memory::{Backing, Region, numa};

/// Where a buffer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BufferAddress(NonNull<u8>);

// SAFETY: the address of arena memory; only the one `StagingBuffer` made from it touches the bytes.
unsafe impl Send for BufferAddress {}

impl BufferAddress {
    pub(super) fn as_ptr(self) -> *mut u8 {
        self.0.as_ptr()
    }
}

/// What the memory of an arena shall be.
pub(super) struct ArenaSpec {
    pub(super) pinning: Option<Arc<dyn Pinning>>,
    /// The memory node to ask for.
    pub(super) node: Option<u32>,
    pub(super) backing: Backing,
}

/// Addresses for many buffers, reserved at once: reserving, and saying how pages shall be made, keeps every other thread of
/// the process from making pages meanwhile. Twelve readers that each reserved a chunk of their own had the last one after
/// 21 ms, in one reservation after 5. Unmapped when the last chunk on it has gone.
pub(super) struct AddressRange {
    region: ManuallyDrop<Region>,
    buffer_bytes: usize,
    buffers: usize,
    owner: Owner,
}

impl AddressRange {
    /// Reserves room for `buffers` buffers; no memory is taken yet.
    ///
    /// # Errors
    /// `Memory` where the operating system refuses.
    pub(super) fn reserve(spec: &ArenaSpec, buffers: usize, buffer_bytes: usize) -> Result<Arc<Self>> {
        let region = Region::reserve_as(buffers.saturating_mul(buffer_bytes), spec.backing)?;
        if let Some(node) = spec.node
            && let Err(error) = numa::prefer(&region, node)
        {
            // Memory from another node is slower, not wrong, and often this is a container's ordinary policy.
            tracing::debug!(%error, node, "staging memory could not be asked of the device's node");
        }
        if spec.backing == Backing::Anonymous && !region.keep_from_children() {
            tracing::debug!("staging memory cannot be left out of forked children");
        }
        Ok(Arc::new(Self {
            region: ManuallyDrop::new(region),
            buffer_bytes,
            buffers,
            owner: Owner::current(),
        }))
    }

    #[cfg(test)]
    pub(super) fn region(&self) -> &Region {
        &self.region
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        // In a child the addresses may be used for something else by now.
        if self.owner.is_current() {
            // SAFETY: dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.region) };
        }
    }
}

/// A part of the addresses, for one chunk.
pub(super) struct ChunkRange {
    addresses: Arc<AddressRange>,
    first: usize,
    buffers: usize,
}

/// The addresses that chunks are made on, and how much of it was given out.
pub(super) struct RangeAllocator {
    addresses: Arc<AddressRange>,
    given: usize,
}

impl RangeAllocator {
    pub(super) fn of(addresses: Arc<AddressRange>) -> Self {
        Self { addresses, given: 0 }
    }

    /// Room for `buffers` buffers beside each other, if there is any left.
    pub(super) fn take(&mut self, buffers: usize) -> Option<ChunkRange> {
        let first = self.given;
        let end = first.checked_add(buffers).filter(|end| *end <= self.addresses.buffers)?;
        self.given = end;
        Some(ChunkRange { addresses: Arc::clone(&self.addresses), first, buffers })
    }
}

/// Memory of some buffers, registered with a device if that was possible.
pub(super) struct Chunk {
    range: ChunkRange,
    registered_with: Option<Arc<dyn Pinning>>,
    unpinned_because: Option<String>,
}

impl ChunkRange {
    fn start(&self) -> usize {
        self.first * self.addresses.buffer_bytes
    }

    fn bytes(&self) -> usize {
        self.buffers * self.addresses.buffer_bytes
    }

    fn as_ptr(&self) -> *mut u8 {
        // SAFETY: a range lies in its addresses.
        unsafe { self.addresses.region.as_ptr().add(self.start()) }
    }
}

impl Chunk {
    /// Makes memory on `range`. It is not registered where `refused` says that this was tried in vain before.
    ///
    /// # Errors
    /// `Memory` where the operating system refuses. Being refused by the device is no error: the memory serves as it
    /// is, and says why.
    pub(super) fn make(spec: &ArenaSpec, range: ChunkRange, refused: Option<String>) -> Result<Self> {
        let (pointer, len) = (range.as_ptr(), range.bytes());
        // From here on, dropping it gives back what pages there are.
        let mut chunk = Self { range, registered_with: None, unpinned_because: refused };
        chunk.range.addresses.region.touch(chunk.range.start(), len)?;
        if let Some(pinning) = &spec.pinning
            && chunk.unpinned_because.is_none()
        {
            // SAFETY: the pages are given back only by `Drop`, which unregisters them first.
            match unsafe { pinning.register(pointer, len) } {
                Ok(()) => chunk.registered_with = Some(Arc::clone(pinning)),
                Err(error) => chunk.unpinned_because = Some(error.to_string()),
            }
        }
        Ok(chunk)
    }

    pub(super) fn buffers(&self) -> usize {
        self.range.buffers
    }

    pub(super) fn bytes(&self) -> usize {
        self.range.bytes()
    }

    /// Why it is not pinned although a device asked for that.
    pub(super) fn unpinned_because(&self) -> Option<&str> {
        self.unpinned_because.as_deref()
    }

    /// Where its buffers begin.
    pub(super) fn addresses(&self) -> impl Iterator<Item = BufferAddress> + use<> {
        let (base, step) = (self.range.as_ptr(), self.range.addresses.buffer_bytes);
        // SAFETY: `buffers` steps of that length lie in the range.
        (0..self.range.buffers)
            .filter_map(move |buffer| NonNull::new(unsafe { base.add(buffer * step) }).map(BufferAddress))
    }

    /// Whether the buffer at `address` is one of its own.
    pub(super) fn holds(&self, address: BufferAddress) -> bool {
        let start = self.range.as_ptr().addr();
        (start..start + self.range.bytes()).contains(&address.as_ptr().addr())
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if !self.range.addresses.owner.is_current() {
            // A child: the registration is its parent's, and the addresses may be used for something else by now.
            return;
        }
        if let Some(pinning) = &self.registered_with {
            // SAFETY: registered in `make`; a chunk goes when all of its buffers are free, so no copy is in flight.
            unsafe { pinning.unregister(self.range.as_ptr()) };
        }
        // SAFETY: the range is this chunk's alone, and nobody holds a buffer of it.
        unsafe { self.range.addresses.region.release_pages(self.range.start(), self.range.bytes()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PAGE;

    #[test]
    fn the_buffers_of_a_chunk_lie_beside_each_other_and_are_its_own() {
        let spec = ArenaSpec { pinning: None, node: None, backing: Backing::Anonymous };
        let addresses = AddressRange::reserve(&spec, 4, PAGE).unwrap();
        let start = addresses.region().as_ptr().addr();
        let mut ranges = RangeAllocator::of(addresses);
        let mut make = |buffers| Chunk::make(&spec, ranges.take(buffers).unwrap(), None).unwrap();
        let (one, other) = (make(3), make(1));
        assert!(ranges.take(1).is_none());
        let addresses: Vec<_> = one.addresses().map(|buffer| buffer.as_ptr().addr()).collect();
        assert_eq!(addresses, [0, 1, 2].map(|buffer| start + buffer * PAGE));
        assert!(one.addresses().all(|buffer| one.holds(buffer) && !other.holds(buffer)));
    }

    #[test]
    fn the_memory_of_a_chunk_goes_with_it_and_that_of_its_neighbour_stays() {
        let spec = ArenaSpec { pinning: None, node: None, backing: Backing::Anonymous };
        let addresses = AddressRange::reserve(&spec, 2, 4 * PAGE).unwrap();
        let mut ranges = RangeAllocator::of(Arc::clone(&addresses));
        let [one, other] = [0, 1].map(|_| Chunk::make(&spec, ranges.take(1).unwrap(), None).unwrap());
        let resident = || {
            let mut pages = [0u8; 8];
            let start = addresses.region().as_ptr().cast();
            // SAFETY: the addresses are mapped, and there is a byte for each of its pages.
            let done = unsafe { libc::mincore(start, 8 * PAGE, pages.as_mut_ptr()) };
            assert_eq!(done, 0);
            pages.map(|page| page & 1)
        };
        assert_eq!(resident(), [1; 8]);
        drop(one);
        assert_eq!(resident(), [0, 0, 0, 0, 1, 1, 1, 1]);
        drop(other);
        assert_eq!(resident(), [0; 8]);
    }

    #[test]
    fn the_buffers_of_a_memfd_are_seen_by_whoever_maps_it() {
        let spec = ArenaSpec { pinning: None, node: None, backing: Backing::Memfd };
        let addresses = AddressRange::reserve(&spec, 2, PAGE).unwrap();
        let file = addresses.region().shared_file().unwrap().try_clone_to_owned().unwrap();
        let chunk = Chunk::make(&spec, RangeAllocator::of(addresses).take(2).unwrap(), None).unwrap();
        let other = Region::map_shared(file).unwrap();
        let buffer = chunk.addresses().nth(1).unwrap();
        // SAFETY: the buffer belongs to this test.
        unsafe { buffer.as_ptr().write(7) };
        // SAFETY: mapped, and written a moment ago.
        assert_eq!(unsafe { other.as_ptr().add(PAGE).read() }, 7);
    }
}
