//! A file of this machine that stands for a version of a remote object.
//!
//! Whoever has a copy (the Hugging Face cache) opens it with the local store and wraps it in this, so
//! that it has the remote object's name and version and is read like any file: cached or direct, mapped if asked for.
//! Errors of reading name the file, since that is what has to be looked at.

use std::ops::Range;
use std::sync::Arc;

use super::{Identity, Object, ReadContext};
use crate::error::Result;
use crate::memory::{FileMapping, Window};

/// A local file under a remote object's name.
pub(super) struct LocalReplica {
    file: Arc<dyn Object>,
    location: String,
    identity: Identity,
}

impl LocalReplica {
    /// `file`, which holds the version `identity` of the object at `location`.
    pub(super) fn new(file: Arc<dyn Object>, location: String, identity: Identity) -> Self {
        Self { file, location, identity }
    }
}

impl Object for LocalReplica {
    fn location(&self) -> &str {
        &self.location
    }

    fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    fn identity(&self) -> Identity {
        self.identity.clone()
    }

    fn read_into(&self, offset: u64, into: Window<'_>, cx: &mut ReadContext) -> Result<()> {
        self.file.read_into(offset, into, cx)
    }

    fn read_to_staging(&self, range: Range<u64>, buffer: Window<'_>, cx: &mut ReadContext) -> Result<usize> {
        self.file.read_to_staging(range, buffer, cx)
    }

    fn map(&self) -> Result<FileMapping> {
        self.file.map()
    }

    fn is_cached(&self, range: &Range<u64>) -> Option<bool> {
        self.file.is_cached(range)
    }

    fn prefetch(&self, range: Range<u64>) -> bool {
        self.file.prefetch(range)
    }

    fn avoid_direct(&self) {
        self.file.avoid_direct();
    }

    fn notes(&self) -> Vec<String> {
        self.file.notes()
    }

    fn verify_unchanged(&self) -> Result<()> {
        self.file.verify_unchanged()
    }
}
