//! Backends: made for a bucket when it is first asked for, and kept for the process.
//!
//! Each provider's own module says which variables count and where credentials come from.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::backend::{Backend, Made, OF_QUERY, OF_USER, never_again, refused};
use super::google::FileVersion;
use super::{azure, gcs, s3};
use crate::error::Result;
use crate::memory::PerProcess;
use crate::store::remote::http::client_key::ClientKey;
use crate::store::remote::http::context::LoadContext;
use crate::store::remote::http::transport::Connector;
use crate::store::remote::request::retry::RetryPolicy;
use crate::store::remote::settings::address::{Address, Provider};
use crate::store::remote::settings::environment::Environment;

/// The most buckets that are kept set up: each with every environment, and tokens among storage options change.
const MOST_BACKENDS: usize = 256;

type Backends = HashMap<BackendKey, Arc<Backend>>;

static BACKENDS: PerProcess<Mutex<Backends>> = PerProcess::new();

/// What tells one backend from another.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct BackendKey {
    provider: Provider,
    bucket: String,
    account: Option<(String, String)>,
    environment: Arc<Environment>,
    /// Whoever signs in again is someone else.
    login: Option<FileVersion>,
    policy: RetryPolicy,
}

/// The backend for `address`; there is one for each plain HTTP object, since its store *is* its URL.
pub(crate) fn backend_of(
    address: &Address,
    environment: &Arc<Environment>,
    policy: RetryPolicy,
    context: &LoadContext,
) -> Result<Arc<Backend>> {
    let make = || make(address, environment, policy, None, context).map(Arc::new);
    if address.provider == Provider::Web {
        return make();
    }
    let key = key(address, environment, policy);
    let there = backends().get(&key).cloned();
    if let Some(backend) = there {
        return Ok(backend);
    }
    // Making one may read files and wait for servers, so the lock is not held meanwhile.
    let made = make()?;
    let mut backends = backends();
    if backends.len() >= MOST_BACKENDS {
        backends.clear();
    }
    Ok(Arc::clone(backends.entry(key).or_insert(made)))
}

/// As [`backend_of`] gave `backend`, but with requests signed for `region`, from now on.
pub(crate) fn in_region(
    backend: &Backend,
    address: &Address,
    region: String,
    context: &LoadContext,
) -> Result<Arc<Backend>> {
    let (environment, policy) = (&backend.environment, backend.policy);
    let made = Arc::new(make(address, environment, policy, Some(region), context)?);
    backends().insert(key(address, environment, policy), Arc::clone(&made));
    Ok(made)
}

fn backends() -> MutexGuard<'static, Backends> {
    // Nothing is left half done under this lock.
    BACKENDS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

fn make(
    address: &Address,
    environment: &Arc<Environment>,
    policy: RetryPolicy,
    region: Option<String>,
    context: &LoadContext,
) -> Result<Backend> {
    let client = ClientKey::of(environment, address.provider, policy, address.provider == Provider::Web)?;
    // A setting that cannot be is met here rather than by every request.
    client.tls()?;
    environment.check_headers(address.provider).map_err(|error| error.object(address.shown()))?;
    let connector = Connector(client.clone());
    let made = match address.provider {
        Provider::S3 => s3::make(address, environment, client, region, context)?,
        Provider::Gcs => gcs::make(address, environment, connector)?,
        Provider::Azure => azure::make(address, environment, connector)?,
        Provider::Web | Provider::Hub => web(address, connector)?,
    };
    Ok(Backend::assemble(address.provider, made, Arc::clone(environment), policy))
}

fn key(address: &Address, environment: &Arc<Environment>, policy: RetryPolicy) -> BackendKey {
    let login = (address.provider == Provider::Gcs).then(|| gcs::login_version(environment)).flatten();
    let environment = match address.provider {
        Provider::Gcs => Arc::clone(environment),
        // Of no program that is run for them, so a change of PATH does not cost new connections.
        _ => Arc::new(environment.without_programs()),
    };
    BackendKey {
        provider: address.provider,
        bucket: address.bucket.clone(),
        account: address.account.clone(),
        environment,
        login,
        policy,
    }
}

fn web(address: &Address, connector: Connector) -> Result<Made> {
    let store = object_store::http::HttpBuilder::new()
        .with_url(address.url())
        .with_retry(never_again())
        .with_http_connector(connector)
        .build()
        .map_err(|error| refused(address, &Environment::default(), &error))?;
    let credentials = match (address.has_user(), address.query.is_empty()) {
        (true, _) => OF_USER,
        (false, false) => OF_QUERY,
        (false, true) => "none",
    };
    let (uploads, anonymous, keys, region, endpoint) = (None, None, None, None, String::new());
    Ok(Made {
        store: Arc::new(store),
        uploads,
        credentials: credentials.into(),
        anonymous,
        keys,
        region,
        endpoint,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_programs_tells_backends_apart_only_where_programs_are_run() {
        let is_same = |location: &str, variable: &str| {
            let address = Address::parse(location).unwrap();
            let [one, other] = ["/a", "/b"].map(|value| {
                key(&address, &Arc::new(Environment::of([(variable, value)])), RetryPolicy::default())
            });
            one == other
        };
        for variable in ["PATH", "PYTHONPATH", "TMPDIR"] {
            assert!(is_same("s3://b/k", variable) && is_same("az://c/k", variable), "{variable}");
            assert!(!is_same("gs://b/k", variable), "{variable}");
        }
        assert!(!is_same("s3://b/k", "HOME"));
    }
}
