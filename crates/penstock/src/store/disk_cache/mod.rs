//! What came over the network, kept on a local disk for the next load.
//!
//! A store in front of the remote one. What is read through it also goes to disk, behind the load's back: bytes are
//! copied to a buffer and handed to threads that write; where these cannot keep up, bytes are left out rather than
//! waited for (but for a moment), and the next load fills the gaps. An object that is there completely is a local file from then on, read
//! as fast as any, cached or direct.
//!
//! * `key`: which version of which object. `directory`: which entries there are, whose, and which go.
//! * `entry`: one of them on disk, its locks, when it is complete. `object`: reading through one.
//! * `writers`: the process's threads that write. `manage`: what people do with entries.
//!
//! Promises:
//! * An entry is used only for the very version it is of: the remote store says which that is, by strong tag or date; and
//!   only for the endpoint and the account that it came from.
//! * Bytes of an entry that is not complete are compared with their checksums before they are used; a complete one is a
//!   file that has not been written to since it was found complete. What is torn, or someone else's, is fetched anew.
//! * The entries together are no larger than their bound; those used longest ago go first, and none that is in use.
//! * Nobody writes to a complete entry.
//! * Nothing of this fails a load: a full disk, a directory that cannot be written to, a disk that cannot be read end in
//!   a note. (But bytes that another program changed in the very moment are an error, as in any file.)
//! * Locks end with the process that holds them, and not later with its children, unless it is killed (`locked_file`);
//!   nothing needs to be cleaned up after a crash. No load waits for one longer than some seconds.
//! * Entries of other users are not used.

mod directory;
mod entry;
mod key;
mod manage;
mod object;
mod writers;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::{CachePolicy, Identity, LocalStore, Object, RemoteStore, Store, location_of};
use crate::error::Result;

pub use manage::{CacheEntry, CacheManager};

use directory::Directory;
use entry::Entry;
use key::Key;
use object::CachedObject;

/// Where remote objects are kept.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DiskCache {
    /// The directory, which is made where it is missing.
    pub directory: PathBuf,
    /// The most bytes of all entries; 80 % of the disk's free space and what is cached already, where nothing is said.
    pub bytes: Option<u64>,
}

/// The remote store, with a disk cache in front of it if there is to be one.
#[derive(Debug, Clone, Default)]
pub struct CachingStore {
    inner: RemoteStore,
    local: LocalStore,
    directory: Option<Directory>,
}

impl CachingStore {
    /// `inner` behind `cache`, whose files are read under `policy`.
    pub fn new(inner: RemoteStore, cache: Option<DiskCache>, policy: CachePolicy) -> Self {
        Self { inner, local: LocalStore::new(policy), directory: cache.map(Directory::new) }
    }

    /// The same remote store behind another cache, or none.
    #[must_use]
    pub fn cached_in(&self, cache: Option<DiskCache>, policy: CachePolicy) -> Self {
        Self::new(self.inner.clone(), cache, policy)
    }

    /// The same store for another load, whose requests share nothing with those of this one but connections.
    #[must_use]
    pub fn for_another_load(&self) -> Self {
        Self { inner: self.inner.for_another_load(), ..self.clone() }
    }

    /// The complete entry of that version, if there is one.
    fn complete(&self, location: &str, identity: &Identity) -> Option<Arc<Entry>> {
        let directory = self.directory.as_ref()?;
        let key = Key::of(&self.inner, location, identity).ok()?;
        directory.find(&key).ok()?.filter(|entry| entry.is_complete())
    }

    /// An object of that version of which all is in `entry`; errors call it `shown`.
    fn local(
        &self,
        (location, shown): (&str, &str),
        identity: &Identity,
        entry: Arc<Entry>,
    ) -> Option<Arc<dyn Object>> {
        let file = self.local.open(&location_of(entry.data_path())).ok().filter(|_| entry.is_in_place())?;
        let (inner, identity) = (self.inner.clone(), identity.clone());
        Some(Arc::new(CachedObject::complete(inner, (location, shown), identity, entry, file)))
    }

    /// `object` with what is read of it kept. `fresh` says that opening it has just brought its first bytes.
    fn through(&self, location: &str, object: Arc<dyn Object>, fresh: bool) -> Arc<dyn Object> {
        let Some(directory) = &self.directory else { return object };
        let identity = object.identity();
        // What another cache of this machine holds is not kept twice.
        if self.inner.file_of(location, &identity).is_some() {
            return object;
        }
        let key = Key::of(&self.inner, location, &identity)
            .map_err(|why| format!("the disk cache was not used: {why}"));
        let entry = key.and_then(|key| directory.entry(&key).inspect_err(|why| directory.warn(why)));
        if let Ok(entry) = &entry
            && entry.is_complete()
            && let Some(local) = self.local((location, object.location()), &identity, Arc::clone(entry))
        {
            return local;
        }
        let through = CachedObject::partial(self.inner.clone(), location, object, entry);
        if fresh {
            through.keep_head();
        }
        Arc::new(through)
    }
}

impl Store for CachingStore {
    fn open(&self, location: &str) -> Result<Arc<dyn Object>> {
        Ok(self.through(location, self.inner.open(location)?, true))
    }

    fn reopen(&self, location: &str, identity: &Identity) -> Result<Arc<dyn Object>> {
        // The version was named when it was opened: if it is here, no one needs to be asked.
        let shown = super::shown(location);
        let complete = self.complete(location, identity);
        match complete.and_then(|entry| self.local((location, &shown), identity, entry)) {
            Some(object) => Ok(object),
            None => Ok(self.through(location, self.inner.reopen(location, identity)?, false)),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<super::Entry>> {
        self.inner.list(prefix)
    }

    fn directories(&self, prefix: &str) -> Vec<String> {
        self.inner.directories(prefix)
    }

    fn file_of(&self, location: &str, identity: &Identity) -> Option<PathBuf> {
        let cached = || Some(self.complete(location, identity)?.data_path());
        self.inner.file_of(location, identity).or_else(cached)
    }

    fn for_load(&self) -> Option<Arc<dyn Store>> {
        Some(Arc::new(self.for_another_load()))
    }

    fn interrupt(&self) {
        self.inner.interrupt();
    }
}

/// Waits until what loads have read is on disk, as far as it is kept; false where that takes longer than `timeout`.
/// A process that ends before leaves entries that the next load completes.
pub fn flush_disk_caches(timeout: Duration) -> bool {
    writers::Writers::of_process().flush(timeout)
}
