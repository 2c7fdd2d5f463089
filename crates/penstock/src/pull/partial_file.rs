//! A file on its way: the open object, the partial file, the map of what of it is there.
//!
//! The map counts small blocks, so that little is lost when a pull is cut off; a request brings many of them. How many is
//! the caller's choice (`work`).

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate, fdatasync, fsync};
use rustix::io::Errno;

use super::ledger::times;
use super::source::Item;
use super::tree::Tree;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Region;
use crate::store::block_map::{BlockMap, checksum, to_usize};
use crate::store::locked_file::LockedFile;
use crate::store::{Identity, Object, ReadContext};

/// Bytes of a block, which is kept if it has come whole. Also what is written at once: how long a pull that is stopped may
/// have to wait for the disk.
pub(super) const BLOCK_BYTES: u64 = 512 << 10;
/// Blocks of the largest request.
pub(super) const MOST_BLOCKS: usize = 16;

/// One file being pulled.
pub(super) struct PartialFile {
    /// Which item of the pull.
    pub(super) item: usize,
    pub(super) object: Arc<dyn Object>,
    directory: OwnedFd,
    path: String,
    name: String,
    file: File,
    map: BlockMap,
    missing: AtomicUsize,
    /// Whether anything of it was there.
    pub(super) resumed: AtomicBool,
}

/// Where the bytes of some blocks came from.
#[derive(Default)]
pub(super) struct Came {
    /// Bytes that a pull before had left.
    pub(super) resumed: u64,
    pub(super) fetched: u64,
    /// How long fetching took.
    pub(super) took: Duration,
}

impl PartialFile {
    /// Begins a file, or goes on with it where a partial one of the same version is there.
    pub(super) fn begin(tree: &Tree, number: usize, item: &Item, object: Arc<dyn Object>) -> Result<Self> {
        let failed = |error: std::io::Error| Error::from_io("writing", &error).object(tree.shown(&item.path));
        let directory = tree.directory_of(&item.path)?;
        tree.stat(&directory, &item.path)?;
        let (name, bytes) = (part_name(&item.path), object.bytes());
        let (file, map) = (tree.part(&name)?, LockedFile::new(tree.part(&map_name(&item.path))?));
        let (label, has_version) = label(&item.path, &object.identity());
        if !has_version {
            map.set_len(0).map_err(failed)?;
        }
        let (map, known) = BlockMap::open(map, &label, bytes, BLOCK_BYTES).map_err(failed)?;
        if !known {
            file.set_len(0).map_err(failed)?;
        }
        file.set_len(bytes).map_err(failed)?;
        if bytes > 0 {
            // Not every file system can.
            if let Err(Errno::NOSPC | Errno::DQUOT) = fallocate(&file, FallocateFlags::empty(), 0, bytes) {
                return Err(no_room(bytes).object(tree.shown(&item.path)));
            }
        }
        Ok(Self {
            item: number,
            object,
            directory,
            path: item.path.clone(),
            name,
            file,
            missing: AtomicUsize::new(map.blocks()),
            map,
            resumed: AtomicBool::new(false),
        })
    }

    pub(super) fn blocks(&self) -> usize {
        self.map.blocks()
    }

    /// Makes sure that blocks are there: compares what a pull before left, and fetches the others, with one request for
    /// each run of them. Says whether they were the last that were missing.
    pub(super) fn fetch_blocks(
        &self,
        tree: &Tree,
        blocks: Range<usize>,
        buffer: &mut Region,
        cx: &mut ReadContext,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(Came, bool)> {
        let (count, mut came) = (blocks.len(), Came::default());
        let mut missing = blocks.start..blocks.start;
        for block in blocks {
            if let Ok(Some(_)) = self.map.read(&self.file, block, buffer.as_mut_slice()) {
                self.fetch(tree, missing, buffer, cx, is_cancelled, &mut came)?;
                came.resumed += length(&self.map.range(block));
                missing = block + 1..block + 1;
            } else {
                missing.end = block + 1;
            }
        }
        self.fetch(tree, missing, buffer, cx, is_cancelled, &mut came)?;
        if came.resumed > 0 {
            self.resumed.store(true, Ordering::Relaxed);
        }
        Ok((came, self.missing.fetch_sub(count, Ordering::AcqRel) == count))
    }

    fn fetch(
        &self,
        tree: &Tree,
        blocks: Range<usize>,
        buffer: &mut Region,
        cx: &mut ReadContext,
        is_cancelled: &dyn Fn() -> bool,
        came: &mut Came,
    ) -> Result<()> {
        let Some(last) = blocks.clone().next_back() else { return Ok(()) };
        let range = self.map.range(blocks.start).start..self.map.range(last).end;
        let began = Instant::now();
        self.object.read_into(range.start, buffer.window().part(0, to_usize(length(&range))), cx)?;
        came.took += began.elapsed();
        for block in blocks {
            if is_cancelled() {
                return Err(Error::new(ErrorKind::Cancelled, "the pull was stopped"));
            }
            let (at, len) = (self.map.range(block), length(&self.map.range(block)));
            let from = to_usize(at.start - range.start);
            let bytes = &buffer.as_mut_slice()[from..from + to_usize(len)];
            let written = self.map.write(&self.file, block, bytes);
            written.map_err(|error| self.writing_failed(tree, &at, &error))?;
            came.fetched += len;
        }
        Ok(())
    }

    fn writing_failed(&self, tree: &Tree, range: &Range<u64>, error: &std::io::Error) -> Error {
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => no_room(length(range)).object(tree.shown(&self.path)),
            _ => Error::from_io("writing", error).object(tree.shown(&self.path)).range(range.clone()),
        }
    }

    /// Gives the complete file its name, and keeps its map for the next pull.
    pub(super) fn finish(&self, tree: &Tree) -> Result<()> {
        let failed = |errno: Errno| Error::from_io("writing", &errno.into()).object(tree.shown(&self.path));
        self.object.verify_unchanged()?;
        // Before its name: after a power failure there is a whole file of that name or none.
        fdatasync(&self.file).map_err(failed)?;
        tree.finish(&self.name, &self.directory, &self.path)?;
        let _ = fsync(&self.directory);
        let stat = rustix::fs::fstat(&self.file).map_err(failed)?;
        if self.map.set_seal(times(&stat)).is_ok() {
            tree.keep_map(&map_name(&self.path));
        }
        Ok(())
    }
}

fn length(range: &Range<u64>) -> u64 {
    range.end - range.start
}

fn no_room(bytes: u64) -> Error {
    Error::new(ErrorKind::Storage, format!("the disk is full: there is no room for {bytes} more bytes"))
        .remedy("Free some space and pull again: what came so far is kept")
}

/// Whether `map` is that of a partial file which a pull of this item would go on with.
pub(super) fn can_resume(map: &File, item: &Item) -> bool {
    let (label, has_version) = label(&item.path, &item.identity);
    has_version && BlockMap::is_of(map, &label, item.bytes, BLOCK_BYTES)
}

/// What a map is of. An object without a version of its own cannot be told from the one that came half before.
fn label(path: &str, identity: &Identity) -> (String, bool) {
    let has_version = crate::store::RemoteStore::is_likely(identity, identity);
    (format!("{path}\n{}", if has_version { &*identity.0 } else { "?" }), has_version)
}

/// The name of the map beside a path's partial file.
pub(super) fn map_name(path: &str) -> String {
    format!("{}.map", part_name(path))
}

/// The name of a path's partial file: the path as far as a name may be long, and a checksum of the whole.
fn part_name(path: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let tail: String =
        path.chars().rev().take(100).collect::<Vec<_>>().into_iter().rev().map(plain).collect();
    format!("{:016x}-{tail}", checksum(path.as_bytes()))
}
