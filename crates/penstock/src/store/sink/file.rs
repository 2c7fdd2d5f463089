//! One file of this machine, written in parts by many threads.
//!
//! Large files go past the page cache where the file system can: the disk is kept busy from the first part on, no other
//! program's pages are pushed out, and the flush at the end has nothing left to do. Parts are aligned to pages then; the last
//! is padded, and the file cut to its length. Room is reserved at once where that costs nothing, so a disk that is too full
//! is known before anything is written.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use super::{DIRECT_ALIGNMENT, SinkObject};
use crate::error::{Code, Error, ErrorKind, Result};
use crate::store::local::location_of;

/// Bytes of a part: enough for one write to keep a disk busy, and few enough for all writers to end together.
const PART_BYTES: u64 = 4 << 20;
/// Smaller files go through the page cache: they are flushed at the end all the same.
const DIRECT_FROM: u64 = 16 << 20;
/// `TMPFS_MAGIC` and `RAMFS_MAGIC` of linux/magic.h: there, reserving room is writing zeros.
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// A file on its way.
pub(super) struct LocalFile {
    shown: String,
    file: File,
    direct: Option<File>,
    refused: AtomicBool,
    bytes: u64,
    flush: bool,
}

impl LocalFile {
    /// Makes the file at `path`, which must not be there, with room for `bytes` bytes. `flush` says whether it is on stable
    /// storage once it is finished.
    pub(super) fn create(path: &Path, bytes: u64, flush: bool) -> Result<Self> {
        let shown = location_of(path);
        let file = File::options().write(true).create_new(true).open(path);
        let file = file.map_err(|error| failed("making the file", &error).object(&*shown))?;
        let in_memory = rustix::fs::fstatfs(&file)
            .is_ok_and(|answer| IN_MEMORY.contains(&(answer.f_type.cast_unsigned() & 0xffff_ffff)));
        let reserved = match in_memory || bytes == 0 {
            true => Err(Errno::OPNOTSUPP),
            false => fallocate(&file, FallocateFlags::empty(), 0, bytes),
        };
        let made = match reserved {
            Ok(()) => Ok(()),
            Err(errno @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) => Err(errno.into()),
            // Not every file system can.
            Err(_) => file.set_len(bytes),
        };
        made.map_err(|error| {
            failed("reserving room", &error).object(&*shown).detail("bytes", bytes)
        })?;
        let direct = (bytes >= DIRECT_FROM && !in_memory).then(|| open_direct(path)).flatten();
        Ok(Self { shown, file, direct, refused: AtomicBool::new(false), bytes, flush })
    }

    /// Whether the page cache is in between although it need not be.
    pub(super) fn was_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    fn usable_direct(&self) -> Option<&File> {
        self.direct.as_ref().filter(|_| !self.was_refused())
    }
}

/// The file once more, for direct writes of whole pages, where the file system has them.
fn open_direct(path: &Path) -> Option<File> {
    let flags = libc::O_DIRECT | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    let file = OpenOptions::new().write(true).custom_flags(flags).open(path).ok()?;
    crate::store::local::suits_direct(&file).then_some(file)
}

impl SinkObject for LocalFile {
    fn part_bytes(&self) -> u64 {
        PART_BYTES
    }

    fn alignment(&self) -> usize {
        if self.usable_direct().is_some() { DIRECT_ALIGNMENT } else { 1 }
    }

    fn write(&self, offset: u64, part: &[u8]) -> Result<()> {
        let written = match self.usable_direct().filter(|_| part.len().is_multiple_of(DIRECT_ALIGNMENT)) {
            Some(direct) => match direct.write_all_at(part, offset) {
                // What the file system said when it was asked was not so.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    self.refused.store(true, Ordering::Relaxed);
                    self.through_cache(offset, part)
                }
                written => written,
            },
            None => self.through_cache(offset, part),
        };
        let range = offset..offset + part.len() as u64;
        written.map_err(|error| failed("writing", &error).object(&*self.shown).range(range))
    }

    fn finish(&self) -> Result<()> {
        let end = || {
            if self.direct.is_some() {
                self.file.set_len(self.bytes)?;
            }
            if self.flush { self.file.sync_all() } else { Ok(()) }
        };
        end().map_err(|error| failed("flushing", &error).object(&*self.shown))
    }
}

impl LocalFile {
    fn through_cache(&self, offset: u64, part: &[u8]) -> io::Result<()> {
        // Without the padding of a direct write.
        let left = self.bytes.saturating_sub(offset);
        let own = usize::try_from(left).map_or(part.len(), |left| left.min(part.len()));
        self.file.write_all_at(&part[..own], offset)
    }
}

/// The failure to write something.
pub(super) fn failed(action: &str, error: &io::Error) -> Error {
    let (cause, remedy) = match error.raw_os_error() {
        Some(libc::ENOSPC) => ("the disk is full", "Free some space, and save again"),
        Some(libc::EDQUOT) => ("the disk quota is used up", "Free some space or raise the quota, and save again"),
        Some(libc::EFBIG) => (
            "the file would be larger than is allowed here",
            "Raise the limit (ulimit -f), or save in smaller shards (shard_bytes)",
        ),
        _ => return Error::from_io(action, error),
    };
    Error::new(ErrorKind::Storage, cause).code(Code::StorageFull).remedy(remedy)
}
