//! A prefix of an object store that is saved to: complete, or marked as not complete.
//!
//! An object store renames nothing. So a save goes to a prefix that holds nothing, and the first object in it is a marker,
//! which the store makes only where there is none: the second of two savers is refused by the store itself. Objects follow, in
//! parts, many at once; what says that the others are there (the shard index) is the last of them. Then the marker goes. As
//! long as it is there, loaders refuse the prefix.
//!
//! Whoever fails or is stopped takes its objects, its uploads and at last its marker away. Whoever is killed leaves them: the
//! marker says so, and the parts of an unfinished upload are the business of the bucket's lifecycle rules.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use object_store::multipart::PartId;
use object_store::path::Path;

use super::http::context::LoadContext;
use super::objects::listing;
use super::objects::opening::in_its_region;
use super::objects::upload::{self, Created, Upload};
use super::provider::backend::Backend;
use super::settings::address::{Address, Provider};
use super::{RemoteStore, RetryPolicy, path};
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::is_hub;
use crate::store::sink::{INCOMPLETE_MARKER, Sink, SinkObject, being_saved, exists};

/// Bytes of a part: large enough for what a request costs, small enough for a good many at once.
const PART_BYTES: u64 = 16 << 20;
/// No store takes more parts of one object than this (S3 and Google 10,000).
const MOST_PARTS: u64 = 9_000;
/// Parts that are sent at once.
const WRITERS: usize = 16;
/// How long a server may say nothing while a part is on its way to it, and it may be slow to get there.
const PATIENCE: Duration = Duration::from_secs(300);
/// Why a prefix that holds something is refused.
const NEW_PREFIX: &str =
    "Save to a prefix that holds nothing: an object store cannot replace several objects in one step";

/// A prefix that is being saved to.
pub(super) struct RemoteSink {
    store: RemoteStore,
    target: Arc<Target>,
    objects: Mutex<Vec<Arc<RemotePart>>>,
    /// Whether the marker is there, and ours.
    marked: Mutex<bool>,
}

/// Where it goes.
struct Target {
    shown: String,
    backend: Arc<Backend>,
    prefix: Path,
    context: Arc<LoadContext>,
}

impl Target {
    fn path(&self, name: &str) -> Path {
        let parts = self.prefix.parts().map(|part| part.as_ref().to_owned());
        Path::from_iter(parts.chain(name.split('/').map(str::to_owned)))
    }

    fn shown(&self, name: &str) -> String {
        format!("{}/{name}", self.shown.trim_end_matches('/'))
    }
}

impl RemoteSink {
    /// Takes the prefix at `location`, which must hold nothing.
    pub(super) fn create(store: &RemoteStore, location: &str) -> Result<Self> {
        let policy = RetryPolicy { idle: store.policy.idle.max(PATIENCE), ..store.policy };
        let store = RemoteStore { policy, ..store.clone() };
        if is_hub(location) {
            return Err(upload::not_writable(Provider::Hub).object(crate::store::shown(location)));
        }
        let address = Address::parse(location)?;
        let shown = address.shown();
        if address.provider == Provider::Web {
            return Err(upload::not_writable(address.provider).object(shown));
        }
        let prefix = path(&address)?;
        let (backend, _) = store.connect(&address)?;
        let context = Arc::clone(&store.context);
        let (backend, there) = in_its_region(&address, backend, &context, |backend| {
            listing::list(backend, &address, &prefix, true, &context)
        });
        let there = match there {
            Err(error) if error.kind() == ErrorKind::NotFound && error.details().is_empty() => None,
            there => Some(there.map_err(|error| error.object(&*shown))?),
        };
        let target = Arc::new(Target { shown, backend, prefix, context });
        if let Some(there) = there.filter(|there| !there.objects.is_empty()) {
            return Err(match there.objects.iter().any(|object| object.path == INCOMPLETE_MARKER) {
                true => marked(&target),
                false => exists(&target.shown, NEW_PREFIX),
            });
        }
        // Nobody else's is the same, so that ours is known if the answer is lost.
        let token = format!(
            "penstock {} is saving here, or was cut off: what is here is not complete.\n{:016x}{:016x}\n",
            env!("CARGO_PKG_VERSION"),
            fastrand::u64(..),
            fastrand::u64(..)
        );
        let (marker, token) = (target.path(INCOMPLETE_MARKER), Bytes::from(token));
        match upload::create(&target.backend, &marker, &token, &target.context) {
            Ok(Created::Made) => {}
            Ok(Created::WasThere) => return Err(marked(&target)),
            Err(error) => return Err(error.object(target.shown(INCOMPLETE_MARKER))),
        }
        Ok(Self { store, target, objects: Mutex::default(), marked: Mutex::new(true) })
    }
}

fn marked(target: &Target) -> Error {
    let marker = target.shown(INCOMPLETE_MARKER);
    being_saved(
        &target.shown,
        format!(
            "Wait for it to end. If it was cut off, delete what is there, {marker} last, or save to another prefix"
        ),
    )
}

impl Sink for RemoteSink {
    fn location(&self) -> &str {
        &self.target.shown
    }

    fn begin(&self, name: &str, bytes: u64) -> Result<Arc<dyn SinkObject>> {
        let target = Arc::clone(&self.target);
        let part_bytes = PART_BYTES.max(bytes.div_ceil(MOST_PARTS).next_multiple_of(1 << 20));
        let path = target.path(name);
        let upload = match bytes > part_bytes {
            true => {
                let begun = Upload::begin(&target.backend, &path, &target.context);
                Some(begun.map_err(|error| error.object(target.shown(name)))?)
            }
            false => None,
        };
        let parts = usize::try_from(bytes.div_ceil(part_bytes).max(1)).unwrap_or(usize::MAX);
        let state = Mutex::new(State { parts: vec![None; parts], done: false });
        let object =
            Arc::new(RemotePart { target, name: name.to_owned(), path, bytes, part_bytes, upload, state });
        lock(&self.objects).push(Arc::clone(&object));
        Ok(object)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let (target, bytes) = (&self.target, Bytes::copy_from_slice(bytes));
        let path = target.path(name);
        let created = upload::create(&target.backend, &path, &bytes, &target.context);
        match created.map_err(|error| error.object(target.shown(name)))? {
            Created::WasThere => Err(exists(&target.shown(name), NEW_PREFIX)),
            Created::Made => {
                let (target, part_bytes) = (Arc::clone(target), PART_BYTES);
                let state = Mutex::new(State { parts: Vec::new(), done: true });
                let bytes = bytes.len() as u64;
                let name = name.to_owned();
                let object = RemotePart { target, name, path, bytes, part_bytes, upload: None, state };
                lock(&self.objects).push(Arc::new(object));
                Ok(())
            }
        }
    }

    fn publish(&self) -> Result<()> {
        let (target, marker) = (&self.target, self.target.path(INCOMPLETE_MARKER));
        upload::delete(&target.backend, &marker, &target.context).map_err(|error| {
            Error::new(error.kind(), format!("the marker could not be deleted: {}", error.cause()))
                .object(target.shown(INCOMPLETE_MARKER))
        })?;
        *lock(&self.marked) = false;
        Ok(())
    }

    fn discard(&self) {
        if !std::mem::take(&mut *lock(&self.marked)) {
            return;
        }
        // What was stopped asks for nothing any more.
        let context = self.store.for_another_load().context;
        let target = &self.target;
        let mut failed = None;
        for object in lock(&self.objects).drain(..) {
            let done = lock(&object.state).done;
            let gone = match &object.upload {
                Some(upload) if !done => upload.abort(&target.backend, &object.path, &context),
                _ => upload::delete(&target.backend, &object.path, &context),
            };
            failed = failed.or(gone.err());
        }
        let marker = target.path(INCOMPLETE_MARKER);
        // It stays as long as anything else does.
        if failed.is_none() {
            failed = upload::delete(&target.backend, &marker, &context).err();
        }
        if let Some(error) = failed {
            tracing::warn!(location = %target.shown, %error, "what a save had begun could not be deleted");
        }
    }

    fn interrupt(&self) {
        self.target.context.interrupt();
    }

    fn writers(&self) -> usize {
        WRITERS
    }
}

impl Drop for RemoteSink {
    fn drop(&mut self) {
        self.discard();
    }
}

/// An object on its way.
struct RemotePart {
    target: Arc<Target>,
    name: String,
    path: Path,
    bytes: u64,
    part_bytes: u64,
    /// None for what is sent with one request.
    upload: Option<Upload>,
    state: Mutex<State>,
}

struct State {
    parts: Vec<Option<PartId>>,
    done: bool,
}

impl SinkObject for RemotePart {
    fn part_bytes(&self) -> u64 {
        self.part_bytes
    }

    fn write(&self, offset: u64, part: &[u8]) -> Result<()> {
        let Target { backend, context, .. } = &*self.target;
        let range = offset..offset + part.len() as u64;
        // A request keeps its bytes until its connection is done with them, which may be after its answer.
        let bytes = Bytes::copy_from_slice(part);
        let sent = match &self.upload {
            None => upload::put(backend, &self.path, &bytes, context).map(|()| lock(&self.state).done = true),
            Some(upload) => {
                let number = usize::try_from(offset / self.part_bytes).unwrap_or(usize::MAX);
                upload
                    .part(backend, &self.path, number, &bytes, context)
                    .map(|id| lock(&self.state).parts[number] = Some(id))
            }
        };
        sent.map_err(|error| error.object(self.target.shown(&self.name)).range(range))
    }

    fn finish(&self) -> Result<()> {
        let Target { backend, context, .. } = &*self.target;
        let Some(upload) = &self.upload else {
            // An object without bytes has no part.
            return if self.bytes == 0 { self.write(0, &[]) } else { Ok(()) };
        };
        let parts: Vec<_> = lock(&self.state).parts.iter().flatten().cloned().collect();
        let completed = upload.complete(backend, &self.path, &parts, self.bytes, context);
        completed.map_err(|error| error.object(self.target.shown(&self.name)))?;
        lock(&self.state).done = true;
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
