//! A few slots that were reserved, placed, touched and registered in one piece, and go in one piece.

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

/// Memory of some slots, registered with a device if that was possible.
pub(super) struct Chunk {
    region: ManuallyDrop<Region>,
    slots: usize,
    registered_with: Option<Arc<dyn Pinning>>,
    unpinned_because: Option<String>,
    owner: Owner,
}

impl Chunk {
    /// Makes memory for `slots` slots of `slot_bytes`. It is not registered where `refused` says that this was tried
    /// in vain before.
    ///
    /// # Errors
    /// `Memory` where the operating system refuses. Being refused by the device is no error: the memory serves as it
    /// is, and says why.
    pub(super) fn make(
        site: &Site,
        slots: usize,
        slot_bytes: usize,
        refused: Option<String>,
    ) -> Result<Self> {
        let region = Region::reserve_as(slots * slot_bytes, site.backing)?;
        if let Some(node) = site.node
            && let Err(error) = numa::prefer(&region, node)
        {
            // Memory from another node is slower, not wrong, and often this is a container's ordinary policy.
            tracing::debug!(%error, node, "staging memory could not be asked of the device's node");
        }
        if site.backing == Backing::Anonymous && !region.keep_from_children() {
            tracing::debug!("staging memory cannot be left out of forked children");
        }
        region.touch()?;
        let (pointer, len) = (region.as_ptr(), region.len());
        let mut chunk = Self {
            region: ManuallyDrop::new(region),
            slots,
            registered_with: None,
            unpinned_because: refused,
            owner: Owner::current(),
        };
        if let Some(pinning) = &site.pinning
            && chunk.unpinned_because.is_none()
        {
            // SAFETY: the region is unmapped only by `Drop`, which unregisters it first.
            match unsafe { pinning.register(pointer, len) } {
                Ok(()) => chunk.registered_with = Some(Arc::clone(pinning)),
                Err(error) => chunk.unpinned_because = Some(error.to_string()),
            }
        }
        Ok(chunk)
    }

    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    pub(super) fn bytes(&self) -> usize {
        self.region.len()
    }

    /// Why it is not pinned although a device asked for that.
    pub(super) fn unpinned_because(&self) -> Option<&str> {
        self.unpinned_because.as_deref()
    }

    /// Where its slots begin.
    pub(super) fn addresses(&self) -> impl Iterator<Item = SlotAddress> + use<> {
        let (base, step) = (self.region.as_ptr(), self.region.len() / self.slots);
        // SAFETY: `slots` steps of that length lie in the region.
        (0..self.slots)
            .filter_map(move |slot| NonNull::new(unsafe { base.add(slot * step) }).map(SlotAddress))
    }

    /// Whether the slot at `address` is one of its own.
    pub(super) fn holds(&self, address: SlotAddress) -> bool {
        let start = self.region.as_ptr().addr();
        (start..start + self.region.len()).contains(&address.as_ptr().addr())
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            // A child: the registration is its parent's, and the addresses may be used for something else by now.
            return;
        }
        if let Some(pinning) = &self.registered_with {
            // SAFETY: registered in `make`; a chunk goes when all of its slots are free, so no copy is in flight.
            unsafe { pinning.unregister(self.region.as_ptr()) };
        }
        // SAFETY: dropped here and nowhere else.
        unsafe { ManuallyDrop::drop(&mut self.region) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PAGE;

    #[test]
    fn the_slots_of_a_chunk_lie_beside_each_other_and_are_its_own() {
        let site = Site { pinning: None, node: None, backing: Backing::Anonymous };
        let (one, other) =
            (Chunk::make(&site, 3, PAGE, None).unwrap(), Chunk::make(&site, 1, PAGE, None).unwrap());
        let addresses: Vec<_> = one.addresses().map(|slot| slot.as_ptr().addr()).collect();
        assert_eq!(addresses, [0, 1, 2].map(|slot| one.region.as_ptr().addr() + slot * PAGE));
        assert!(one.addresses().all(|slot| one.holds(slot) && !other.holds(slot)));
    }

    #[test]
    fn the_slots_of_a_memfd_are_seen_by_whoever_maps_it() {
        let site = Site { pinning: None, node: None, backing: Backing::Memfd };
        let chunk = Chunk::make(&site, 2, PAGE, None).unwrap();
        let other =
            Region::map_shared(chunk.region.shared_file().unwrap().try_clone_to_owned().unwrap()).unwrap();
        let slot = chunk.addresses().nth(1).unwrap();
        // SAFETY: the slot belongs to this test.
        unsafe { slot.as_ptr().write(7) };
        // SAFETY: mapped, and written a moment ago.
        assert_eq!(unsafe { other.as_ptr().add(PAGE).read() }, 7);
    }
}
