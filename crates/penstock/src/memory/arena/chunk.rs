//! A few slots that are touched and registered in one piece, and go in one piece; and the addresses they lie on.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use super::Pinning;
use crate::error::Result;
use crate::memory::fork::Owner;
use crate::memory::{Backing, Region, numa};

/// Where a slot begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlotAddress(NonNull<u8>);

// SAFETY: the address of arena memory; only the one `Slot` made from it touches the bytes.
unsafe impl Send for SlotAddress {}

impl SlotAddress {
    pub(super) fn as_ptr(self) -> *mut u8 {
        self.0.as_ptr()
    }
}

/// What the memory of an arena shall be.
pub(super) struct Site {
    pub(super) pinning: Option<Arc<dyn Pinning>>,
    /// The memory node to ask for.
    pub(super) node: Option<u32>,
    pub(super) backing: Backing,
}

/// Addresses for many slots, reserved at once: reserving, and saying how pages shall be made, keeps every other thread of
/// the process from making pages meanwhile. Twelve readers that each reserved a chunk of their own had the last one after
/// 21 ms, in one reservation after 5. Unmapped when the last chunk on it has gone.
pub(super) struct Ground {
    region: ManuallyDrop<Region>,
    slot_bytes: usize,
    slots: usize,
    owner: Owner,
}

impl Ground {
    /// Reserves room for `slots` slots; no memory is taken yet.
    ///
    /// # Errors
    /// `Memory` where the operating system refuses.
    pub(super) fn reserve(site: &Site, slots: usize, slot_bytes: usize) -> Result<Arc<Self>> {
        let region = Region::reserve_as(slots.saturating_mul(slot_bytes), site.backing)?;
        if let Some(node) = site.node
            && let Err(error) = numa::prefer(&region, node)
        {
            // Memory from another node is slower, not wrong, and often this is a container's ordinary policy.
            tracing::debug!(%error, node, "staging memory could not be asked of the device's node");
        }
        if site.backing == Backing::Anonymous && !region.keep_from_children() {
            tracing::debug!("staging memory cannot be left out of forked children");
        }
        Ok(Arc::new(Self { region: ManuallyDrop::new(region), slot_bytes, slots, owner: Owner::current() }))
    }

    #[cfg(test)]
    pub(super) fn region(&self) -> &Region {
        &self.region
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        // In a child the addresses may be used for something else by now.
        if self.owner.is_current() {
            // SAFETY: dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.region) };
        }
    }
}

/// A part of a ground, for one chunk.
pub(super) struct Plot {
    ground: Arc<Ground>,
    first: usize,
    slots: usize,
}

/// The ground that chunks are made on, and how much of it was given out.
pub(super) struct Plots {
    ground: Arc<Ground>,
    given: usize,
}

impl Plots {
    pub(super) fn of(ground: Arc<Ground>) -> Self {
        Self { ground, given: 0 }
    }

    /// Room for `slots` slots beside each other, if there is any left.
    pub(super) fn take(&mut self, slots: usize) -> Option<Plot> {
        let first = self.given;
        let end = first.checked_add(slots).filter(|end| *end <= self.ground.slots)?;
        self.given = end;
        Some(Plot { ground: Arc::clone(&self.ground), first, slots })
    }
}

/// Memory of some slots, registered with a device if that was possible.
pub(super) struct Chunk {
    plot: Plot,
    registered_with: Option<Arc<dyn Pinning>>,
    unpinned_because: Option<String>,
}

impl Plot {
    fn start(&self) -> usize {
        self.first * self.ground.slot_bytes
    }

    fn bytes(&self) -> usize {
        self.slots * self.ground.slot_bytes
    }

    fn as_ptr(&self) -> *mut u8 {
        // SAFETY: plots lie in their ground.
        unsafe { self.ground.region.as_ptr().add(self.start()) }
    }
}

impl Chunk {
    /// Makes memory on `plot`. It is not registered where `refused` says that this was tried in vain before.
    ///
    /// # Errors
    /// `Memory` where the operating system refuses. Being refused by the device is no error: the memory serves as it
    /// is, and says why.
    pub(super) fn make(site: &Site, plot: Plot, refused: Option<String>) -> Result<Self> {
        let (pointer, len) = (plot.as_ptr(), plot.bytes());
        // From here on, dropping it gives back what pages there are.
        let mut chunk = Self { plot, registered_with: None, unpinned_because: refused };
        chunk.plot.ground.region.touch(chunk.plot.start(), len)?;
        if let Some(pinning) = &site.pinning
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

    pub(super) fn slots(&self) -> usize {
        self.plot.slots
    }

    pub(super) fn bytes(&self) -> usize {
        self.plot.bytes()
    }

    /// Why it is not pinned although a device asked for that.
    pub(super) fn unpinned_because(&self) -> Option<&str> {
        self.unpinned_because.as_deref()
    }

    /// Where its slots begin.
    pub(super) fn addresses(&self) -> impl Iterator<Item = SlotAddress> + use<> {
        let (base, step) = (self.plot.as_ptr(), self.plot.ground.slot_bytes);
        // SAFETY: `slots` steps of that length lie in the plot.
        (0..self.plot.slots)
            .filter_map(move |slot| NonNull::new(unsafe { base.add(slot * step) }).map(SlotAddress))
    }

    /// Whether the slot at `address` is one of its own.
    pub(super) fn holds(&self, address: SlotAddress) -> bool {
        let start = self.plot.as_ptr().addr();
        (start..start + self.plot.bytes()).contains(&address.as_ptr().addr())
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if !self.plot.ground.owner.is_current() {
            // A child: the registration is its parent's, and the addresses may be used for something else by now.
            return;
        }
        if let Some(pinning) = &self.registered_with {
            // SAFETY: registered in `make`; a chunk goes when all of its slots are free, so no copy is in flight.
            unsafe { pinning.unregister(self.plot.as_ptr()) };
        }
        // SAFETY: the plot is this chunk's alone, and nobody holds a slot of it.
        unsafe { self.plot.ground.region.release_pages(self.plot.start(), self.plot.bytes()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PAGE;

    #[test]
    fn the_slots_of_a_chunk_lie_beside_each_other_and_are_its_own() {
        let site = Site { pinning: None, node: None, backing: Backing::Anonymous };
        let ground = Ground::reserve(&site, 4, PAGE).unwrap();
        let start = ground.region().as_ptr().addr();
        let mut plots = Plots::of(ground);
        let mut make = |slots| Chunk::make(&site, plots.take(slots).unwrap(), None).unwrap();
        let (one, other) = (make(3), make(1));
        assert!(plots.take(1).is_none());
        let addresses: Vec<_> = one.addresses().map(|slot| slot.as_ptr().addr()).collect();
        assert_eq!(addresses, [0, 1, 2].map(|slot| start + slot * PAGE));
        assert!(one.addresses().all(|slot| one.holds(slot) && !other.holds(slot)));
    }

    #[test]
    fn the_memory_of_a_chunk_goes_with_it_and_that_of_its_neighbour_stays() {
        let site = Site { pinning: None, node: None, backing: Backing::Anonymous };
        let ground = Ground::reserve(&site, 2, 4 * PAGE).unwrap();
        let mut plots = Plots::of(Arc::clone(&ground));
        let [one, other] = [0, 1].map(|_| Chunk::make(&site, plots.take(1).unwrap(), None).unwrap());
        let resident = || {
            let mut pages = [0u8; 8];
            let start = ground.region().as_ptr().cast();
            // SAFETY: the ground is mapped, and there is a byte for each of its pages.
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
    fn the_slots_of_a_memfd_are_seen_by_whoever_maps_it() {
        let site = Site { pinning: None, node: None, backing: Backing::Memfd };
        let ground = Ground::reserve(&site, 2, PAGE).unwrap();
        let file = ground.region().shared_file().unwrap().try_clone_to_owned().unwrap();
        let chunk = Chunk::make(&site, Plots::of(ground).take(2).unwrap(), None).unwrap();
        let other = Region::map_shared(file).unwrap();
        let slot = chunk.addresses().nth(1).unwrap();
        // SAFETY: the slot belongs to this test.
        unsafe { slot.as_ptr().write(7) };
        // SAFETY: mapped, and written a moment ago.
        assert_eq!(unsafe { other.as_ptr().add(PAGE).read() }, 7);
    }
}
