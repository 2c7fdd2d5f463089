//! Object stores and HTTP servers: S3, Google Cloud Storage, Azure Blob Storage, and whatever answers to ranges.
//!
//! An object is opened with one request that brings its size, its version and its first bytes, so that the header of a
//! shard costs no second one. From then on every range is asked of that version, and what comes is copied once, from
//! the chunk it came in to where it belongs.
//!
//! * `address`: locations taken apart.
//! * `backend`: the store behind a bucket, set up by `s3` (with `aws`), `gcs` and `azure` from an [`Environment`].
//! * `transport`: the HTTP client; `witness`: what it saw; `runtime`: the process's threads and connections.
//! * `fetch`: one range, resumed where it stopped; `retry`: when to ask again; `failure`: what errors say.
//! * `object`: an open object.
//! * `web`: finding a checkpoint on a server that cannot list.
//!
//! Secrets come in with the environment and with locations. They go to the servers they are for, and nowhere else:
//! types that hold them have no `Debug` form, and errors are scrubbed of them.

mod address;
mod aws;
mod azure;
mod backend;
mod environment;
mod failure;
mod fetch;
mod gcs;
mod object;
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
use fetch::{Fault, Stop, named, once, persist};
use object::RemoteObject;
use retry::Budget;
use runtime::Net;

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
}

impl RemoteStore {
    /// A store that is set up from `environment`, and waits as `patience` says.
    pub fn new(environment: Environment, patience: Patience) -> Self {
        Self { environment: Some(Arc::new(environment)), patience }
    }

    /// The variables that count: those given, else those of the process, as they are now.
    fn environment(&self) -> Arc<Environment> {
        self.environment.clone().unwrap_or_else(|| Arc::new(Environment::of_process()))
    }

    fn reach(&self, location: &str) -> Result<(Address, Arc<Backend>, Path)> {
        let address = Address::parse(location)?;
        let path = path(&address)?;
        let backend = Backend::of(&address, &self.environment(), self.patience)
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
        let (backend, opened) = in_its_region(&address, backend, |backend| open(backend, &path));
        let (meta, head) = opened.map_err(|error| error.object(address.shown()))?;
        Ok(Arc::new(RemoteObject::new(address.shown(), backend, path, meta, head)))
    }

    /// Without a request: each range will be asked of that version.
    fn reopen(&self, location: &str, identity: &Identity) -> Result<Arc<dyn Object>> {
        let (address, backend, path) = self.reach(location)?;
        match object::version(&path, identity) {
            Some(meta) => Ok(Arc::new(RemoteObject::new(address.shown(), backend, path, meta, Vec::new()))),
            None => Err(failure::changed().object(address.shown())),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        let (address, backend, path) = self.reach(prefix)?;
        let mut entries = if address.provider == Provider::Web {
            web::list(self, &address)?
        } else {
            let (_, listed) = in_its_region(&address, backend, |backend| list(backend, &path));
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
}

/// The object's key as `object_store` wants it.
fn path(address: &Address) -> Result<Path> {
    Path::parse(&address.key).map_err(|error| {
        Error::new(ErrorKind::NotFound, format!("keys like this cannot be read: {error}"))
            .object(address.shown())
            .remedy(
                "Keys with empty parts (a//b), `.` or `..` are not supported: copy the object to another key",
            )
    })
}

/// Does `work`; where the bucket turns out to be in another region, again there. Returns the backend that served.
fn in_its_region<T>(
    address: &Address,
    backend: Arc<Backend>,
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
        Err(Stop::Region(region)) => match backend.in_region(address, region) {
            Ok(backend) => {
                let done = work(&backend).map_err(told);
                (backend, done)
            }
            Err(error) => (backend, Err(error)),
        },
        Err(stop) => (backend, Err(told(stop))),
    }
}

fn block_on<T>(work: impl Future<Output = Result<T, Stop>>) -> Result<T, Stop> {
    Net::of_process().map_err(Stop::Tell)?.block_on(work)
}

/// What the object is, and its first bytes.
fn open(backend: &Backend, path: &Path) -> Result<(ObjectMeta, Vec<u8>), Stop> {
    let budget = Budget::default();
    let opened = block_on(persist(backend, &budget, false, &mut 0, async || {
        // Anew for every attempt: until it is complete, no version is pinned.
        let (mut head, mut at) = (Vec::new(), 0);
        let put = |_, bytes: &[u8]| head.extend_from_slice(bytes);
        let meta = once(backend, path, 0..OPENING_BYTES, None, &mut at, put).await;
        meta.map(|meta| (meta, head)).map_err(|fault| (fault, false))
    }));
    match opened {
        // No range of an empty object can be had.
        Err(Stop::Empty) => inspect(backend, path).map(|meta| (meta, Vec::new())).map_err(Stop::Tell),
        opened => opened,
    }
}

/// What the object is, without any of its bytes.
fn inspect(backend: &Backend, path: &Path) -> Result<ObjectMeta> {
    let budget = Budget::default();
    let answer = block_on(persist(backend, &budget, false, &mut 0, async || {
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
fn list(backend: &Backend, prefix: &Path) -> Result<Vec<ObjectMeta>, Stop> {
    let budget = Budget::default();
    block_on(persist(backend, &budget, false, &mut 0, async || {
        let listed = backend.store.list_with_delimiter(Some(prefix)).await;
        listed.map(|listed| listed.objects).map_err(|error| (Fault::Store(error), false))
    }))
}
