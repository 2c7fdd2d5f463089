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
    ///
    /// Remote stores are set up from the variables of the process as they are now: see [`super::Environment::of_process`].
    pub fn new(cache: CachePolicy) -> Self {
        Self {
            local: LocalStore::new(cache),
            #[cfg(feature = "remote")]
            remote: Self::remote(cache, None, super::Environment::of_process()),
        }
    }

    /// The same, with remote stores that are set up from `environment`, and a disk cache in front of them if there is to be
    /// one.
    #[cfg(feature = "remote")]
    pub fn with_environment(
        cache: CachePolicy,
        disk_cache: Option<super::DiskCache>,
        environment: super::Environment,
    ) -> Self {
        Self { local: LocalStore::new(cache), remote: Self::remote(cache, disk_cache, environment) }
    }

    /// The same stores with another disk cache, or none, whose files and those of this machine are read under `cache`.
    #[cfg(feature = "remote")]
    #[must_use]
    pub fn cached_in(&self, cache: CachePolicy, disk_cache: Option<super::DiskCache>) -> Self {
        Self { local: LocalStore::new(cache), remote: self.remote.cached_in(disk_cache, cache) }
    }

    #[cfg(feature = "remote")]
    fn remote(
        cache: CachePolicy,
        disk_cache: Option<super::DiskCache>,
        environment: super::Environment,
    ) -> super::CachingStore {
        let store = super::RemoteStore::new(environment, super::RetryPolicy::default());
        super::CachingStore::new(store.with_local_files(cache), disk_cache, cache)
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

    fn directories(&self, prefix: &str) -> Vec<String> {
        self.store(prefix).directories(prefix)
    }

    fn file_of(&self, location: &str, identity: &Identity) -> Option<PathBuf> {
        self.store(location).file_of(location, identity)
    }

    #[cfg(feature = "remote")]
    fn for_load(&self) -> Option<Arc<dyn Store>> {
        Some(Arc::new(Self { local: self.local, remote: self.remote.for_another_load() }))
    }

    #[cfg(feature = "remote")]
    fn interrupt(&self) {
        self.remote.interrupt();
    }
}
