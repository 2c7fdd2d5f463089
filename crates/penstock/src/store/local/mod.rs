//! Files, wherever a path leads: disks, tmpfs, network and FUSE mounts.
//!
//! * `file`: opening (regular files only), identity, and the checks that a file did not change.
//! * `handle`: a file opened for direct reads, once for all readers or once for each.
//! * `reading`: the two ways to read, and the choice between them for every block.
//! * `cache`: asking the kernel how much of a range is in the page cache.
//! * `path`: paths as locations, those too that are not UTF-8.
//! * `failure`: what to try when the system refuses.

mod cache;
mod failure;
mod file;
mod handle;
mod path;
mod reading;

use std::path::PathBuf;
use std::sync::Arc;

use super::{Entry, Identity, Object, Store, replaced, shown};
use crate::error::{Error, ErrorKind, Result};

use file::LocalFile;

#[cfg(feature = "remote")]
pub(super) use file::differ_in_change_time;
pub(super) use handle::suits_direct;

pub use path::{location_of, path_of, readable};

/// How reads use the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CachePolicy {
    /// Decided block by block: cached blocks are copied from the cache, the others read directly.
    #[default]
    Auto,
    /// Always through the page cache, as any program reads files.
    Use,
    /// Always directly, where the file system can.
    Bypass,
    /// Through the page cache, each block asked for in one piece before it is copied, so that the disk is not left to the
    /// kernel's short read-ahead: the cache is left filled for the next process at the least cost.
    Populate,
}

impl CachePolicy {
    /// The policy of that name: `auto`, `use`, `bypass` or `populate`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "auto" => Some(Self::Auto),
            "use" => Some(Self::Use),
            "bypass" => Some(Self::Bypass),
            "populate" => Some(Self::Populate),
            _ => None,
        }
    }

    /// The policy's name, as [`CachePolicy::from_name`] takes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Use => "use",
            Self::Bypass => "bypass",
            Self::Populate => "populate",
        }
    }
}

/// The store of local paths. Locations are paths, absolute or relative to the working directory.
#[derive(Debug, Clone, Copy, Default)]
pub struct LocalStore {
    cache: CachePolicy,
}

impl LocalStore {
    /// A store whose files are read under `cache`.
    pub fn new(cache: CachePolicy) -> Self {
        Self { cache }
    }
}

impl LocalStore {
    fn open_file(&self, location: &str) -> Result<LocalFile> {
        if let Some((scheme, _)) = location.split_once("://") {
            let cause = format!("{scheme}:// locations are not supported");
            return Err(Error::new(ErrorKind::NotFound, cause).remedy("Give a path of this machine"));
        }
        LocalFile::open(&path_of(location), self.cache)
    }

    /// Opens a copy of the remote object at `remote`, of the version that `identity` makes of the file. It is read like any
    /// file: cached or direct, mapped if asked for.
    #[cfg(feature = "remote")]
    pub(super) fn open_copy(
        &self,
        path: &std::path::Path,
        remote: String,
        identity: impl FnOnce(&dyn Object) -> Identity,
    ) -> Result<Arc<dyn Object>> {
        let mut file = LocalFile::open(path, self.cache)?;
        file.stands_for = Some((remote, identity(&file)));
        Ok(Arc::new(file))
    }
}

impl Store for LocalStore {
    fn open(&self, location: &str) -> Result<Arc<dyn Object>> {
        self.open_file(location).map(|file| Arc::new(file) as Arc<dyn Object>)
    }

    /// A file whose change time alone differs is opened: see `file`.
    fn reopen(&self, location: &str, identity: &Identity) -> Result<Arc<dyn Object>> {
        let file = self.open_file(location)?;
        if file.is_likely(identity) { Ok(Arc::new(file)) } else { Err(replaced(location)) }
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        let failed =
            |error: &std::io::Error| failure::failed("listing the directory", error).object(shown(prefix));
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(path_of(prefix)).map_err(|e| failed(&e))? {
            let path = entry.map_err(|e| failed(&e))?.path();
            // Follows links, as a Hugging Face cache is made of them. One that leads nowhere is listed with no bytes,
            // so that opening it says what is wrong instead of the directory seeming to hold less.
            let bytes = match std::fs::metadata(&path) {
                Ok(metadata) if metadata.is_dir() => continue,
                Ok(metadata) => metadata.len(),
                Err(_) => 0,
            };
            entries.push(Entry { location: location_of(path), bytes });
        }
        entries.sort_by(|a, b| a.location.cmp(&b.location));
        Ok(entries)
    }

    fn directories(&self, prefix: &str) -> Vec<String> {
        let entries = std::fs::read_dir(path_of(prefix)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries
            .filter(|entry| entry.path().is_dir())
            .map(|entry| location_of(entry.file_name()))
            .collect();
        names.sort_unstable();
        names
    }

    fn file_of(&self, location: &str, _: &Identity) -> Option<PathBuf> {
        Some(path_of(location).into_owned())
    }
}
