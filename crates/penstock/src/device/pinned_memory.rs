//! Host memory that stays pinned as long as it exists: masters of a model pool, tensors that a program copies by itself.
//!
//! Touched by several threads, so that pages are there (huge ones where the kernel has them), then registered. That is
//! some eight times as fast as the driver's own allocation. All of it is registered at once: the driver refuses a copy
//! that reaches from one registered range into the next, and anyone may copy any tensor of it.
//!
//! Promises that the memory is the size that was asked for, rounded up to a page; that nothing of it remains once it is
//! dropped; and that a forked child, which does not have it, leaves it alone. Knows no device: that is a [`Pinning`].

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};

use crate::error::Result;
use crate::memory::{Owner, PAGE, Pinning, Region, Window};
use crate::threads;

/// Bytes that a thread touches at once.
const TOUCHED: usize = 64 << 20;

/// Pinned host memory, filled by its owner.
pub struct PinnedMemory {
    region: ManuallyDrop<Region>,
    pinning: Arc<dyn Pinning>,
    registered: OnceLock<Result<()>>,
    made_by: Owner,
}

impl PinnedMemory {
    /// Makes `len` bytes, with at most `threads` threads. Where the device refuses to register them, they stay pageable.
    ///
    /// # Errors
    /// `Memory` where there is no memory.
    pub fn make(len: usize, pinning: Arc<dyn Pinning>, threads: usize) -> Result<Self> {
        let made = Self::reserve(len, pinning)?;
        let touched: Vec<_> =
            (0..len).step_by(TOUCHED).map(|start| (start, TOUCHED.min(len - start))).collect();
        threads::in_order(&touched, threads, "penstock-pinning", |(start, len)| {
            made.region.touch(*start, *len)
        })
        .map_err(|(_, error)| error)?;
        made.register();
        Ok(made)
    }

    /// `len` bytes that get pages as they are written to, and are pageable until [`PinnedMemory::register`]: for what
    /// is moved there bit by bit, while the memory that it came from is freed.
    ///
    /// # Errors
    /// `Memory` where there is no memory.
    pub fn reserve(len: usize, pinning: Arc<dyn Pinning>) -> Result<Self> {
        let region = ManuallyDrop::new(Region::reserve(len)?);
        // From here on, dropping it gives back what there is.
        let made = Self { region, pinning, registered: OnceLock::new(), made_by: Owner::current() };
        made.region.keep_from_children();
        Ok(made)
    }

    /// Registers all of it, once. Says why the device refused, if it did: then it stays pageable.
    pub fn register(&self) -> Option<String> {
        let registered = self.registered.get_or_init(|| {
            if self.is_empty() {
                return Ok(());
            }
            // SAFETY: the region stays mapped until `Drop` has unregistered it; whole pages are mapped.
            unsafe { self.pinning.register(self.region.as_ptr(), self.region.len().next_multiple_of(PAGE)) }
        });
        registered.as_ref().err().map(ToString::to_string)
    }

    /// Where it begins.
    pub fn as_ptr(&self) -> *mut u8 {
        self.region.as_ptr()
    }

    /// Its bytes.
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.region.is_empty()
    }

    /// Why the device did not register it, if it did not.
    pub fn refused(&self) -> Option<String> {
        self.registered.get()?.as_ref().err().map(ToString::to_string)
    }

    /// All of it, to be filled.
    pub fn window(&mut self) -> Window<'_> {
        self.region.window()
    }
}

impl fmt::Debug for PinnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedMemory").field("region", &self.region).finish_non_exhaustive()
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.made_by.is_current() {
            if !self.is_empty() && matches!(self.registered.take(), Some(Ok(()))) {
                // SAFETY: registered, and unregistered once, here. Whoever owned the memory has ended its copies.
                unsafe { self.pinning.unregister(self.region.as_ptr()) };
            }
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.region) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::error::{Error, ErrorKind};

    /// Notes what is registered, and refuses to have more than so many pieces.
    #[derive(Default)]
    struct Register {
        now: Mutex<Vec<usize>>,
        most: usize,
    }

    impl Pinning for Register {
        fn family(&self) -> &'static str {
            "test"
        }

        unsafe fn register(&self, ptr: *mut u8, len: usize) -> Result<()> {
            assert_eq!((ptr as usize % PAGE, len % PAGE), (0, 0));
            let mut now = self.now.lock().unwrap();
            if now.len() == self.most {
                return Err(Error::new(ErrorKind::Memory, "no more"));
            }
            now.push(ptr as usize);
            Ok(())
        }

        unsafe fn unregister(&self, ptr: *mut u8) {
            let mut now = self.now.lock().unwrap();
            let before = now.len();
            now.retain(|one| *one != ptr as usize);
            assert_eq!(now.len() + 1, before, "unregistered twice");
        }
    }

    #[test]
    fn it_is_registered_while_it_exists_and_can_be_written_to() {
        let register = Arc::new(Register { most: 1, ..Register::default() });
        let mut memory = PinnedMemory::make(3 * PAGE + 5, Arc::clone(&register) as _, 2).unwrap();
        assert_eq!((memory.len(), memory.refused()), (3 * PAGE + 5, None));
        memory.window().write(3 * PAGE, b"12345");
        assert_eq!(register.now.lock().unwrap().len(), 1);
        drop(memory);
        assert!(register.now.lock().unwrap().is_empty());
    }

    #[test]
    fn what_is_reserved_is_registered_when_it_is_asked_for_and_once() {
        let register = Arc::new(Register { most: 1, ..Register::default() });
        let mut memory = PinnedMemory::reserve(PAGE, Arc::clone(&register) as _).unwrap();
        memory.window().write(0, b"before");
        assert!(register.now.lock().unwrap().is_empty());
        assert_eq!((memory.register(), memory.register()), (None, None));
        assert_eq!(register.now.lock().unwrap().len(), 1);
        drop(memory);
        assert!(register.now.lock().unwrap().is_empty());
    }

    #[test]
    fn memory_that_the_device_refuses_is_pageable_and_says_so() {
        let register = Arc::new(Register::default());
        let mut memory = PinnedMemory::make(PAGE, Arc::clone(&register) as _, 1).unwrap();
        assert!(memory.refused().unwrap().contains("no more"));
        memory.window().write(0, b"still there");
    }
}
