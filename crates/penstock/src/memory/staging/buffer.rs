//! The memory of one buffer: touched and registered in one piece, given back in one piece.

use std::sync::Arc;

use super::Pinning;
use crate::error::Result;
use crate::memory::Region;

/// Memory of one buffer, registered with a device if that was possible. It lies on addresses that other buffers lie on too.
pub(super) struct Buffer {
    addresses: Arc<Region>,
    start: usize,
    len: usize,
    registered_with: Option<Arc<dyn Pinning>>,
}

impl Buffer {
    /// Makes memory on the `len` bytes of `addresses` from `start` on, which are nobody else's. Registers it with `pinning`,
    /// and says why the device refused that: then the memory serves as it is.
    ///
    /// # Errors
    /// `Memory` where the operating system refuses.
    pub(super) fn make(
        addresses: Arc<Region>,
        start: usize,
        len: usize,
        pinning: Option<&Arc<dyn Pinning>>,
    ) -> Result<(Self, Option<String>)> {
        // From here on, dropping it gives back what pages there are.
        let mut buffer = Self { addresses, start, len, registered_with: None };
        buffer.addresses.touch(start, len)?;
        let Some(pinning) = pinning else { return Ok((buffer, None)) };
        // SAFETY: the pages are given back only by `Drop`, which unregisters them first.
        match unsafe { pinning.register(buffer.as_ptr(), len) } {
            Ok(()) => {
                buffer.registered_with = Some(Arc::clone(pinning));
                Ok((buffer, None))
            }
            Err(error) => Ok((buffer, Some(error.to_string()))),
        }
    }

    /// Where it begins.
    pub(super) fn as_ptr(&self) -> *mut u8 {
        // SAFETY: a buffer lies in its addresses: `touch` has looked.
        unsafe { self.addresses.as_ptr().add(self.start) }
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.registered_with.is_some()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(pinning) = &self.registered_with {
            // SAFETY: registered in `make`. Whoever held the buffer gave it back, so no copy is in flight.
            unsafe { pinning.unregister(self.as_ptr()) };
        }
        // SAFETY: these bytes are this buffer's alone, and nobody holds it.
        unsafe { self.addresses.release_pages(self.start, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PAGE;

    #[test]
    fn the_memory_of_a_buffer_goes_with_it_and_that_of_its_neighbour_stays() {
        let addresses = Arc::new(Region::reserve(8 * PAGE).unwrap());
        let [one, other] =
            [0, 4 * PAGE].map(|start| Buffer::make(Arc::clone(&addresses), start, 4 * PAGE, None).unwrap());
        let resident = || {
            let mut pages = [0u8; 8];
            let start = addresses.as_ptr().cast();
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
}
