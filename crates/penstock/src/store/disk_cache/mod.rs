//! What came over the network, kept on a local disk for the next load.
//!
//! A store in front of the remote one. What is read through it also goes to disk, behind the load's back: bytes are
//! copied to a buffer and handed to threads that write; where these cannot keep up, bytes are left out rather than
//! waited for (but for a moment), and the next load fills the gaps. An object that is there completely is a local file from then on, read
//! as fast as any, cached or direct.
//!
//! * `key`: which version of which object. `directory`: entries on disk, their locks, their bound.
//! * `entry`: an entry being filled: data, and a map of its blocks' checksums. `object`: reading through one.
//! * `writers`: the process's threads that write.
//!
//! Promises:
//! * An entry is used only for the very version it is of: the remote store says which that is, by tag or date.
//! * Bytes of an entry that is not complete are compared with their checksums before they are used; a complete one is a
//!   file that has not been written to since it was found complete. What is torn, or someone else's, is fetched anew.
//! * The entries together are no larger than their bound; those used longest ago go first, and none that is in use.
//! * Nothing of this fails a load: a full disk, a directory that cannot be written to, end in a remark.
//! * Locks end with the process that holds them; nothing needs to be cleaned up after a crash.

mod directory;
mod entry;
mod key;
mod object;
mod writers;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::standin::StandIn;
use super::{CachePolicy, Entry, Identity, LocalStore, Object, RemoteStore, Store, location_of};
use crate::error::Result;

use directory::Directory;
use key::Key;
use object::{CachingObject, Noted};

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

    /// The same store for another load, whose requests share nothing with those of this one but connections.
    #[must_use]
    pub fn another_course(&self) -> Self {
        Self { inner: self.inner.another_course(), ..self.clone() }
    }

    /// The object of the cache that is that version, if it is there completely.
    fn complete(&self, location: &str, key: &Key) -> Option<Arc<dyn Object>> {
        let held = self.directory.as_ref()?.complete(key)?;
        let file = self.local.open(&location_of(held.path())).ok()?;
        Some(Arc::new(StandIn::new(file, location.to_owned(), key.identity.clone()).holding(held)))
    }

    /// `object` with what is read of it kept. `fresh` says that opening it has just brought its first bytes.
    fn through(&self, location: &str, object: Arc<dyn Object>, fresh: bool) -> Arc<dyn Object> {
        let Some(directory) = &self.directory else { return object };
        // What another cache of this machine holds is not kept twice.
        if self.inner.file_of(location, &object.identity()).is_some() {
            return object;
        }
        let Some(key) = Key::of(location, &object.identity()) else {
            let remark = "the disk cache was not used: the server gives this object's versions no name";
            return Arc::new(Noted::new(object, remark.into()));
        };
        if let Some(complete) = self.complete(object.location(), &key) {
            return complete;
        }
        match directory.entry(&key) {
            Ok(entry) => {
                let through = CachingObject::new(object, entry, &self.local);
                if fresh {
                    through.keep_head();
                }
                Arc::new(through)
            }
            Err(remark) => Arc::new(Noted::new(object, remark)),
        }
    }
}

impl Store for CachingStore {
    fn open(&self, location: &str) -> Result<Arc<dyn Object>> {
        Ok(self.through(location, self.inner.open(location)?, true))
    }

    fn reopen(&self, location: &str, identity: &Identity) -> Result<Arc<dyn Object>> {
        // The version was named when it was opened: if it is here, no one needs to be asked.
        let shown = super::shown(location);
        let complete = Key::of(location, identity).and_then(|key| self.complete(&shown, &key));
        match complete {
            Some(object) => Ok(object),
            None => Ok(self.through(location, self.inner.reopen(location, identity)?, false)),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        self.inner.list(prefix)
    }

    fn file_of(&self, location: &str, identity: &Identity) -> Option<PathBuf> {
        let cached =
            || Some(self.directory.as_ref()?.complete(&Key::of(location, identity)?)?.path().to_owned());
        self.inner.file_of(location, identity).or_else(cached)
    }

    fn for_load(&self) -> Option<Arc<dyn Store>> {
        Some(Arc::new(self.another_course()))
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
