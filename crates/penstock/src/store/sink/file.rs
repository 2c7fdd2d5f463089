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
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

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
    /// None once it is finished: a save may have more files than a process may have open.
    open: RwLock<Option<Open>>,
    refused: Arc<AtomicBool>,
    bytes: u64,
    flush: bool,
}

struct Open {
    file: File,
    direct: Option<File>,
}

impl LocalFile {
    /// Makes the file at `path`, which must not be there, with room for `bytes` bytes. `flush` says whether it is on stable
    /// storage once it is finished. `refused` is set where the file system refuses direct writes after all.
    pub(super) fn create(path: &Path, bytes: u64, flush: bool, refused: &Arc<AtomicBool>) -> Result<Self> {
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
        made.map_err(|error| failed("reserving room", &error).object(&*shown).detail("bytes", bytes))?;
        let direct = (bytes >= DIRECT_FROM && !in_memory).then(|| open_direct(path)).flatten();
        let open = RwLock::new(Some(Open { file, direct }));
        Ok(Self { shown, open, refused: Arc::clone(refused), bytes, flush })
    }

    /// Closes it as it is.
    pub(super) fn close(&self) {
        *self.open.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn opened(&self) -> RwLockReadGuard<'_, Option<Open>> {
        self.open.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_direct(&self, open: &Open) -> bool {
        open.direct.is_some() && !self.refused.load(Ordering::Relaxed)
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
        match &*self.opened() {
            Some(open) if self.is_direct(open) => DIRECT_ALIGNMENT,
            _ => 1,
        }
    }

    fn takes_pieces(&self) -> bool {
        self.alignment() == 1
    }

    fn write(&self, offset: u64, part: &[u8]) -> Result<()> {
        let opened = self.opened();
        let Some(open) = &*opened else {
            return Err(Error::new(ErrorKind::Cancelled, "the save has ended").object(&*self.shown));
        };
        let whole_pages = part.len().is_multiple_of(DIRECT_ALIGNMENT) && self.is_direct(open);
        let written = match open.direct.as_ref().filter(|_| whole_pages) {
            Some(direct) => match direct.write_all_at(part, offset) {
                // What the file system said when it was asked was not so.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    self.refused.store(true, Ordering::Relaxed);
                    self.through_cache(&open.file, offset, part)
                }
                written => written,
            },
            None => self.through_cache(&open.file, offset, part),
        };
        let range = offset..offset + part.len() as u64;
        written.map_err(|error| failed("writing", &error).object(&*self.shown).range(range))
    }

    fn finish(&self) -> Result<()> {
        let taken = self.open.write().unwrap_or_else(PoisonError::into_inner).take();
        let end = || {
            let Some(Open { file, direct }) = taken else { return Ok(()) };
            if direct.is_some() {
                file.set_len(self.bytes)?;
            }
            if self.flush { file.sync_all() } else { Ok(()) }
        };
        end().map_err(|error| failed("flushing", &error).object(&*self.shown))
    }
}

impl LocalFile {
    fn through_cache(&self, file: &File, offset: u64, part: &[u8]) -> io::Result<()> {
        // Without the padding of a direct write.
        let left = self.bytes.saturating_sub(offset);
        let own = usize::try_from(left).map_or(part.len(), |left| left.min(part.len()));
        file.write_all_at(&part[..own], offset)
    }
}

/// The failure to write something.
pub(super) fn failed(action: &str, error: &io::Error) -> Error {
    let (cause, remedy) = match error.raw_os_error() {
        Some(libc::ENOSPC) => ("the disk is full", "Free some space, and save again"),
        Some(libc::EDQUOT) => {
            ("the disk quota is used up", "Free some space or raise the quota, and save again")
        }
        Some(libc::EFBIG) => (
            "the file would be larger than is allowed here",
            "Raise the limit (ulimit -f), or save in smaller shards (shard_bytes)",
        ),
        _ => return Error::from_io(action, error),
    };
    Error::new(ErrorKind::Storage, cause).code(Code::StorageFull).remedy(remedy)
}
