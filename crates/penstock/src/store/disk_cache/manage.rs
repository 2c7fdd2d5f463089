//! What people do with the entries of a disk cache: see them, compare their bytes, remove some.
//!
//! Loads may use the cache meanwhile. An entry that is in use is not removed, as in eviction.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::DiskCache;
use super::directory::Directory;
use super::entry::Entry;
use crate::error::{Error, ErrorKind, Result};

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
        let entry = Entry::look(&path)?;
        let used = fs::metadata(path.join("map")).and_then(|is| is.modified());
        Some(CacheEntry {
            location: location_of(&entry.label, entry.bytes).to_owned(),
            bytes: entry.bytes,
            cached_bytes: entry.cached_bytes(),
            is_complete: entry.is_complete(),
            used: used.unwrap_or(SystemTime::UNIX_EPOCH),
            name,
        })
    }

    /// Compares what is there of an entry with its checksums: how many bytes were compared, and how many of them were
    /// damaged. Those are fetched again by the next load. None where there is no such entry, or it is being removed.
    ///
    /// # Errors
    /// `Access` where the cache is another user's.
    pub fn verify(&self, name: &str) -> Result<Option<(u64, u64)>> {
        self.check()?;
        let found = self.path_of(name).and_then(|path| Entry::open(&path));
        Ok(found.map(|entry| {
            let compared = entry.compare();
            // Who filled it may have ended meanwhile.
            entry.close();
            compared
        }))
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
        self.directory.check().map_err(|why| self.failed(why))
    }

    fn failed(&self, why: String) -> Error {
        Error::new(ErrorKind::Access, why).object(self.path.display().to_string())
    }
}

/// The location in a label: the line before the version, which begins with the object's bytes.
fn location_of(label: &str, bytes: u64) -> &str {
    let bytes = bytes.to_string();
    label.lines().take_while(|line| *line != bytes).last().unwrap_or(label)
}
