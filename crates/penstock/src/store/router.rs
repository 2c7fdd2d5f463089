//! Which store a location leads to: its scheme says.

use std::path::PathBuf;
use std::sync::Arc;

use super::{CachePolicy, Entry, Identity, LocalStore, Object, Store, is_url};
use crate::error::Result;

/// Whether a location is a URL, so that reading from it goes over the network.
pub fn is_remote(location: &str) -> bool {
    is_url(location)
}

/// All stores behind one: paths lead to the file system, URLs to object stores and HTTP servers.
#[derive(Debug, Clone, Default)]
pub struct Router {
    local: LocalStore,
    #[cfg(feature = "remote")]
    remote: super::CachingStore,
}

impl Router {
    /// A router whose local files are read under `cache`.
    pub fn new(cache: CachePolicy) -> Self {
        Self {
            local: LocalStore::new(cache),
            #[cfg(feature = "remote")]
            remote: Self::remote(cache, None),
        }
    }

    /// The same, keeping remote objects in a disk cache.
    #[cfg(feature = "remote")]
    pub fn with_disk_cache(cache: CachePolicy, disk_cache: super::DiskCache) -> Self {
        Self { local: LocalStore::new(cache), remote: Self::remote(cache, Some(disk_cache)) }
    }

    #[cfg(feature = "remote")]
    fn remote(cache: CachePolicy, disk_cache: Option<super::DiskCache>) -> super::CachingStore {
        super::CachingStore::new(super::RemoteStore::default().with_local_files(cache), disk_cache, cache)
    }

    fn store(&self, location: &str) -> &dyn Store {
        #[cfg(feature = "remote")]
        if is_url(location) {
            return &self.remote;
        }
        // Without the feature, the file system says that it knows no URLs.
        let _ = is_url(location);
        &self.local
    }
}

impl Store for Router {
    fn open(&self, location: &str) -> Result<Arc<dyn Object>> {
        self.store(location).open(location)
    }

    fn reopen(&self, location: &str, identity: &Identity) -> Result<Arc<dyn Object>> {
        self.store(location).reopen(location, identity)
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        self.store(prefix).list(prefix)
    }

    fn file_of(&self, location: &str, identity: &Identity) -> Option<PathBuf> {
        self.store(location).file_of(location, identity)
    }

    #[cfg(feature = "remote")]
    fn for_load(&self) -> Option<Arc<dyn Store>> {
        Some(Arc::new(Self { local: self.local, remote: self.remote.another_course() }))
    }

    #[cfg(feature = "remote")]
    fn interrupt(&self) {
        self.remote.interrupt();
    }
}
