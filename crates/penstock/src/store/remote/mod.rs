//! Object stores and HTTP servers: S3, Google Cloud Storage, Azure Blob Storage, and whatever answers to ranges.
//!
//! An object is opened with one request that brings its size, its version and its first bytes, so that the header of a
//! shard costs no second one. From then on every range is asked of that version, and what comes is copied once, from
//! the chunk it came in to where it belongs.
//!
//! Rooms, each of which may use those above it:
//!
//! * `settings`: what decides how a location is reached. `request`: when to ask again, and when twice.
//! * `http`: the client. `provider`: the stores behind buckets, and credentials.
//! * `objects`: opening, reading, listing, and what errors say.
//! * `sink`: a prefix that is saved to.
//! * `hub`: repositories of the Hugging Face hub. `web`: finding a checkpoint on a server that cannot list.
//!
//! Secrets come in with the environment and with locations. They go to the servers they are for, and nowhere else:
//! types that hold them have no `Debug` form, and errors are scrubbed of them.

mod http;
mod hub;
mod objects;
mod provider;
mod request;
mod settings;
mod sink;
mod web;

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

use object_store::path::Path;

use super::sink::Sink;
use super::{CachePolicy, Entry, Identity, LocalStore, Object, Store};
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::{fingerprint, is_hub};

use http::context::LoadContext;
use hub::Hub;
use objects::object::RemoteObject;
use objects::opening::{in_its_region, open};
use objects::{failure, listing, neighbours, object};
use provider::backend::Backend;
use provider::connect::backend_of;
use settings::address::{Address, Provider};

pub use objects::listing::{ListedObject, Listing};
pub use provider::google::set_google_token_command;
pub use request::retry::RetryPolicy;
pub use settings::environment::Environment;

/// The store of `s3://`, `gs://`, `az://`, `abfss://`, `hf://`, `http://` and `https://` locations.
///
/// For as long as a store and its clones live, a branch of a repository on the hub is the commit that it was at first.
#[derive(Clone)]
pub struct RemoteStore {
    environment: Arc<Environment>,
    policy: RetryPolicy,
    context: Arc<LoadContext>,
    pins: hub::Pins,
    local: LocalStore,
}

/// Set up from the variables of the process as they are now; see [`Environment::of_process`].
impl Default for RemoteStore {
    fn default() -> Self {
        Self::new(Environment::of_process(), RetryPolicy::default())
    }
}

impl RemoteStore {
    /// A store that is set up from `environment`, and waits as `policy` says.
    ///
    /// All that is opened, opened again and listed with it or its clones uses this environment, whatever the process's
    /// is by then.
    pub fn new(environment: Environment, policy: RetryPolicy) -> Self {
        Self {
            environment: Arc::new(environment),
            policy,
            context: Arc::default(),
            pins: hub::Pins::default(),
            local: LocalStore::default(),
        }
    }

    /// The same store, reading what a cache of this machine holds under `cache`.
    #[must_use]
    pub fn with_local_files(self, cache: CachePolicy) -> Self {
        Self { local: LocalStore::new(cache), ..self }
    }

    /// What is under a prefix; with `recursive` at any depth, else as a directory shows it.
    ///
    /// # Errors
    /// `NotFound` where nothing is under the prefix, and for a plain HTTP server, which cannot list; `Access`, `Storage`.
    pub fn find(&self, prefix: &str, recursive: bool) -> Result<Listing> {
        self.find_at(prefix, parsed(prefix)?.as_ref(), recursive)
    }

    /// The same of a prefix that is taken apart already.
    fn find_at(&self, prefix: &str, address: Option<&Address>, recursive: bool) -> Result<Listing> {
        let mut listing = if let Some(address) = address {
            let (backend, path) = self.connect(address)?;
            if address.provider == Provider::Web {
                return Err(web::cannot_list().object(address.shown()));
            }
            let context = &self.context;
            let (_, listed) = in_its_region(address, backend, context, |backend| {
                listing::list(backend, address, &path, recursive, context)
            });
            listed.map_err(|error| error.object(address.shown()))?
        } else {
            self.hub().list(prefix, recursive)?
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

    /// What to say of `location`, at which nothing was found: what is most like it of all that lies beside it. None where
    /// that cannot be told soon, and for what is no key of a bucket and no file on the hub. One request, without retries.
    pub fn remedy_for_missing(&self, location: &str) -> Option<String> {
        let (parent, name) = location.trim_end_matches('/').rsplit_once('/')?;
        let directory = format!("{parent}/");
        let names = if is_hub(location) {
            let listing = self.hub().list(&directory, false).ok()?;
            let below = listing.directories.into_iter().map(|name| format!("{name}/"));
            listing.objects.into_iter().map(|object| object.path).chain(below).collect()
        } else {
            let address =
                Address::parse(&directory).ok().filter(|address| address.provider != Provider::Web)?;
            let (backend, path) = self.connect(&address).ok()?;
            neighbours::names(&backend, &path, &self.context)
        };
        neighbours::remedy(&super::shown(&directory), name, &names)
    }

    /// Whether an object that was listed is most likely the version `opened`, which was open once.
    pub fn is_likely(listed: &Identity, opened: &Identity) -> bool {
        object::is_likely(listed, opened)
    }

    /// Bytes of the version that an identity stands for, if something names these bytes and no others.
    ///
    /// # Errors
    /// What is missing.
    pub(super) fn bytes_of_named(identity: &Identity) -> Result<u64, Cow<'static, str>> {
        object::bytes_of_named(identity)
    }

    /// What a location names whatever its version: the endpoint and the account that serve it, and the location without
    /// secrets and without the query of an HTTP URL. On the hub also without its revision, as an unchanged file is the
    /// same object in the next commit. Of a key it is all of it: what is there under that name is not there under
    /// another, so no part of it is a signature.
    ///
    /// # Errors
    /// As for [`Store::open`], where it is no location.
    pub(super) fn resource(&self, location: &str) -> Result<String> {
        if let Some(file) = Hub::of_any_revision(location) {
            return Ok(format!("{}\n{file}", self.hub().endpoint()));
        }
        let plain = match super::is_key(location) {
            true => location.to_owned(),
            false => {
                let resource = super::shown(location).into_owned();
                let url = url::Url::parse(location).ok();
                // A server may answer each user otherwise, and passwords change.
                match url.as_ref().map(url::Url::username).filter(|user| !user.is_empty()) {
                    Some(user) => format!("{resource} of {}", fingerprint(user)),
                    None => resource,
                }
            }
        };
        let address = Address::parse(location)?;
        if address.provider == Provider::Web {
            return Ok(plain);
        }
        let (backend, _) = self.connect(&address)?;
        Ok(format!("{}\n{plain}", backend.endpoint))
    }

    fn hub(&self) -> Hub<'_> {
        Hub::new(&self.environment, self.policy, &self.pins, self.local, &self.context)
    }

    /// The prefix at `location`, taken for a save; see [`Sink`].
    ///
    /// # Errors
    /// `Exists` where the prefix holds something, or another save is writing there; `Config` for what cannot be written to;
    /// `Access`, `NotFound`, `Storage`.
    pub fn sink(&self, location: &str) -> Result<Arc<dyn Sink>> {
        Ok(Arc::new(sink::RemoteSink::create(self, location)?))
    }

    /// The same store for another load, whose requests share nothing with those of this one but connections.
    #[must_use]
    pub fn for_another_load(&self) -> Self {
        Self { context: Arc::new(LoadContext::of_load()), ..self.clone() }
    }

    fn connect(&self, address: &Address) -> Result<(Arc<Backend>, Path)> {
        hub::refuse_page(address)?;
        let path = path(address)?;
        let backend = backend_of(address, &self.environment, self.policy, &self.context)
            .map_err(|error| error.object(address.shown()))?;
        Ok((backend, path))
    }
}

impl std::fmt::Debug for RemoteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteStore").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl Store for RemoteStore {
    fn open(&self, location: &str) -> Result<Arc<dyn Object>> {
        if is_hub(location) {
            return self.hub().open(location);
        }
        let address = Address::parse(location)?;
        let (backend, path) = self.connect(&address)?;
        if address.provider != Provider::Web && address.key.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, "the location names a bucket, not an object")
                .object(address.shown()));
        }
        let context = &self.context;
        let (backend, opened) =
            in_its_region(&address, backend, context, |backend| open(backend, &path, context));
        let (meta, head) = opened.map_err(|error| match address.key.contains("?versionId=") {
            // `?` is part of a key, and what is shown of a location ends before it.
            true if error.kind() == ErrorKind::NotFound => Error::new(
                ErrorKind::NotFound,
                format!("{}: `?versionId=` was taken as part of the key", error.cause()),
            )
            .object(address.shown())
            .remedy("Versions of objects cannot be asked for: give the key alone"),
            _ => error.object(address.shown()),
        })?;
        let context = Arc::clone(context);
        Ok(Arc::new(RemoteObject { location: address.shown(), backend, path, meta, head, context }))
    }

    /// Without a request: each range will be asked of that version.
    fn reopen(&self, location: &str, identity: &Identity) -> Result<Arc<dyn Object>> {
        if is_hub(location) {
            return self.hub().reopen(location, identity);
        }
        let address = Address::parse(location)?;
        let (backend, path) = self.connect(&address)?;
        let meta =
            object::version(&path, identity).ok_or_else(|| failure::changed().object(address.shown()))?;
        let (head, context) = (Vec::new(), Arc::clone(&self.context));
        Ok(Arc::new(RemoteObject { location: address.shown(), backend, path, meta, head, context }))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        let address = parsed(prefix)?;
        if let Some(address) = address.as_ref().filter(|address| address.provider == Provider::Web) {
            hub::refuse_page(address)?;
            return web::list(self, address);
        }
        let Listing { objects, directories } = self.find_at(prefix, address.as_ref(), false)?;
        if objects.is_empty() {
            let below: Vec<_> = directories.iter().map(|directory| format!("{directory}/")).collect();
            let remedy = holds("It", &below).unwrap_or_else(|| "Check the prefix".to_owned());
            return Err(Error::new(ErrorKind::NotFound, "no object is directly under this prefix")
                .object(super::shown(prefix))
                .remedy(remedy));
        }
        let mut entries: Vec<_> = objects
            .into_iter()
            .map(|ListedObject { location, bytes, .. }| Entry { location, bytes })
            .collect();
        entries.sort_by(|a, b| a.location.cmp(&b.location));
        Ok(entries)
    }

    fn directories(&self, prefix: &str) -> Vec<String> {
        self.find(prefix, false).map(|listing| listing.directories).unwrap_or_default()
    }

    fn file_of(&self, location: &str, identity: &Identity) -> Option<PathBuf> {
        is_hub(location).then(|| self.hub().file_of(location, identity))?
    }

    fn for_load(&self) -> Option<Arc<dyn Store>> {
        Some(Arc::new(self.for_another_load()))
    }

    fn interrupt(&self) {
        self.context.interrupt();
    }
}

/// A location taken apart; none of the hub's, which `hub` takes apart.
fn parsed(location: &str) -> Result<Option<Address>> {
    if is_hub(location) { Ok(None) } else { Address::parse(location).map(Some) }
}

/// What is in a place, for people: a few names of it.
fn holds(place: &str, names: &[String]) -> Option<String> {
    const MOST: usize = 8;
    let more = if names.len() > MOST { ", …" } else { "" };
    let shown: Vec<_> = names.iter().take(MOST).map(String::as_str).collect();
    (!names.is_empty()).then(|| format!("{place} holds {}{more}", shown.join(", ")))
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
