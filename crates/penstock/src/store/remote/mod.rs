//! Object stores and HTTP servers: S3, Google Cloud Storage, Azure Blob Storage, and whatever answers to ranges.
//!
//! An object is opened with one request that brings its size, its version and its first bytes, so that the header of a
//! shard costs no second one. From then on every range is asked of that version, and what comes is copied once, from
//! the chunk it came in to where it belongs.
//!
//! * `address`: locations taken apart.
//! * `backend`: the store behind a bucket, set up by `s3` (with `aws`), `gcs` and `azure` from an [`Environment`].
//! * `transport`: the HTTP client; `witness`: what it saw; `runtime`: the process's threads and connections.
//! * `interrupt`: ending requests. `fetch`: one range, resumed where it stopped; `retry`: when to ask again; `failure`: what errors say.
//! * `object`: an open object.
//! * `listing`: what is under a prefix. `web`: finding a checkpoint on a server that cannot list.
//! * `hub`: repositories of the Hugging Face hub.
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
mod hub;
mod interrupt;
mod listing;
mod object;
mod retry;
mod runtime;
mod s3;
mod transport;
mod web;
mod witness;

use std::path::PathBuf;
use std::sync::Arc;

use object_store::path::Path;
use object_store::{GetOptions, ObjectMeta};

use super::{CachePolicy, Entry, Identity, LocalStore, Object, Store};
use crate::error::{Error, ErrorKind, Result};

use address::{Address, Provider};
use backend::Backend;
use fetch::{Fault, Stop, named, once, persist};
use hub::{Hub, is_hub};
use interrupt::Interrupt;
use object::RemoteObject;
use retry::Budget;

pub use environment::Environment;
pub use listing::{Found, Listing};
pub use retry::Patience;

/// Bytes of the request that opens an object: the header of nearly every shard is shorter, and on a fast network the
/// bytes cost less than another round trip.
const OPENING_BYTES: u64 = 512 << 10;

/// The store of `s3://`, `gs://`, `az://`, `abfss://`, `hf://`, `http://` and `https://` locations.
///
/// For as long as a store and its clones live, a branch of a repository on the hub is the commit that it was at first.
#[derive(Clone, Default)]
pub struct RemoteStore {
    environment: Option<Arc<Environment>>,
    patience: Patience,
    pins: hub::Pins,
    local: LocalStore,
    interrupt: Arc<Interrupt>,
}

impl RemoteStore {
    /// A store that is set up from `environment`, and waits as `patience` says.
    pub fn new(environment: Environment, patience: Patience) -> Self {
        Self { environment: Some(Arc::new(environment)), patience, ..Self::default() }
    }

    /// The same store, reading what a cache of this machine holds under `cache`.
    #[must_use]
    pub fn with_local_files(self, cache: CachePolicy) -> Self {
        Self { local: LocalStore::new(cache), ..self }
    }

    /// The same store, whose requests are stopped on their own.
    #[must_use]
    pub fn apart(&self) -> Self {
        Self { interrupt: Arc::default(), ..self.clone() }
    }

    /// Ends what this store and its clones are waiting for, with `Cancelled`, and lets nothing begin any more. Objects
    /// that are open have [`Object::interrupt`].
    pub fn interrupt(&self) {
        self.interrupt.now();
    }

    /// What is under a prefix; with `recursive` at any depth, else as a directory shows it.
    ///
    /// # Errors
    /// `NotFound` where nothing is under the prefix, and for a plain HTTP server, which cannot list; `Access`, `Storage`.
    pub fn find(&self, prefix: &str, recursive: bool) -> Result<Listing> {
        let mut listing = if is_hub(prefix) {
            self.hub(&self.environment()).list(prefix, recursive)?
        } else {
            let (address, backend, path) = self.reach(prefix)?;
            if address.provider == Provider::Web {
                return Err(web::cannot_list().object(address.shown()));
            }
            let (_, listed) = in_its_region(&address, backend, |backend| {
                listing::list(backend, &address, &path, recursive, &self.interrupt)
            });
            listed.map_err(|error| error.object(address.shown()))?
        };
        if listing.objects.is_empty() && listing.directories.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, "no object is under this prefix")
                .object(super::shown(prefix))
                .remedy("Check the prefix: it is compared letter by letter"));
        }
        listing.objects.sort_by(|a, b| a.path.cmp(&b.path));
        listing.directories.sort();
        Ok(listing)
    }

    /// Whether an object that was listed is most likely the version `opened`, which was open once.
    pub fn is_likely(listed: &Identity, opened: &Identity) -> bool {
        object::is_likely(listed, opened)
    }

    fn hub<'a>(&'a self, environment: &'a Arc<Environment>) -> Hub<'a> {
        Hub::new(environment, self.patience, &self.pins, self.local, &self.interrupt)
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
        if is_hub(location) {
            return self.hub(&self.environment()).open(location);
        }
        let (address, backend, path) = self.reach(location)?;
        if address.provider != Provider::Web && address.key.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, "the location names a bucket, not an object")
                .object(address.shown()));
        }
        let (backend, opened) =
            in_its_region(&address, backend, |backend| open(backend, &path, &self.interrupt));
        let (meta, head) = opened.map_err(|error| error.object(address.shown()))?;
        Ok(Arc::new(RemoteObject::new(address.shown(), backend, path, meta, head)))
    }

    /// Without a request: each range will be asked of that version.
    fn reopen(&self, location: &str, identity: &Identity) -> Result<Arc<dyn Object>> {
        if is_hub(location) {
            return self.hub(&self.environment()).reopen(location, identity);
        }
        let (address, backend, path) = self.reach(location)?;
        match object::version(&path, identity) {
            Some(meta) => Ok(Arc::new(RemoteObject::new(address.shown(), backend, path, meta, Vec::new()))),
            None => Err(failure::changed().object(address.shown())),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        if !is_hub(prefix) {
            let address = Address::parse(prefix)?;
            if address.provider == Provider::Web {
                return web::list(self, &address);
            }
        }
        let objects = self.find(prefix, false)?.objects;
        if objects.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, "no object is directly under this prefix")
                .object(super::shown(prefix))
                .remedy("Check the prefix: it is compared letter by letter"));
        }
        let mut entries: Vec<_> =
            objects.into_iter().map(|Found { location, bytes, .. }| Entry { location, bytes }).collect();
        entries.sort_by(|a, b| a.location.cmp(&b.location));
        Ok(entries)
    }

    fn file_of(&self, location: &str, identity: &Identity) -> Option<PathBuf> {
        is_hub(location).then(|| self.hub(&self.environment()).file_of(location, identity))?
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

/// What to tell of a stop that nothing can be done about.
fn told(stop: Stop) -> Error {
    match stop {
        Stop::Tell(error) => error,
        Stop::Region(region) => Error::new(ErrorKind::Storage, format!("the bucket is in region {region}"))
            .remedy(format!("Set AWS_REGION={region}")),
        Stop::Empty => failure::changed(),
    }
}

/// Does `work`; where the bucket turns out to be in another region, again there. Returns the backend that served.
fn in_its_region<T>(
    address: &Address,
    backend: Arc<Backend>,
    work: impl Fn(&Backend) -> Result<T, Stop>,
) -> (Arc<Backend>, Result<T>) {
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

/// What the object is, and its first bytes.
fn open(backend: &Backend, path: &Path, interrupt: &Interrupt) -> Result<(ObjectMeta, Vec<u8>), Stop> {
    let budget = Budget::default();
    let opened = interrupt.block_on(persist(backend, &budget, false, &mut 0, async || {
        // Anew for every attempt: until it is complete, no version is pinned.
        let (mut head, mut at) = (Vec::new(), 0);
        let put = |_, bytes: &[u8]| head.extend_from_slice(bytes);
        let meta = once(backend, path, 0..OPENING_BYTES, None, &mut at, put).await;
        meta.map(|meta| (meta, head)).map_err(|fault| (fault, false))
    }));
    match opened {
        // No range of an empty object can be had.
        Err(Stop::Empty) => {
            inspect(backend, path, interrupt).map(|meta| (meta, Vec::new())).map_err(Stop::Tell)
        }
        opened => opened,
    }
}

/// What the object is, without any of its bytes.
fn inspect(backend: &Backend, path: &Path, interrupt: &Interrupt) -> Result<ObjectMeta> {
    let budget = Budget::default();
    let answer = interrupt.block_on(persist(backend, &budget, false, &mut 0, async || {
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
