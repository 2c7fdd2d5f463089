//! An entry: one version of one object, whole or in part.
//!
//! It is a directory, named by a digest of what it is of: `data`, a sparse file as large as the object; `map`, its block
//! map; and once all is there `complete`, which says what `data` was like then. Whoever uses an entry holds a shared lock
//! on its map, and who removes it an exclusive one. Whoever may write to its data holds a shared lock on that, so several
//! processes may fill an entry at once. The one that is done with it last makes it complete, with an exclusive lock. So
//! nobody writes to what someone else reads as a file that stays as it is.
//!
//! Blocks of an entry that is not complete are compared with their checksums whenever they are read, and all of them once
//! more before it is complete.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{
    FallocateFlags, FlockOperation, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, fallocate, flock, futimens,
};
use rustix::io::Errno;

use super::key::Key;
use crate::memory::PAGE;
use crate::store::block_map::{BlockMap, checksum};
use crate::store::locked_file::LockedFile;

/// Bytes of a block. No more than what the request that opens an object brings, so that the first block, in which
/// the header is, comes whole.
pub(super) const BLOCK_BYTES: u64 = 512 << 10;
/// Permissions of files and of directories, whatever the umask is: what is cached may be of a private store, and who
/// else may write to it is not trusted anyway.
pub(super) const FILE: u32 = 0o600;
pub(super) const FOLDER: u32 = 0o700;
const WRITABLE_FOR_ALL: u32 = 0o002;

/// An entry in use, which stays as long as this is held.
#[derive(Debug)]
pub(super) struct Entry {
    path: PathBuf,
    /// What it is of: see [`Key`].
    pub(super) label: String,
    map: BlockMap,
    data: LockedFile,
    /// The same file for writing past the page cache, where the file system can.
    direct: Option<File>,
    pub(super) bytes: u64,
    /// Size and modification time of the data, where it was complete when it was opened.
    complete: Option<(u64, i64, i64)>,
    /// Not where others make it complete, where its files may only be read, and after writing failed.
    is_writable: AtomicBool,
    note: Mutex<Option<String>>,
}

impl Entry {
    /// Makes the files of an empty entry, of which nothing is there.
    pub(super) fn make(path: &Path, key: &Key) -> io::Result<()> {
        fs::DirBuilder::new().mode(FOLDER).create(path)?;
        let make = |name| {
            let how = || OpenOptions::new().read(true).write(true).create_new(true).mode(FILE).clone();
            open(&path.join(name), &mut how()).map(LockedFile::new)
        };
        let data = make("data")?;
        data.set_len(key.bytes)?;
        if key.bytes > 0 {
            // Better now than in the middle. Not every file system can reserve.
            let reserved = fallocate(&*data, FallocateFlags::empty(), 0, key.bytes);
            if let Err(errno @ (Errno::NOSPC | Errno::DQUOT)) = reserved {
                return Err(errno.into());
            }
        }
        BlockMap::open(make("map")?, &key.label, key.bytes, BLOCK_BYTES).map(drop)
    }

    /// The entry at `path`; none where it is not what [`Entry::make`] makes, or is being removed.
    pub(super) fn open(path: &Path) -> Option<Self> {
        // Where it may not be written to, what is there is read all the same.
        Self::open_for(path, true).or_else(|| Self::open_for(path, false))
    }

    /// As [`Entry::open`], to look at only: it keeps nobody from making the entry complete.
    pub(super) fn look(path: &Path) -> Option<Self> {
        Self::open_for(path, false)
    }

    fn open_for(path: &Path, write: bool) -> Option<Self> {
        let file = |name| {
            let how = || OpenOptions::new().read(true).write(write).clone();
            open(&path.join(name), &mut how()).map(LockedFile::new).ok()
        };
        let (map, data) = (file("map")?, file("data")?);
        let is_writable = write && lock(&data, FlockOperation::NonBlockingLockShared);
        // While that is locked, nobody makes it complete.
        let is = data.metadata().ok()?;
        let (label, bytes, block_bytes) = BlockMap::describe(&map)?;
        let directory = fs::symlink_metadata(path).ok()?;
        let right = directory.is_dir()
            && distrust(&directory).is_none()
            && lock(&map, FlockOperation::NonBlockingLockShared)
            && is_at(&map, &path.join("map"))
            && (is.is_file(), is.len(), BLOCK_BYTES) == (true, bytes, block_bytes)
            // What a damaged map says is not to be believed.
            && path.ends_with(name_of(&label));
        if !right {
            return None;
        }
        let complete = is_marked(path, &is).then(|| written(&is));
        if complete.is_some() {
            let _ = flock(&*data, FlockOperation::Unlock);
        }
        let (map, _) = BlockMap::open(map, &label, bytes, BLOCK_BYTES).ok()?;
        let is_writable = is_writable && complete.is_none();
        let mut how = OpenOptions::new();
        how.write(true).custom_flags(libc::O_DIRECT | libc::O_NOFOLLOW | libc::O_CLOEXEC);
        Some(Self {
            direct: is_writable.then(|| how.open(path.join("data")).ok()).flatten(),
            path: path.to_owned(),
            label,
            map,
            data,
            bytes,
            is_writable: AtomicBool::new(is_writable),
            complete,
            note: Mutex::default(),
        })
    }

    pub(super) fn data_path(&self) -> PathBuf {
        self.path.join("data")
    }

    /// Whether the file at [`Entry::data_path`] is this entry's: users who take no locks may put others there.
    pub(super) fn is_in_place(&self) -> bool {
        is_at(&self.data, &self.data_path())
    }

    pub(super) fn is_complete(&self) -> bool {
        self.complete.is_some()
    }

    pub(super) fn blocks(&self) -> usize {
        self.map.blocks()
    }

    pub(super) fn range(&self, blocks: &Range<usize>) -> Range<u64> {
        self.map.range(blocks.start).start..self.map.range(blocks.end - 1).end
    }

    /// Whether the block is there, as far as its map says.
    pub(super) fn has(&self, block: usize) -> bool {
        self.map.get(block).is_some()
    }

    /// Says that the entry was used now. On a disk that cannot be written to, nothing is evicted either.
    pub(super) fn touch(&self) {
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let same = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        let _ = futimens(self.map.file(), &Timestamps { last_access: same, last_modification: now });
    }

    /// Reads a block to `buffer`; `None` where it is not there, is damaged or cannot be read. Then it is fetched again.
    pub(super) fn read<'a>(&self, block: usize, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
        let was_there = self.has(block);
        let read = self.map.read(&self.data, block, buffer);
        if was_there && !matches!(read, Ok(Some(_))) {
            tracing::warn!(entry = %self.path.display(), block, "a block of the disk cache is damaged: it is fetched anew");
            self.doubt();
        }
        read.unwrap_or_else(|error| {
            self.unreadable(&error);
            None
        })
    }

    /// Compares what is there with its checksums: bytes compared, and how many of them are damaged.
    pub(super) fn compare(&self) -> (u64, u64) {
        let (mut compared, mut damaged) = (0, 0);
        let mut buffer = vec![0; BLOCK_BYTES as usize];
        for block in (0..self.blocks()).filter(|block| self.has(*block)) {
            let range = self.map.range(block);
            compared += range.end - range.start;
            damaged += self.read(block, &mut buffer).map_or(range.end - range.start, |_| 0);
        }
        (compared, damaged)
    }

    /// Bytes that are there.
    pub(super) fn cached_bytes(&self) -> u64 {
        let there = (0..self.blocks()).filter(|block| self.has(*block)).map(|block| self.map.range(block));
        there.map(|range| range.end - range.start).sum()
    }

    /// In a forked child it is not: the lock is the parent's, and may end before the child does. What the child opens
    /// itself is its own.
    pub(super) fn is_writable(&self) -> bool {
        self.is_writable.load(Ordering::Relaxed) && self.data.is_own()
    }

    /// Writes consecutive blocks, of which `bytes` are all bytes, unless another process was quicker.
    pub(super) fn write(&self, first: usize, bytes: &[u8]) {
        let blocks = first..first + bytes.len().div_ceil(BLOCK_BYTES as usize);
        if !self.is_writable() || blocks.clone().all(|block| self.has(block)) {
            return;
        }
        if let Err(error) = self.try_write(blocks, bytes) {
            self.is_writable.store(false, Ordering::Relaxed);
            let why = match error.raw_os_error() {
                Some(libc::ENOSPC | libc::EDQUOT) => "the disk is full".to_owned(),
                _ => error.to_string(),
            };
            self.note(format!("the disk cache could not be written to ({}): {why}", self.place()));
        }
    }

    fn try_write(&self, blocks: Range<usize>, bytes: &[u8]) -> io::Result<()> {
        let (start, pages) = (self.range(&blocks).start, bytes.len() / PAGE * PAGE);
        // Where that is refused, it is written through the page cache, which says what is wrong.
        let direct =
            self.direct.as_ref().filter(|direct| direct.write_all_at(&bytes[..pages], start).is_ok());
        let written = direct.map_or(0, |_| pages);
        self.data.write_all_at(&bytes[written..], start + written as u64)?;
        let mut sums = blocks.zip(bytes.chunks(BLOCK_BYTES as usize));
        sums.try_for_each(|(block, bytes)| self.map.set(block, checksum(bytes)))
    }

    /// Has the bytes compared with their checksums by whoever uses the entry next.
    pub(super) fn doubt(&self) {
        let _ = fs::remove_file(self.path.join("complete"));
    }

    /// Whether the data of a complete entry was not written to since it was opened. What was done to its name or its
    /// permissions meanwhile is no harm; a file that the disk knows no more was not read from either.
    pub(super) fn is_unchanged(&self) -> bool {
        self.complete.is_none_or(|then| self.data.metadata().map_or(true, |now| written(&now) == then))
    }

    /// What is kept was not used to the end.
    pub(super) fn unreadable(&self, why: &dyn std::fmt::Display) {
        let place = self.place();
        self.note(format!(
            "the disk cache could not be read ({place}), and bytes came over the network instead: {why}"
        ));
    }

    /// What the load's owner may want to know. The first counts.
    pub(super) fn note(&self, note: String) {
        self.note.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(note);
    }

    pub(super) fn said(&self) -> Option<String> {
        self.note.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn place(&self) -> std::path::Display<'_> {
        self.path.parent().unwrap_or(&self.path).display()
    }

    /// Makes it complete, if all of it is there and nobody else may write to it. A forked child leaves that to its parent,
    /// whose lock it would turn into another.
    pub(super) fn close(self) {
        if let Err(error) = self.complete() {
            tracing::warn!(entry = %self.path.display(), %error, "an entry of the disk cache could not be made complete");
        }
    }

    fn complete(&self) -> io::Result<()> {
        if !self.is_writable() {
            return Ok(());
        }
        // Before it looks: of those who are done with it at once, the last to look finds all blocks and nobody's lock.
        let _ = flock(&*self.data, FlockOperation::Unlock);
        let is_whole = || (0..self.blocks()).all(|block| self.has(block));
        if !is_whole() || !lock(&self.data, FlockOperation::NonBlockingLockExclusive) {
            return Ok(());
        }
        // Once complete, bytes are not compared any more. What is written to them from here on is seen by the file's times.
        let is = self.data.metadata()?;
        if is_marked(&self.path, &is) || self.compare() != (self.bytes, 0) {
            return Ok(());
        }
        // All of it, times included: after a power failure the file is what the mark says, or is not taken for it.
        self.data.sync_all()?;
        self.doubt();
        let mark = self.path.join("complete");
        open(&mark, OpenOptions::new().write(true).create_new(true).mode(FILE))?
            .write_all(described(&is).as_bytes())?;
        if !is_whole() {
            // Someone found a block damaged meanwhile, perhaps before there was a mark to take away.
            self.doubt();
        }
        Ok(())
    }
}

/// The name of the entry that is of `label`.
pub(super) fn name_of(label: &str) -> String {
    format!("{:016x}", checksum(label.as_bytes()))
}

/// Opens a file of the cache: no link, and not another user's, nor one that everyone may write to.
pub(super) fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK).open(path)?;
    match distrust(&file.metadata()?) {
        None => Ok(file),
        Some(why) => Err(io::Error::new(io::ErrorKind::PermissionDenied, why)),
    }
}

/// Why a file or a directory is not to be trusted, if so: whoever can write to the cache decides what is loaded.
pub(super) fn distrust(is: &fs::Metadata) -> Option<String> {
    let user = rustix::process::geteuid().as_raw();
    if is.uid() != user && is.uid() != 0 {
        return Some(format!("belongs to user {}, and this process is user {user}", is.uid()));
    }
    // Of a link only the owner counts.
    (!is.is_symlink() && is.mode() & WRITABLE_FOR_ALL != 0)
        .then(|| "is such that everyone may write to it".to_owned())
}

/// Whether `file` is what is at `path`.
fn is_at(file: &File, path: &Path) -> bool {
    let inode = |is: fs::Metadata| (is.dev(), is.ino());
    file.metadata().ok().map(inode) == fs::symlink_metadata(path).ok().map(inode)
}

/// Locks a file, if that can be done now. A file system without locks has no one to keep out either.
fn lock(file: &File, how: FlockOperation) -> bool {
    matches!(flock(file, how), Ok(()) | Err(Errno::NOTSUP | Errno::NOSYS | Errno::NOLCK))
}

/// Whether the entry is marked as complete, with `data` as it is now.
fn is_marked(path: &Path, data: &fs::Metadata) -> bool {
    let (mark, described) = (path.join("complete"), described(data));
    let mut said = String::new();
    let read = |said: &mut String| {
        open(&mark, OpenOptions::new().read(true))?.take(described.len() as u64 + 1).read_to_string(said)
    };
    read(&mut said).is_ok() && said == described
}

/// What tells whether a file was written to. Its change time too, which no one can put back; `chmod` and copying alter it
/// as well, and then bytes are compared with their checksums once more.
fn described(is: &fs::Metadata) -> String {
    let (bytes, seconds, nanos) = written(is);
    format!("{bytes} {seconds}.{nanos:09} {}.{:09}\n", is.ctime(), is.ctime_nsec())
}

fn written(is: &fs::Metadata) -> (u64, i64, i64) {
    (is.len(), is.mtime(), is.mtime_nsec())
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests;
