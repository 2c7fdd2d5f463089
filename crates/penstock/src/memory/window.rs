//! A borrowed span of raw memory.
//!
//! Readers fill memory that is not initialised, that lies inside other allocations, and that several threads fill at
//! once, each its own part. `&mut [u8]` can say none of this, so reads take a [`Window`]: a pointer and a length with
//! a lifetime, whose maker promises that nothing else touches those bytes while the window lives.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Exclusive access to `len` bytes of possibly uninitialised memory for the lifetime `'a`.
#[derive(Debug)]
pub struct Window<'a> {
    ptr: *mut u8,
    len: usize,
    _memory: PhantomData<&'a mut [MaybeUninit<u8>]>,
}

// SAFETY: a window is an exclusive borrow of plain bytes; moving it to another thread moves that exclusive access.
unsafe impl Send for Window<'_> {}

impl<'a> Window<'a> {
    /// A window over a slice.
    pub fn from_slice(slice: &'a mut [u8]) -> Self {
        Self { ptr: slice.as_mut_ptr(), len: slice.len(), _memory: PhantomData }
    }

    /// A window over `len` bytes at `ptr`.
    ///
    /// # Safety
    /// The bytes must be mapped and writable for `'a`, and nothing else may read or write them meanwhile.
    pub unsafe fn from_raw(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len, _memory: PhantomData }
    }

    /// Where the window begins.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Bytes in the window.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A shorter borrow of `len` bytes from `start`.
    ///
    /// # Panics
    /// Where the span does not lie in the window: a bug of the caller, never a matter of input.
    pub fn part(&mut self, start: usize, len: usize) -> Window<'_> {
        assert!(
            start.checked_add(len).is_some_and(|end| end <= self.len),
            "part of a window lies outside of it"
        );
        // SAFETY: the span was just checked to lie inside this window, and `&mut self` keeps it exclusive.
        unsafe { Window::from_raw(self.ptr.add(start), len) }
    }

    /// Copies `bytes` to the window's position `start`.
    ///
    /// # Panics
    /// Where the bytes do not fit: a bug of the caller.
    pub fn write(&mut self, start: usize, bytes: &[u8]) {
        let part = self.part(start, bytes.len());
        // SAFETY: `part` is exclusive and exactly as long as `bytes`, which is a distinct borrow.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), part.ptr, bytes.len()) };
    }

    /// The bytes of the span, once they are initialised.
    ///
    /// # Safety
    /// All `len` bytes from `start` must have been written.
    pub unsafe fn assume_filled(&self, start: usize, len: usize) -> &[u8] {
        assert!(
            start.checked_add(len).is_some_and(|end| end <= self.len),
            "part of a window lies outside of it"
        );
        // SAFETY: in bounds as checked, initialised as the caller promises, and borrowed from this window.
        unsafe { std::slice::from_raw_parts(self.ptr.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_write_through_and_stay_inside() {
        let mut memory = [0u8; 8];
        let mut window = Window::from_slice(&mut memory);
        window.part(2, 4).write(1, &[7, 8]);
        assert_eq!(memory, [0, 0, 0, 7, 8, 0, 0, 0]);
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn a_part_beyond_the_end_is_refused() {
        let mut memory = [0u8; 8];
        let mut window = Window::from_slice(&mut memory);
        let _ = window.part(usize::MAX, 2);
    }
}
