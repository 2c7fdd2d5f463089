//! A private mapping of a whole file, for tensors that are views of the page cache.
//!
//! The mapping is writable and private: what a caller writes into a view stays in this process and never reaches the
//! file. What cannot be promised is what promise 1 gives for loaded tensors: a file that is truncated while it is
//! mapped makes the process die of SIGBUS when a lost page is touched. Views are therefore only made on request.

use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::page_bytes;
use crate::error::{Error, ErrorKind, Result};

/// The bytes of a file, mapped.
#[derive(Debug)]
pub struct FileMapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory owned through a unique pointer, tied to no thread.
unsafe impl Send for FileMapping {}
// SAFETY: `&FileMapping` gives out its address and length, and asks the kernel to populate pages; it touches no bytes.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps the first `len` bytes of `file`.
    ///
    /// # Errors
    /// `Memory` or `Storage` where the kernel refuses.
    pub fn map(file: impl AsFd, len: u64) -> Result<Self> {
        let len = usize::try_from(len).map_err(|_| {
            Error::new(ErrorKind::Memory, format!("{len} bytes are more than this machine can address"))
        })?;
        // SAFETY: a fresh private mapping at an address of the kernel's choice touches no existing memory.
        let mapped = unsafe {
            mmap(
                std::ptr::null_mut(),
                len.max(1),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
                file,
                0,
            )
        }
        .map_err(|errno| Error::from_io("mapping", &errno.into()))?;
        let base = NonNull::new(mapped.cast::<u8>())
            .ok_or_else(|| Error::new(ErrorKind::Memory, "mapped at address zero"))?;
        Ok(Self { base, len })
    }

    /// Where the file's first byte is.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the file is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many pages of the span are in the page cache; nothing where the kernel does not say. To a process that neither
    /// owns the file nor may write to it, the kernel says that all of them are.
    pub fn resident_pages(&self, start: usize, len: usize) -> Option<usize> {
        let page = page_bytes();
        let first = start / page * page;
        let end = start.checked_add(len)?.min(self.len);
        let mut resident = 0;
        let mut told = [0_u8; 1024];
        let mut at = first;
        while at < end {
            let step = (end - at).min(told.len() * page);
            // SAFETY: the span lies in this mapping, and `told` has a byte for each of its pages.
            if unsafe { libc::mincore(self.base.as_ptr().add(at).cast(), step, told.as_mut_ptr()) } != 0 {
                return None;
            }
            resident += told[..step.div_ceil(page)].iter().filter(|page| **page & 1 == 1).count();
            at += step;
        }
        Some(resident)
    }

    /// Makes the pages of the span present without touching them, so that a failing read is an error and not a
    /// SIGBUS. Returns `false` where this kernel (before 5.14) cannot.
    ///
    /// # Errors
    /// `Storage` where a page cannot be read, or lies beyond the end of a file that has become shorter than the mapping:
    /// the kernel does not tell the two apart.
    pub fn populate(&self, start: usize, len: usize) -> Result<bool> {
        let first = start / page_bytes() * page_bytes();
        let end = start.saturating_add(len).min(self.len);
        if first >= end {
            return Ok(true);
        }
        // SAFETY: the span lies in this mapping; populating for reading changes no contents.
        match unsafe { madvise(self.base.as_ptr().add(first).cast(), end - first, Advice::LinuxPopulateRead) }
        {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::INVAL) => Ok(false),
            Err(rustix::io::Errno::FAULT) => {
                Err(Error::new(ErrorKind::Storage, "reading a page of the mapped file failed")
                    .remedy("The storage failed: check the mount, the disk and the kernel log (dmesg)"))
            }
            Err(errno) => Err(Error::from_io("populating a mapping", &errno.into())),
        }
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `map`; every view holds this value, so none is left.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len.max(1)) };
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use rustix::fs::{Advice, fadvise};

    use super::*;
    use crate::memory::PAGE;

    #[test]
    fn resident_pages_are_those_in_the_page_cache() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("file");
        fs::write(&path, vec![7; 3000 * PAGE + 1]).unwrap();
        let file = File::open(&path).unwrap();
        let mapping = FileMapping::map(&file, (3000 * PAGE + 1) as u64).unwrap();
        assert_eq!(mapping.resident_pages(0, 3000 * PAGE + 1), Some(3001));
        assert_eq!(mapping.resident_pages(PAGE + 1, PAGE), Some(2));
        file.sync_all().unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        assert_eq!(mapping.resident_pages(0, 3000 * PAGE + 1), Some(0));
        assert_eq!(mapping.resident_pages(5000 * PAGE, 10), Some(0), "beyond the end there is nothing");
    }
}
