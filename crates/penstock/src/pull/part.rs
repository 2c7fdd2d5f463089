//! A file on its way: the open object, the partial file, the map of what of it is there.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate, fdatasync};
use rustix::io::Errno;

use super::source::Item;
use super::tree::Tree;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Region;
use crate::store::block_map::{BlockMap, checksum};
use crate::store::{Identity, Lane, Object};

/// Bytes of a block: what is asked for at once.
pub(super) const BLOCK_BYTES: u64 = 8 << 20;
/// Bytes written at once: how long a pull that is stopped may have to wait for the disk.
const WRITE_BYTES: usize = 1 << 20;

/// One file being pulled.
pub(super) struct Part {
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

/// Where the bytes of a block came from.
pub(super) enum Came {
    /// From where a pull before had left them.
    Resumed(u64),
    Fetched(u64),
}

impl Part {
    /// Begins a file, or goes on with it where a partial one of the same version is there.
    pub(super) fn begin(tree: &Tree, number: usize, item: &Item, object: Arc<dyn Object>) -> Result<Self> {
        let failed = |error: std::io::Error| Error::from_io("writing", &error).object(tree.shown(&item.path));
        let directory = tree.directory_of(&item.path)?;
        tree.stat(&directory, &item.path)?;
        let (name, bytes) = (part_name(&item.path), object.bytes());
        let (file, map) = (tree.part(&name)?, tree.part(&format!("{name}.map"))?);
        // An object without a version of its own cannot be told from the one that came half before.
        let version = Some(object.identity())
            .filter(|identity| crate::store::RemoteStore::is_likely(identity, identity));
        let label = format!("{}\n{}", item.path, version.as_ref().map_or("?", |identity| &*identity.0));
        let (map, known) = BlockMap::open(map, &label, bytes, BLOCK_BYTES).map_err(failed)?;
        let resumed = known && version.is_some();
        if !resumed {
            file.set_len(0).map_err(failed)?;
            (0..map.blocks())
                .filter(|block| map.get(*block).is_some())
                .try_for_each(|block| map.set(block, 0))
                .map_err(failed)?;
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

    pub(super) fn identity(&self) -> Identity {
        self.object.identity()
    }

    /// Makes sure that a block is there: compares what a pull before left, or fetches it. Says whether it was the last
    /// one that was missing.
    pub(super) fn block(
        &self,
        tree: &Tree,
        block: usize,
        buffer: &mut Region,
        lane: &mut Lane,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(Came, bool)> {
        let range = self.map.range(block);
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let failed = |error: std::io::Error| match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => {
                no_room(range.end - range.start).object(tree.shown(&self.path))
            }
            _ => Error::from_io("writing", &error).object(tree.shown(&self.path)).range(range.clone()),
        };
        let expected = self.map.get(block);
        if let Some(expected) = expected {
            let there = &mut buffer.as_mut_slice()[..len];
            if self.file.read_exact_at(there, range.start).is_ok() && checksum(there) == expected {
                self.resumed.store(true, Ordering::Relaxed);
                return Ok((Came::Resumed(len as u64), self.is_last()));
            }
            self.map.set(block, 0).map_err(failed)?;
        }
        self.object.read_into(range.start, buffer.window().part(0, len), lane)?;
        let fetched = &buffer.as_mut_slice()[..len];
        let mut at = range.start;
        for piece in fetched.chunks(WRITE_BYTES) {
            if is_cancelled() {
                return Err(Error::new(ErrorKind::Cancelled, "the pull was stopped"));
            }
            self.file.write_all_at(piece, at).map_err(failed)?;
            // For pages just written this means: begin to write them out. Then the end has little left to wait for.
            let _ = fadvise(&self.file, at, std::num::NonZeroU64::new(piece.len() as u64), Advice::DontNeed);
            at += piece.len() as u64;
        }
        self.map.set(block, checksum(fetched)).map_err(failed)?;
        Ok((Came::Fetched(len as u64), self.is_last()))
    }

    fn is_last(&self) -> bool {
        self.missing.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Gives the complete file its name; returns what it is like.
    pub(super) fn finish(&self, tree: &Tree) -> Result<rustix::fs::Stat> {
        let failed = |errno: Errno| Error::from_io("writing", &errno.into()).object(tree.shown(&self.path));
        self.object.verify_unchanged()?;
        // Before its name: after a power failure there is a whole file of that name or none.
        fdatasync(&self.file).map_err(failed)?;
        tree.finish(&self.name, &self.directory, &self.path)?;
        tree.forget_part(&format!("{}.map", self.name));
        rustix::fs::fstat(&self.file).map_err(failed)
    }
}

fn no_room(bytes: u64) -> Error {
    Error::new(ErrorKind::Storage, format!("the disk is full: there is no room for {bytes} more bytes"))
        .remedy("Free some space and pull again: what came so far is kept")
}

/// The name of a path's partial file: the path as far as a name may be long, and a checksum of the whole.
fn part_name(path: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let tail: String =
        path.chars().rev().take(100).collect::<Vec<_>>().into_iter().rev().map(plain).collect();
    format!("{:016x}-{tail}", checksum(path.as_bytes()))
}
