//! A complete entry: a local file, and the remote object for what the disk fails to give.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::directory::Held;
use super::entry::unreadable;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{FileMapping, Window};
use crate::store::{Identity, Object, ReadContext, RemoteStore, Store};

/// An object all of whose bytes are on disk.
pub(super) struct CompleteObject {
    file: Arc<dyn Object>,
    held: Held,
    location: String,
    identity: Identity,
    /// Where the object comes from otherwise: its full location.
    store: RemoteStore,
    url: String,
    /// Set once the file could not be read. From then on, all comes from there.
    remote: OnceLock<Arc<dyn Object>>,
    note: Mutex<Option<String>>,
}

impl CompleteObject {
    /// `file`, which holds the version `identity` of the object at `url`.
    pub(super) fn new(
        file: Arc<dyn Object>,
        held: Held,
        store: RemoteStore,
        (url, location): (&str, &str),
        identity: Identity,
    ) -> Self {
        Self {
            file,
            held,
            location: location.to_owned(),
            identity,
            store,
            url: url.to_owned(),
            remote: OnceLock::new(),
            note: Mutex::default(),
        }
    }

    /// Reads from the file; where that fails, from the remote object.
    fn read<T>(&self, mut read: impl FnMut(&dyn Object) -> Result<T>) -> Result<T> {
        if self.remote.get().is_none() {
            match read(&*self.file) {
                Err(error) if error.kind() != ErrorKind::Cancelled => self.give_up(&error)?,
                done => return done,
            }
        }
        match self.remote.get() {
            Some(remote) => read(&**remote),
            None => read(&*self.file),
        }
    }

    fn give_up(&self, error: &Error) -> Result<()> {
        let note = unreadable(self.held.doubt(), error);
        self.note.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(note);
        let remote = self.store.reopen(&self.url, &self.identity)?;
        let _ = self.remote.set(remote);
        Ok(())
    }
}

impl Object for CompleteObject {
    fn location(&self) -> &str {
        &self.location
    }

    fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    fn identity(&self) -> Identity {
        self.identity.clone()
    }

    fn read_into(&self, offset: u64, mut into: Window<'_>, cx: &mut ReadContext) -> Result<()> {
        let len = into.len();
        self.read(|object| object.read_into(offset, into.part(0, len), cx))
    }

    fn read_scattered(&self, into: &mut [(u64, Window<'_>)], cx: &mut ReadContext) -> Result<()> {
        self.read(|object| object.read_scattered(into, cx))
    }

    fn scatters(&self) -> bool {
        self.remote.get().is_some_and(|remote| remote.scatters())
    }

    fn read_to_staging(
        &self,
        range: Range<u64>,
        mut buffer: Window<'_>,
        cx: &mut ReadContext,
    ) -> Result<usize> {
        let len = buffer.len();
        self.read(|object| object.read_to_staging(range.clone(), buffer.part(0, len), cx))
    }

    fn map(&self) -> Result<FileMapping> {
        self.file.map()
    }

    fn is_cached(&self, range: &Range<u64>) -> Option<bool> {
        self.remote.get().map_or_else(|| self.file.is_cached(range), |remote| remote.is_cached(range))
    }

    fn prefetch(&self, range: Range<u64>) -> bool {
        self.file.prefetch(range)
    }

    fn avoid_direct(&self) {
        self.file.avoid_direct();
    }

    fn notes(&self) -> Vec<String> {
        let failed = self.note.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let remote = self.remote.get().map(|remote| remote.notes()).unwrap_or_default();
        self.file.notes().into_iter().chain(failed).chain(remote).collect()
    }

    fn verify_unchanged(&self) -> Result<()> {
        if !self.held.is_unchanged() {
            self.held.doubt();
            return Err(Error::new(
                ErrorKind::Changed,
                "its entry in the disk cache was written to by another program while it was being loaded",
            )
            .object(self.held.path().display().to_string())
            .remedy("Load again: the entry's bytes are compared with their checksums"));
        }
        self.remote.get().map_or(Ok(()), |remote| remote.verify_unchanged())
    }
}
