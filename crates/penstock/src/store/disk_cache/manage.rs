//! What people do with the entries of a disk cache: see them, compare their bytes, remove some.
//!
//! Loads may use the cache meanwhile. An entry that is in use is not removed, as in eviction.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::FlockOperation;

use super::directory::Directory;
use super::files::{BLOCK_BYTES, lock, open, open_to_lock};
use super::trust::distrust;
use super::{DiskCache, mark};
use crate::error::{Error, ErrorKind, Result};
use crate::store::block_map::{BlockMap, checksum};

/// One entry: a version of an object, or a part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheEntry {
    /// The directory of the entry.
    pub name: String,
    /// Where the object came from, without secrets.
    pub location: String,
    /// The object's bytes.
    pub bytes: u64,
    /// Those that are there.
    pub cached_bytes: u64,
    /// Whether a load takes it for a local file.
    pub is_complete: bool,
    /// When it was used last.
    pub used: SystemTime,
}

/// The entries below one directory.
#[derive(Debug)]
pub struct CacheManager {
    path: PathBuf,
    directory: Directory,
}

impl CacheManager {
    /// The cache in `directory`, whether or not it was ever used.
    pub fn new(directory: &Path) -> Self {
        let settings = DiskCache { directory: directory.to_owned(), bytes: None };
        Self { path: directory.to_owned(), directory: Directory::new(settings) }
    }

    /// All entries, those used last first. What is no entry is passed over.
    pub fn entries(&self) -> Vec<CacheEntry> {
        let found = fs::read_dir(self.directory.root()).into_iter().flatten().flatten();
        let names = found.filter_map(|entry| entry.file_name().into_string().ok());
        let mut entries: Vec<_> = names.filter_map(|name| self.entry(name)).collect();
        entries.sort_by(|a, b| b.used.cmp(&a.used).then_with(|| a.name.cmp(&b.name)));
        entries
    }

    fn entry(&self, name: String) -> Option<CacheEntry> {
        let path = self.path_of(&name)?;
        let Opened { map, label, data } = opened(&path, false).ok()??;
        let bytes = data.metadata().ok()?.len();
        let used = fs::metadata(path.join("map")).and_then(|is| is.modified());
        let cached =
            (0..map.blocks()).filter(|block| map.get(*block).is_some()).map(|block| map.range(block));
        Some(CacheEntry {
            location: location_of(&label, bytes).to_owned(),
            bytes,
            cached_bytes: cached.map(|range| range.end - range.start).sum(),
            is_complete: fs::symlink_metadata(path.join("data")).is_ok_and(|data| mark::is_set(&path, &data)),
            used: used.unwrap_or(SystemTime::UNIX_EPOCH),
            name,
        })
    }

    /// Compares what is there of an entry with its checksums: how many bytes were compared, and how many of them were
    /// damaged. Those are fetched again by the next load. None where there is no such entry, or it is being removed.
    ///
    /// # Errors
    /// `Access` where its files cannot be written to.
    pub fn verify(&self, name: &str) -> Result<Option<(u64, u64)>> {
        self.check()?;
        let Some(path) = self.path_of(name) else { return Ok(None) };
        let failed =
            |cause, error: &io::Error| Error::from_io(cause, error).object(path.display().to_string());
        let opened = opened(&path, true).map_err(|error| failed("opening the entry", &error))?;
        let Some(Opened { map, data, .. }) = opened else { return Ok(None) };
        let (mut compared, mut damaged) = (0, 0);
        let mut buffer = Vec::new();
        for block in 0..map.blocks() {
            let Some(expected) = map.get(block) else { continue };
            let range = map.range(block);
            let length = range.end - range.start;
            buffer.resize(usize::try_from(length).unwrap_or(0), 0);
            compared += length;
            if data.read_exact_at(&mut buffer, range.start).is_err() || checksum(&buffer) != expected {
                damaged += length;
                // In this order: who makes it complete in this moment looks at the map again after that.
                map.set(block, 0).map_err(|error| failed("writing the map", &error))?;
                mark::clear(&path);
            }
        }
        Ok(Some((compared, damaged)))
    }

    /// Removes an entry; false where it is in use, or there is none.
    ///
    /// # Errors
    /// `Access` where the cache cannot be locked or written to.
    pub fn remove(&self, name: &str) -> Result<bool> {
        self.check()?;
        match self.path_of(name).filter(|path| path.exists()) {
            Some(_) => self.directory.remove_named(name).map_err(|why| self.failed(why)),
            None => Ok(false),
        }
    }

    /// Removes entries, those used longest ago first, until all together have at most so many bytes.
    ///
    /// # Errors
    /// `Access` where too many are in use, or the cache cannot be locked or written to.
    pub fn prune(&self, bytes: u64) -> Result<()> {
        if !self.directory.root().exists() {
            return Ok(());
        }
        self.check()?;
        let settings = DiskCache { directory: self.path.clone(), bytes: Some(bytes) };
        Directory::new(settings).shrink().map_err(|why| self.failed(why))
    }

    /// Where the entry of that name is; none for what cannot be a name.
    fn path_of(&self, name: &str) -> Option<PathBuf> {
        let is_name = name.len() == 16 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_name.then(|| self.directory.root().join(name))
    }

    /// Nothing is removed from where loads would not read: it may be another's.
    fn check(&self) -> Result<()> {
        distrust(self.directory.root(), true).map_or(Ok(()), |why| Err(self.failed(why)))
    }

    fn failed(&self, why: String) -> Error {
        Error::new(ErrorKind::Access, why).object(self.path.display().to_string())
    }
}

/// The files of an entry, which is not removed as long as its map is held, and what it is of.
struct Opened {
    map: BlockMap,
    label: String,
    data: File,
}

/// Opens an entry; none where it is being removed, or is not what a load would have made.
fn opened(path: &Path, write: bool) -> io::Result<Option<Opened>> {
    let found = || -> io::Result<Option<Opened>> {
        let file = open_to_lock(&path.join("map"), OpenOptions::new().read(true).write(write))?;
        if !lock(&file, FlockOperation::NonBlockingLockShared) {
            return Ok(None);
        }
        let data = open(&path.join("data"), OpenOptions::new().read(true))?;
        // What a damaged map says is not to be believed: the label's own checksum is the entry's name.
        let is_named = |label: &str| path.ends_with(format!("{:016x}", checksum(label.as_bytes())));
        let bytes = data.metadata()?.len();
        let label = BlockMap::describe(&file)
            .filter(|(label, of, block)| (*of, *block) == (bytes, BLOCK_BYTES) && is_named(label));
        let Some((label, ..)) = label else { return Ok(None) };
        let (map, _) = BlockMap::open(file, &label, bytes, BLOCK_BYTES)?;
        Ok(Some(Opened { map, label, data }))
    };
    found().or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(None) } else { Err(error) })
}

/// The location in a label: the line before the version, which begins with the object's bytes.
fn location_of(label: &str, bytes: u64) -> &str {
    let bytes = bytes.to_string();
    label.lines().take_while(|line| *line != bytes).last().unwrap_or(label)
}
