//! A borrowed span of raw memory.
//!
//! Readers fill memory that is not initialised, that lies inside other allocations, and that several threads fill at
//! once, each its own part. `&mut [u8]` can say none of this, so reads take a [`Window`]: a pointer and a length with
//! a lifetime, whose maker promises that nothing else touches those bytes while the window lives.
//!
//! A maker also knows whether the bytes stay: what is written to a tensor is not read for a while, what is written to a
//! buffer is copied on at once. So a window may be [lasting](Window::lasting), and then what is copied to it goes past the
//! caches: memory is not read only to be written over, and half of the copy's time is saved.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Shorter copies gain nothing from going past the caches.
const NON_TEMPORAL_FROM: usize = 4096;

/// Exclusive access to `len` bytes of possibly uninitialised memory for the lifetime `'a`.
#[derive(Debug)]
pub struct Window<'a> {
    ptr: *mut u8,
    len: usize,
    non_temporal: bool,
    _memory: PhantomData<&'a mut [MaybeUninit<u8>]>,
}

// SAFETY: a window is an exclusive borrow of plain bytes; moving it to another thread moves that exclusive access.
unsafe impl Send for Window<'_> {}

impl<'a> Window<'a> {
    /// A window over a slice.
    pub fn from_slice(slice: &'a mut [u8]) -> Self {
        Self { ptr: slice.as_mut_ptr(), len: slice.len(), non_temporal: false, _memory: PhantomData }
    }

    /// A window over `len` bytes at `ptr`.
    ///
    /// # Safety
    /// The bytes must be mapped and writable for `'a`, and nothing else may read or write them meanwhile.
    pub unsafe fn from_raw(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len, non_temporal: false, _memory: PhantomData }
    }

    /// The same, of bytes that stay where they are written.
    #[must_use]
    pub fn non_temporal(self) -> Self {
        Self { non_temporal: true, ..self }
    }

    /// The same, of bytes that are read right after they were written.
    #[must_use]
    pub fn temporal(self) -> Self {
        Self { non_temporal: false, ..self }
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
        let part = unsafe { Window::from_raw(self.ptr.add(start), len) };
        Window { non_temporal: self.non_temporal, ..part }
    }

    /// The window in two, of which the first has `len` bytes.
    ///
    /// # Panics
    /// Where it is shorter: a bug of the caller.
    #[must_use]
    pub fn split_at(self, len: usize) -> (Self, Self) {
        assert!(len <= self.len, "a window is split beyond its end");
        // SAFETY: both halves lie in this window, do not overlap, and take its place.
        let rest = unsafe { Self::from_raw(self.ptr.add(len), self.len - len) };
        let rest = Self { non_temporal: self.non_temporal, ..rest };
        (Self { len, ..self }, rest)
    }

    /// Copies `bytes` to the window's position `start`.
    ///
    /// # Panics
    /// Where the bytes do not fit: a bug of the caller.
    pub fn write(&mut self, start: usize, bytes: &[u8]) {
        let part = self.part(start, bytes.len());
        if part.non_temporal && bytes.len() >= NON_TEMPORAL_FROM {
            // SAFETY: `part` is exclusive and exactly as long as `bytes`, which is a distinct borrow.
            unsafe { non_temporal_copy(bytes.as_ptr(), part.ptr, bytes.len()) };
        } else {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), part.ptr, bytes.len()) };
        }
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

/// Copies with stores that go to memory without first reading what they overwrite.
///
/// # Safety
/// As `copy_nonoverlapping`: `len` readable bytes at `from`, as many writable ones at `to`, apart from each other.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn non_temporal_copy(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    const LINE: usize = 64;
    const WORD: usize = size_of::<__m128i>();
    let head = to.align_offset(LINE).min(len);
    let whole = (len - head) / LINE * LINE;
    // SAFETY: head, whole lines and what is left are disjoint parts of the `len` bytes. The lines are aligned, as these
    // stores want it, and SSE2 is part of every x86-64. The fence orders them before whatever this thread does next,
    // so that whoever learns from it that the bytes are there sees them.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        for at in (head..head + whole).step_by(LINE) {
            let words: [__m128i; LINE / WORD] =
                std::array::from_fn(|i| _mm_loadu_si128(from.add(at + i * WORD).cast()));
            for (i, word) in words.into_iter().enumerate() {
                _mm_stream_si128(to.add(at + i * WORD).cast(), word);
            }
        }
        _mm_sfence();
        std::ptr::copy_nonoverlapping(from.add(head + whole), to.add(head + whole), len - head - whole);
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
unsafe fn non_temporal_copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as this function's caller promises.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
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
    fn what_stays_is_copied_whole_wherever_it_begins_and_ends() {
        let bytes: Vec<u8> = (0..20_000u32).map(|i| (i % 251) as u8).collect();
        for (start, from, len) in
            [(0, 0, 4096), (1, 3, 4097), (63, 0, 8191), (64, 17, 19_000), (100, 5, 4095)]
        {
            let mut memory = vec![0xEE; 20_000];
            Window::from_slice(&mut memory)
                .non_temporal()
                .part(start, len)
                .write(0, &bytes[from..from + len]);
            assert_eq!(memory[start..start + len], bytes[from..from + len]);
            assert!(memory[..start].iter().chain(&memory[start + len..]).all(|byte| *byte == 0xEE));
        }
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn a_part_beyond_the_end_is_refused() {
        let mut memory = [0u8; 8];
        let mut window = Window::from_slice(&mut memory);
        let _ = window.part(usize::MAX, 2);
    }
}
