//! An open object of a remote store.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use object_store::ObjectMeta;
use object_store::path::Path;
use tokio::sync::Notify;

use super::backend::Backend;
use super::fetch::{Stop, once, persist};
use super::retry::Budget;
use super::runtime::Net;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Window;
use crate::store::{Identity, Lane, Object};

/// A pinned version of an object.
pub(super) struct RemoteObject {
    location: String,
    backend: Arc<Backend>,
    path: Path,
    meta: ObjectMeta,
    /// Its first bytes, if opening it brought them.
    head: Vec<u8>,
    budget: Budget,
    interrupted: AtomicBool,
    interrupt: Notify,
}

impl RemoteObject {
    pub(super) fn new(
        location: String,
        backend: Arc<Backend>,
        path: Path,
        meta: ObjectMeta,
        head: Vec<u8>,
    ) -> Self {
        Self {
            location,
            backend,
            path,
            meta,
            head,
            budget: Budget::default(),
            interrupted: AtomicBool::new(false),
            interrupt: Notify::new(),
        }
    }

    /// Waits until the object's readers are to stop.
    async fn until_interrupted(&self) {
        let notified = self.interrupt.notified();
        let mut notified = std::pin::pin!(notified);
        // Registered before looking, so that an interrupt between the two is not missed.
        notified.as_mut().enable();
        if !self.interrupted.load(Ordering::Acquire) {
            notified.await;
        }
    }

    fn fetch(&self, range: Range<u64>, mut into: Window<'_>, lane: &mut Lane) -> Result<()> {
        let begin = range.start;
        let mut at = begin;
        let mut requests = 0;
        let work = persist(&self.backend, &self.budget, true, &mut requests, async || {
            let before = at;
            let put = |offset: u64, bytes: &[u8]| into.write(to_usize(offset - begin), bytes);
            let done =
                once(&self.backend, &self.path, before..range.end, Some(&self.meta), &mut at, put).await;
            done.map(drop).map_err(|fault| (fault, at > before))
        });
        let done = Net::of_process()?.block_on(async {
            tokio::select! {
                biased;
                () = self.until_interrupted() => None,
                done = work => Some(done),
            }
        });
        lane.calls += requests;
        lane.network_bytes += at - begin;
        match done {
            Some(Ok(())) => Ok(()),
            Some(Err(Stop::Tell(error))) => Err(error),
            Some(Err(Stop::Region(_) | Stop::Empty)) => Err(super::failure::changed()),
            None => Err(Error::new(ErrorKind::Cancelled, "the load was stopped")),
        }
        .map_err(|error| error.object(&self.location).range(range.clone()))
    }
}

impl Object for RemoteObject {
    fn location(&self) -> &str {
        &self.location
    }

    fn bytes(&self) -> u64 {
        self.meta.size
    }

    fn identity(&self) -> Identity {
        identity(&self.meta)
    }

    fn read_into(&self, offset: u64, mut into: Window<'_>, lane: &mut Lane) -> Result<()> {
        let len = into.len();
        let end = offset.checked_add(len as u64).filter(|end| *end <= self.meta.size).ok_or_else(|| {
            Error::new(
                ErrorKind::Storage,
                format!("a read beyond the end of the object's {} bytes", self.meta.size),
            )
            .object(&self.location)
            .range(offset..offset.saturating_add(len as u64))
        })?;
        let held = self.head.get(to_usize(offset)..).map_or(0, |rest| rest.len().min(len));
        if held > 0 {
            let start = to_usize(offset);
            into.write(0, &self.head[start..start + held]);
        }
        if held == len {
            return Ok(());
        }
        self.fetch(offset + held as u64..end, into.part(held, len - held), lane)
    }

    fn read_to_slot(&self, range: Range<u64>, mut slot: Window<'_>, lane: &mut Lane) -> Result<usize> {
        let len = to_usize(range.end - range.start);
        self.read_into(range.start, slot.part(0, len), lane).map(|()| 0)
    }

    fn is_cached(&self, _: &Range<u64>) -> Option<bool> {
        Some(false)
    }

    fn interrupt(&self) {
        self.interrupted.store(true, Ordering::Release);
        self.interrupt.notify_waiters();
    }

    /// Where every answer named the version that it was of, there is nothing left to ask: what was read is of the pinned
    /// one, whatever the bucket holds by now. Only a server that gives versions no name is asked once more.
    fn verify_unchanged(&self) -> Result<()> {
        // The epoch stands for a date that the server did not give.
        let dated = self.meta.last_modified.timestamp() > 0;
        if self.meta.e_tag.is_some() || self.meta.version.is_some() || dated {
            return Ok(());
        }
        let now = super::inspect(&self.backend, &self.path).map_err(|error| error.object(&self.location))?;
        if super::fetch::is_same(&self.meta, &now) {
            return Ok(());
        }
        Err(super::failure::changed().object(&self.location))
    }
}

/// What stands for a version, in a form from which [`version`] makes it again.
fn identity(meta: &ObjectMeta) -> Identity {
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    Identity(format!("{}\n{}\n{}\n{}", meta.size, text(&meta.e_tag), text(&meta.version), meta.last_modified))
}

/// The version that an identity stands for.
pub(super) fn version(path: &Path, identity: &Identity) -> Option<ObjectMeta> {
    let mut parts = identity.0.split('\n');
    let size = parts.next()?.parse().ok()?;
    let mut text = || parts.next().map(|part| Some(part.to_owned()).filter(|part| !part.is_empty()));
    let (e_tag, version) = (text()?, text()?);
    let last_modified = parts.next()?.parse().ok()?;
    Some(ObjectMeta { location: path.clone(), last_modified, size, e_tag, version })
}

/// Lengths here are lengths of memory that exists, so they fit.
fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_can_be_turned_back_into_the_version_it_stands_for() {
        for (e_tag, version_id) in [(Some("\"a\""), Some("7")), (None, None), (Some("W/\"x\""), None)] {
            let meta = ObjectMeta {
                location: Path::from("a/b"),
                last_modified: "2026-11-21T06:47:41.123Z".parse().unwrap(),
                size: 12,
                e_tag: e_tag.map(str::to_owned),
                version: version_id.map(str::to_owned),
            };
            assert_eq!(version(&meta.location, &identity(&meta)), Some(meta));
        }
        assert_eq!(version(&Path::from("a"), &Identity("12".into())), None);
    }
}
