//! An entry that is being filled, or was and is not complete.
//!
//! Several processes may fill one at a time. Whoever writes to its data holds a shared lock on it meanwhile; who makes it
//! complete, an exclusive one. So nobody writes to what someone else reads as a file that stays as it is; all but a block
//! that turns out to be damaged, after the mark is gone.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{FlockOperation, flock};

use super::files::{BLOCK_BYTES, lock};
use super::mark;
use crate::error::Error;
use crate::memory::PAGE;
use crate::store::block_map::{BlockMap, checksum};
use crate::store::locked_file::LockedFile;

/// The file of one object's blocks, and the map of those that are there. Its map keeps it from being removed.
#[derive(Debug)]
pub(super) struct Entry {
    path: PathBuf,
    data: LockedFile,
    /// The same file for writing past the page cache, where the file system can.
    direct: Option<File>,
    map: BlockMap,
    /// Writes under way in this process. While there are any, `data` is locked.
    writes: Mutex<usize>,
    /// Blocks whose bytes this process has compared or written itself.
    verified: Vec<AtomicBool>,
    /// Blocks that someone in this process is about to write.
    claimed: Vec<AtomicBool>,
    /// Bytes that were left out because the disk could not keep up.
    left_out: AtomicU64,
    note: Mutex<Option<String>>,
    broken: AtomicBool,
    read_only: bool,
    /// Who is not done with it: whoever reads through it, and every write under way.
    users: AtomicUsize,
}

impl Entry {
    /// An entry; `read_only` where its files could only be opened for reading.
    pub(super) fn new(path: PathBuf, data: LockedFile, map: BlockMap, read_only: bool) -> Self {
        let direct = OpenOptions::new()
            .write(true)
            .custom_flags(libc::O_DIRECT | libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(path.join("data"))
            .ok()
            .filter(|_| !read_only);
        let flags = || std::iter::repeat_with(AtomicBool::default).take(map.blocks()).collect();
        Self {
            verified: flags(),
            claimed: flags(),
            path,
            data,
            direct,
            map,
            writes: Mutex::default(),
            left_out: AtomicU64::new(0),
            note: Mutex::default(),
            broken: AtomicBool::new(read_only),
            read_only,
            users: AtomicUsize::new(1),
        }
    }

    /// One more user.
    pub(super) fn enter(&self) {
        self.users.fetch_add(1, Ordering::AcqRel);
    }

    /// One user less; whether that was the last.
    pub(super) fn leave(&self) -> bool {
        self.users.fetch_sub(1, Ordering::AcqRel) == 1
    }

    pub(super) fn data_path(&self) -> PathBuf {
        self.path.join("data")
    }

    pub(super) fn blocks(&self) -> usize {
        self.map.blocks()
    }

    pub(super) fn range(&self, block: usize) -> Range<u64> {
        self.map.range(block)
    }

    /// Whether the block is there, as far as its map says.
    pub(super) fn has(&self, block: usize) -> bool {
        self.map.get(block).is_some()
    }

    /// Whether its bytes need not be compared any more.
    pub(super) fn is_verified(&self, block: usize) -> bool {
        self.verified[block].load(Ordering::Acquire)
    }

    /// Compares a block's bytes with its checksum; if they are others, the block is not there from now on.
    pub(super) fn verify(&self, block: usize, bytes: &[u8]) -> bool {
        if self.map.get(block) == Some(checksum(bytes)) {
            self.verified[block].store(true, Ordering::Release);
            return true;
        }
        tracing::warn!(entry = %self.path.display(), block, "a block of the disk cache is damaged: it is fetched anew");
        self.discard(block);
        false
    }

    /// The block's bytes have to be compared again before they are used.
    pub(super) fn doubt(&self, block: usize) {
        self.verified[block].store(false, Ordering::Release);
    }

    /// The block cannot be used: it is fetched again, and written again.
    pub(super) fn discard(&self, block: usize) {
        self.doubt(block);
        // In this order: whoever makes it complete in this moment looks at the map again after that.
        let _ = self.map.set(block, 0);
        mark::clear(&self.path);
        self.claimed[block].store(false, Ordering::Release);
    }

    /// As [`Entry::discard`], where `error` is what reading the block ended with; the load's owner may want to know.
    pub(super) fn unreadable(&self, block: usize, error: &Error) {
        self.discard(block);
        self.note(unreadable(&self.path, error));
    }

    fn note(&self, note: String) {
        self.note.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(note);
    }

    /// Whether the caller is the one to write the block.
    pub(super) fn claim(&self, block: usize) -> bool {
        let wanted = !self.broken.load(Ordering::Acquire) && !self.has(block);
        if self.read_only {
            self.give_up(&io::ErrorKind::ReadOnlyFilesystem.into());
        }
        wanted && !self.claimed[block].swap(true, Ordering::AcqRel)
    }

    /// Blocks that were claimed and cannot be written now.
    pub(super) fn leave_out(&self, blocks: Range<usize>) {
        for block in blocks {
            let range = self.range(block);
            self.left_out.fetch_add(range.end - range.start, Ordering::Relaxed);
            self.claimed[block].store(false, Ordering::Release);
        }
    }

    /// Writes consecutive blocks, of which `bytes` are all bytes, and notes that they are there.
    pub(super) fn write(&self, first: usize, bytes: &[u8]) {
        if self.broken.load(Ordering::Acquire) {
            return;
        }
        if let Err(error) = self.try_write(first, bytes) {
            self.give_up(&error);
        }
    }

    fn try_write(&self, first: usize, bytes: &[u8]) -> io::Result<()> {
        let sums: Vec<_> = (first..).zip(bytes.chunks(BLOCK_BYTES as usize).map(checksum)).collect();
        let writing = Writing::begin(self)?;
        let mut there = 0;
        for (block, sum) in &sums {
            there += usize::from(self.map.look(*block)? == Some(*sum));
        }
        if there == sums.len() {
            // Another process was quicker.
            return Ok(());
        }
        if writing.is_none() {
            // It is being made complete, or is complete, with what others brought.
            sums.iter().for_each(|(block, _)| self.claimed[*block].store(false, Ordering::Release));
            return Ok(());
        }
        self.write_data(self.range(first).start, bytes)?;
        for (block, sum) in sums {
            self.map.set(block, sum)?;
            self.verified[block].store(true, Ordering::Release);
        }
        Ok(())
    }

    fn write_data(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let aligned = bytes.as_ptr().addr().is_multiple_of(PAGE);
        let whole = if aligned && self.direct.is_some() { bytes.len() / PAGE * PAGE } else { 0 };
        let (direct, rest) = bytes.split_at(whole);
        if let Some(file) = self.direct.as_ref().filter(|_| !direct.is_empty())
            && let Err(error) = file.write_all_at(direct, at)
        {
            match error.raw_os_error() {
                // Opened for it, and refused all the same.
                Some(libc::EINVAL | libc::EOPNOTSUPP) => self.data.write_all_at(direct, at)?,
                _ => return Err(error),
            }
        }
        self.data.write_all_at(rest, at + whole as u64)
    }

    fn give_up(&self, error: &io::Error) {
        self.broken.store(true, Ordering::Release);
        let why = match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => "the disk is full".to_owned(),
            _ => error.to_string(),
        };
        let place = self.path.parent().unwrap_or(&self.path).display();
        let note = format!("the disk cache could not be written to ({place}): {why}");
        self.note(note);
    }

    /// Makes a complete entry of it, if all blocks are there. Called when its last user has left.
    pub(super) fn close(&self) {
        let completed = self.try_complete();
        if let Err(error) = completed {
            self.give_up(&error);
        }
    }

    fn try_complete(&self) -> io::Result<()> {
        // A forked child leaves it to its parent, whose lock it would end.
        if !self.data.is_own() {
            return Ok(());
        }
        // Another process may have brought what is missing here. Where something is, others must be able to write.
        self.map.refresh()?;
        // Whoever writes to it now makes it complete afterwards.
        if self.read_only || !self.is_whole() || !lock(&self.data, FlockOperation::NonBlockingLockExclusive) {
            return Ok(());
        }
        let done = self.complete_alone();
        let _ = flock(&*self.data, FlockOperation::Unlock);
        done
    }

    /// Makes it complete, while no one writes to its data.
    fn complete_alone(&self) -> io::Result<()> {
        // Another process may have found a block damaged.
        self.map.refresh()?;
        if !self.is_whole() || mark::is_set(&self.path, &self.data.metadata()?) {
            return Ok(());
        }
        // Once complete, bytes are not compared any more, so all of them are now, also those that this process wrote:
        // it may be long ago. What is written to them from here on is seen by the file's times.
        let compared = self.data.metadata()?;
        let mut bytes = vec![0; BLOCK_BYTES as usize];
        for block in 0..self.blocks() {
            let range = self.range(block);
            let bytes = &mut bytes[..(range.end - range.start) as usize];
            match self.data.read_exact_at(bytes, range.start) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => bytes.fill(0),
                read => read?,
            }
            if !self.verify(block, bytes) {
                return Ok(());
            }
        }
        // All of it, times included: after a power failure the file is what the mark says, or is not taken for it.
        self.data.sync_all()?;
        mark::set(&self.path, &compared)?;
        // A block that someone found damaged meanwhile.
        self.map.refresh()?;
        if !self.is_whole() {
            mark::clear(&self.path);
        }
        Ok(())
    }

    fn is_whole(&self) -> bool {
        (0..self.blocks()).all(|block| self.has(block))
    }

    /// What the load's owner may want to know.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes: Vec<_> =
            self.note.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect();
        if self.left_out.load(Ordering::Relaxed) > 0 && notes.is_empty() {
            notes.push("the disk cache could not keep up: what it left out is kept by the next load".into());
        }
        notes
    }
}

/// A remark: what is kept at `path` was not used to the end.
pub(super) fn unreadable(path: &Path, error: &Error) -> String {
    let place = path.parent().unwrap_or(path).display();
    format!(
        "the disk cache could not be read ({place}), and bytes came over the network instead: {}",
        error.cause()
    )
}

/// A write to an entry's data, which keeps others from making it complete.
struct Writing<'a>(&'a Entry);

impl<'a> Writing<'a> {
    /// None where the entry is complete, or is being made so.
    fn begin(entry: &'a Entry) -> io::Result<Option<Self>> {
        let mut writes = Self::count(entry);
        if *writes == 0 && !lock(&entry.data, FlockOperation::NonBlockingLockShared) {
            return Ok(None);
        }
        *writes += 1;
        drop(writes);
        let writing = Self(entry);
        let complete = mark::is_set(&entry.path, &entry.data.metadata()?);
        Ok((!complete).then_some(writing))
    }

    fn count(entry: &Entry) -> MutexGuard<'_, usize> {
        entry.writes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut writes = Self::count(self.0);
        *writes -= 1;
        if *writes == 0 {
            let _ = flock(&*self.0.data, FlockOperation::Unlock);
        }
    }
}
