//! Object stores and HTTP servers: S3, Google Cloud Storage, Azure Blob Storage, and whatever answers to ranges.
//!
//! An object is opened with one request that brings its size, its version and its first bytes, so that the header of a
//! shard costs no second one. From then on every range is asked of that version, and what comes is copied once, from
//! the chunk it came in to where it belongs.
//!
//! * `address`: locations taken apart.
//! * `backend`: the store behind a bucket, set up by `s3` (with `aws`), `gcs` and `azure` from an [`Environment`].
//! * `transport`: the HTTP client; `names`: its addresses; `witness`: what it saw; `runtime`: the process's threads and connections.
//! * `fetch`: one range, resumed where it stopped; `retry`: when to ask again; `failure`: what errors say.
//! * `object`: an open object; `pace`: when one of its ranges is slow.
//! * `course`: what the requests of one load share.
//! * `web`: finding a checkpoint on a server that cannot list.
//!
//! Secrets come in with the environment and with locations. They go to the servers they are for, and nowhere else:
//! types that hold them have no `Debug` form, and errors are scrubbed of them.

mod address;
mod aws;
mod azure;
mod backend;
mod course;
mod environment;
mod failure;
mod fetch;
mod gcs;
mod names;
mod object;
mod pace;
mod retry;
mod runtime;
mod s3;
mod transport;
mod web;
mod witness;

use std::sync::Arc;

use object_store::path::Path;
use object_store::{GetOptions, ObjectMeta};

use super::{Entry, Identity, Object, Store};
use crate::error::{Error, ErrorKind, Result};

use address::{Address, Provider};
use backend::Backend;
use course::Course;
use fetch::{Fault, Stop, Tally, named, once, persist};
use object::RemoteObject;

pub use environment::Environment;
pub use retry::Patience;

/// Bytes of the request that opens an object: the header of nearly every shard is shorter, and on a fast network the
/// bytes cost less than another round trip.
const OPENING_BYTES: u64 = 512 << 10;

/// The store of `s3://`, `gs://`, `az://`, `abfss://`, `http://` and `https://` locations.
#[derive(Clone, Default)]
pub struct RemoteStore {
    environment: Option<Arc<Environment>>,
    patience: Patience,
    course: Arc<Course>,
}

impl RemoteStore {
    /// A store that is set up from `environment`, and waits as `patience` says.
    pub fn new(environment: Environment, patience: Patience) -> Self {
        Self { environment: Some(Arc::new(environment)), patience, course: Arc::default() }
    }

    /// The same store for another load, whose requests share nothing with those of this one but connections.
    #[must_use]
    pub fn another_course(&self) -> Self {
        Self { course: Arc::new(Course::of_load()), ..self.clone() }
    }

    /// The variables that count: those given, else those of the process, as they are now.
    fn environment(&self) -> Arc<Environment> {
        self.environment.clone().unwrap_or_else(|| Arc::new(Environment::of_process()))
    }

    fn reach(&self, location: &str) -> Result<(Address, Arc<Backend>, Path)> {
        let address = Address::parse(location)?;
        let path = path(&address)?;
        let backend = Backend::of(&address, &self.environment(), self.patience, &self.course)
            .map_err(|error| error.object(address.shown()))?;
        Ok((address, backend, path))
    }
}

impl std::fmt::Debug for RemoteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteStore").field("patience", &self.patience).finish_non_exhaustive()
    }
}

impl Store for RemoteStore {
    fn open(&self, location: &str) -> Result<Arc<dyn Object>> {
        let (address, backend, path) = self.reach(location)?;
        if address.provider != Provider::Web && address.key.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, "the location names a bucket, not an object")
                .object(address.shown()));
        }
        let course = &self.course;
        let (backend, opened) =
            in_its_region(&address, backend, course, |backend| open(backend, &path, course));
        let (meta, head) = opened.map_err(|error| error.object(address.shown()))?;
        let course = Arc::clone(course);
        Ok(Arc::new(RemoteObject { location: address.shown(), backend, path, meta, head, course }))
    }

    /// Without a request: each range will be asked of that version.
    fn reopen(&self, location: &str, identity: &Identity) -> Result<Arc<dyn Object>> {
        let (address, backend, path) = self.reach(location)?;
        let meta =
            object::version(&path, identity).ok_or_else(|| failure::changed().object(address.shown()))?;
        let (head, course) = (Vec::new(), Arc::clone(&self.course));
        Ok(Arc::new(RemoteObject { location: address.shown(), backend, path, meta, head, course }))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        let (address, backend, path) = self.reach(prefix)?;
        let mut entries = if address.provider == Provider::Web {
            web::list(self, &address)?
        } else {
            let course = &self.course;
            let (_, listed) =
                in_its_region(&address, backend, course, |backend| list(backend, &path, course));
            let below = |meta: &ObjectMeta| meta.location != path;
            listed
                .map_err(|error| error.object(address.shown()))?
                .into_iter()
                .filter(below)
                .map(|meta| Entry { location: address.with_key(meta.location.as_ref()), bytes: meta.size })
                .collect()
        };
        if entries.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, "no object is directly under this prefix")
                .object(address.shown())
                .remedy("Check the prefix: it is compared letter by letter"));
        }
        entries.sort_by(|a, b| a.location.cmp(&b.location));
        Ok(entries)
    }

    fn for_load(&self) -> Option<Arc<dyn Store>> {
        Some(Arc::new(self.another_course()))
    }

    fn interrupt(&self) {
        self.course.interrupt();
    }
}

/// The object's key as `object_store` wants it.
fn path(address: &Address) -> Result<Path> {
    let refuse = |why: String| {
        Error::new(ErrorKind::NotFound, format!("keys like this cannot be read: {why}"))
            .object(address.shown())
            .remedy(
                "Keys with empty parts (a//b, /a), `.` or `..` are not supported: copy the object to another key",
            )
    };
    if address.key.starts_with('/') {
        // Another key than the one without it.
        return Err(refuse("it begins with a slash".into()));
    }
    Path::parse(&address.key).map_err(|error| refuse(error.to_string()))
}

/// Does `work`; where the bucket turns out to be in another region, again there. Returns the backend that served.
fn in_its_region<T>(
    address: &Address,
    backend: Arc<Backend>,
    course: &Course,
    work: impl Fn(&Backend) -> Result<T, Stop>,
) -> (Arc<Backend>, Result<T>) {
    let told = |stop| match stop {
        Stop::Tell(error) => error,
        Stop::Region(region) => Error::new(ErrorKind::Storage, format!("the bucket is in region {region}"))
            .remedy(format!("Set AWS_REGION={region}")),
        Stop::Empty => failure::changed(),
    };
    match work(&backend) {
        Ok(done) => (backend, Ok(done)),
        Err(Stop::Region(region)) => match backend.in_region(address, region, course) {
            Ok(backend) => {
                let done = work(&backend).map_err(told);
                (backend, done)
            }
            Err(error) => (backend, Err(error)),
        },
        Err(stop) => (backend, Err(told(stop))),
    }
}

/// What the object is, and its first bytes.
fn open(backend: &Backend, path: &Path, course: &Course) -> Result<(ObjectMeta, Vec<u8>), Stop> {
    let opened = course.run(persist(backend, course, false, &Tally::default(), async || {
        // Anew for every attempt: until it is complete, no version is pinned.
        let (mut head, mut at) = (Vec::new(), 0);
        let put = |_, bytes: &[u8]| head.extend_from_slice(bytes);
        let meta = once(backend, path, 0..OPENING_BYTES, None, &mut at, put).await;
        meta.map(|meta| (meta, head)).map_err(|fault| (fault, false))
    }));
    match opened {
        // No range of an empty object can be had.
        Err(Stop::Empty) => inspect(backend, path, course).map(|meta| (meta, Vec::new())).map_err(Stop::Tell),
        opened => opened,
    }
}

/// What the object is, without any of its bytes.
fn inspect(backend: &Backend, path: &Path, course: &Course) -> Result<ObjectMeta> {
    let answer = course.run(persist(backend, course, false, &Tally::default(), async || {
        let options = GetOptions { head: true, ..GetOptions::default() };
        match backend.store.get_opts(path, options).await {
            Ok(answer) => Ok(named(answer.meta)),
            Err(error) => Err((Fault::Store(error), false)),
        }
    }));
    answer.map_err(|stop| match stop {
        Stop::Tell(error) => error,
        Stop::Region(_) | Stop::Empty => failure::changed(),
    })
}

/// The objects directly under a prefix, all pages of them.
fn list(backend: &Backend, prefix: &Path, course: &Course) -> Result<Vec<ObjectMeta>, Stop> {
    course.run(persist(backend, course, false, &Tally::default(), async || {
        let listed = backend.store.list_with_delimiter(Some(prefix)).await;
        listed.map(|listed| listed.objects).map_err(|error| (Fault::Store(error), false))
    }))
}
