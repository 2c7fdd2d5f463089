//! The Hugging Face hub: `hf://org/name[@revision][/path]`.
//!
//! A branch moves while a checkpoint is being opened and loaded, a commit does not. So the first use of a revision asks
//! which commit it is, and from then on that commit is what this store means by it: listings name it, files are asked
//! for at it, and a load that begins an hour later is of the same files. A file that the cache of huggingface_hub holds
//! at that commit is read from there, like any local file; the cache is never written to.
//!
//! * `address`: locations taken apart. `settings`: variables and files that count.
//! * `local`: the cache. `api`: commits and listings.
//! * `redirects`: where requests are sent on to, and the token that is not. `service`: a file as `object_store` asks for it.
//! * `web_url`: addresses of its pages, which are refused. What its refusals mean: `objects/hub_errors.rs`.

mod address;
mod api;
mod local;
mod redirects;
mod service;
mod settings;
mod web_url;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use object_store::path::Path;
use url::Url;

use crate::error::{Error, ErrorKind, Result};
use crate::store::location::is_doubtful_setting;
use crate::store::remote::http::client_key::ClientKey;
use crate::store::remote::http::context::LoadContext;
use crate::store::remote::objects::listing::Listing;
use crate::store::remote::objects::object::{self, RemoteObject};
use crate::store::remote::objects::opening::{open, told};
use crate::store::remote::provider::backend::{Backend, Made, never_again};
use crate::store::remote::request::retry::RetryPolicy;
use crate::store::remote::settings::address::Provider;
use crate::store::remote::settings::environment::Environment;
use crate::store::{Identity, LocalStore, Object, Store, location_of, shown};

use address::{HubAddress, RepositoryKind};
use api::Api;
use local::CachedRepository;
use redirects::Sender;
use service::FileConnector;
use settings::Settings;

pub(super) use web_url::refuse_page;

/// A repository's kind and name, and a revision of it.
type Named = (RepositoryKind, String, String);

/// The commits that revisions were found to be. Shared by the copies of a store: its checkpoint sees one commit.
#[derive(Clone, Default)]
pub(super) struct Pins(Arc<Mutex<HashMap<Named, String>>>);

impl Pins {
    /// The commit of the revision, found by `find` the first time. Two threads that ask at once may both find it; the
    /// first to come back decides.
    fn get(&self, address: &HubAddress, find: impl FnOnce() -> Result<String>) -> Result<String> {
        let key = (address.kind, address.repository.clone(), address.revision.clone());
        let known = |pins: &Self| pins.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(commit) = known(self) {
            return Ok(commit);
        }
        let found = find()?;
        let mut pins = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(pins.entry(key).or_insert(found).clone())
    }
}

/// The hub, for one operation.
pub(super) struct Hub<'a> {
    environment: &'a Arc<Environment>,
    policy: RetryPolicy,
    pins: &'a Pins,
    local: LocalStore,
    context: &'a Arc<LoadContext>,
    settings: Settings,
}

impl<'a> Hub<'a> {
    pub(super) fn new(
        environment: &'a Arc<Environment>,
        policy: RetryPolicy,
        pins: &'a Pins,
        local: LocalStore,
        context: &'a Arc<LoadContext>,
    ) -> Self {
        Self { environment, policy, pins, local, context, settings: Settings::of(environment) }
    }

    /// A location without its revision; `None` where it is none of the hub's.
    pub(super) fn of_any_revision(location: &str) -> Option<String> {
        Some(HubAddress::parse(location).ok()?.of_any_revision())
    }

    /// Where the hub is, without secrets.
    pub(super) fn endpoint(&self) -> &str {
        &self.settings.endpoint
    }

    /// Opens a file at the commit that its revision is.
    pub(super) fn open(&self, location: &str) -> Result<Arc<dyn Object>> {
        let address = HubAddress::parse(location)?;
        self.open_address(&address).map_err(|error| error.object(shown(location)))
    }

    fn open_address(&self, address: &HubAddress) -> Result<Arc<dyn Object>> {
        if address.path.is_empty() {
            let cause = "the location names a repository, not a file";
            let remedy = format!("Name a file of it: hf://{}/model.safetensors", address.repository);
            return Err(Error::new(ErrorKind::NotFound, cause).remedy(remedy));
        }
        let commit = self.commit(address)?;
        if let Some(object) = self.cached(address, &commit)? {
            return Ok(object);
        }
        if self.settings.offline {
            return Err(self.not_cached(&format!("the file at commit {commit}")));
        }
        let backend = self.file(address, &commit)?;
        let (meta, head) = open(&backend, &Path::default(), self.context).map_err(told)?;
        let location = address.pinned(&commit, &address.path);
        let (path, context) = (Path::default(), Arc::clone(self.context));
        Ok(Arc::new(RemoteObject { location, backend, path, meta, head, context }))
    }

    /// Opens a file if it is still the version with that identity; without a request.
    pub(super) fn reopen(&self, location: &str, identity: &Identity) -> Result<Arc<dyn Object>> {
        let address = HubAddress::parse(location)?;
        let opened = || {
            let commit = self.commit(&address)?;
            if let Some(object) = self
                .cached(&address, &commit)?
                .filter(|object| local::is_likely(&object.identity(), identity))
            {
                return Ok(object);
            }
            let path = Path::default();
            let Some(meta) = object::version(&path, identity).filter(|_| !self.settings.offline) else {
                return Err(Error::new(
                    ErrorKind::Changed,
                    "the file is no longer in the Hugging Face cache as its header was read from there",
                )
                .remedy("Open the checkpoint again"));
            };
            let backend = self.file(&address, &commit)?;
            let location = address.pinned(&commit, &address.path);
            let (head, context) = (Vec::new(), Arc::clone(self.context));
            let object: Arc<dyn Object> =
                Arc::new(RemoteObject { location, backend, path, meta, head, context });
            Ok(object)
        };
        opened().map_err(|error: Error| error.object(shown(location)))
    }

    /// The file of the cache that is the version with that identity, if there is one.
    pub(super) fn file_of(&self, location: &str, identity: &Identity) -> Option<PathBuf> {
        let address = HubAddress::parse(location).ok()?;
        let commit = self.commit(&address).ok()?;
        let file = CachedRepository::of(&self.settings, &address)?.file(&commit, &address.path)?;
        let opened = self.local.open(&location_of(&file)).ok()?;
        local::is_likely(&local::identity(&file, &*opened), identity).then_some(file)
    }

    /// What is in a repository or a directory of it.
    pub(super) fn list(&self, location: &str, recursive: bool) -> Result<Listing> {
        let address = HubAddress::parse(location)?;
        let listed = || {
            let commit = self.commit(&address)?;
            let cached = || {
                let cached = CachedRepository::of(&self.settings, &address);
                let listing =
                    cached.map(|cached| cached.list(&address, &commit, recursive)).unwrap_or_default();
                Some(listing).filter(|of| !of.objects.is_empty() || !of.directories.is_empty())
            };
            if self.settings.offline {
                return cached()
                    .ok_or_else(|| self.not_cached(&format!("any file of commit {commit} there")));
            }
            match self.ask(&address, |api| api.tree(&address, &commit, recursive)) {
                Err(error) if error.kind() == ErrorKind::Storage => cached().ok_or(error).inspect(|_| {
                    tracing::warn!(repository = %address.repository, %commit, "the hub cannot be reached: listing the files of its cache");
                }),
                asked => asked,
            }
        };
        listed().map_err(|error: Error| error.object(shown(location)))
    }

    /// The commit that the revision is, now and for as long as this store lives.
    fn commit(&self, address: &HubAddress) -> Result<String> {
        if let Some(commit) = address.commit() {
            return Ok(commit.to_owned());
        }
        self.pins.get(address, || {
            let cached = || CachedRepository::of(&self.settings, address)?.commit(&address.revision);
            if self.settings.offline {
                return cached().ok_or_else(|| self.not_cached(&format!("revision {:?}", address.revision)));
            }
            match self.ask(address, |api| api.commit(address)) {
                // The hub cannot be reached: what it said last has to do.
                Err(error) if error.kind() == ErrorKind::Storage => cached().ok_or(error).inspect(|commit| {
                    tracing::warn!(repository = %address.repository, %commit, "the hub cannot be reached: using its last known commit");
                }),
                asked => asked,
            }
        })
    }

    fn cached(&self, address: &HubAddress, commit: &str) -> Result<Option<Arc<dyn Object>>> {
        let cached = CachedRepository::of(&self.settings, address);
        let Some(file) = cached.and_then(|cached| cached.file(commit, &address.path)) else {
            return Ok(None);
        };
        let identity = |opened: &dyn Object| local::identity(&file, opened);
        self.local.open_copy(&file, address.pinned(commit, &address.path), identity).map(Some)
    }

    fn ask<T>(&self, address: &HubAddress, ask: impl FnOnce(&Api<'_>) -> Result<T>) -> Result<T> {
        let sender = self.sender()?;
        let backend = self.backend(address, &self.settings.endpoint, &sender)?;
        ask(&Api {
            backend: &backend,
            sender: &sender,
            endpoint: &self.settings.endpoint,
            context: self.context,
        })
    }

    /// The backend of one file.
    fn file(&self, address: &HubAddress, commit: &str) -> Result<Arc<Backend>> {
        let url = address.file_url(&self.settings.endpoint, commit);
        self.backend(address, &url, &self.sender()?)
    }

    fn sender(&self) -> Result<Sender> {
        let Settings { endpoint, token, .. } = &self.settings;
        // A user and a password are none of the hub's: requests have room for the token only.
        let given = self.environment.get(&["HF_ENDPOINT"]).unwrap_or_default();
        let is_plain = !given.contains('@') && !is_doubtful_setting(endpoint);
        let url: Url = endpoint.parse().ok().filter(|_| is_plain).ok_or_else(|| {
            Error::new(ErrorKind::Config, format!("HF_ENDPOINT={endpoint} is not the URL of a hub"))
                .remedy("Write HF_ENDPOINT=https://host, or unset it; who asks is said by HF_TOKEN alone")
        })?;
        let client = ClientKey::of(self.environment, Provider::Hub, self.policy, false)?;
        client.tls()?;
        Ok(Sender::new(client, &url, token.as_deref()))
    }

    fn backend(&self, address: &HubAddress, url: &str, sender: &Sender) -> Result<Arc<Backend>> {
        let store = object_store::http::HttpBuilder::new()
            .with_url(url)
            .with_retry(never_again())
            .with_http_connector(FileConnector::new(sender.clone()))
            .build()
            .map_err(|_| Error::new(ErrorKind::Config, "HF_ENDPOINT is no URL"))?;
        let made = Made {
            uploads: None,
            store: Arc::new(store),
            credentials: self.settings.token_from.clone(),
            anonymous: None,
            keys: None,
            region: None,
            endpoint: self.settings.endpoint.clone(),
        };
        let environment = Arc::new(self.settings.with_token(self.environment));
        let page = address.page(&self.settings.endpoint);
        Ok(Arc::new(Backend::assemble(Provider::Hub, made, environment, self.policy).with_page(page)))
    }

    fn not_cached(&self, what: &str) -> Error {
        let place = self.settings.cache.as_ref().map(|cache| cache.display().to_string()).unwrap_or_default();
        Error::new(
            ErrorKind::NotFound,
            format!("HF_HUB_OFFLINE is set, and the Hugging Face cache ({place}) does not hold {what}"),
        )
        .remedy("Unset HF_HUB_OFFLINE, or fetch the repository with `hf download` where there is a network")
    }
}
