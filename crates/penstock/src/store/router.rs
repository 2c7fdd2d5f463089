//! Which store a location leads to: its scheme says.

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
    remote: super::RemoteStore,
}

impl Router {
    /// A router whose local files are read under `cache`.
    pub fn new(cache: CachePolicy) -> Self {
        Self {
            local: LocalStore::new(cache),
            #[cfg(feature = "remote")]
            remote: super::RemoteStore::default(),
        }
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
}
