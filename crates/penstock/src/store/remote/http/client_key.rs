//! What tells one HTTP client from another: certificates, proxies, time limits, redirects.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;

use super::proxies::Proxies;
use super::tls::{self, CaBundle};
use crate::error::Result;
use crate::store::remote::request::retry::RetryPolicy;
use crate::store::remote::settings::address::Provider;
use crate::store::remote::settings::environment::Environment;

/// Credential servers of this machine's network answer at once or are not there.
const METADATA_CONNECT: Duration = Duration::from_secs(1);
/// A token may take them seconds, where they ask others for it.
const METADATA_IDLE: Duration = Duration::from_secs(10);
const METADATA_HOSTS: [&str; 5] =
    ["169.254.169.254", "169.254.170.2", "169.254.170.23", "metadata.google.internal", "metadata"];

/// Headers that only requests to credential servers of this machine's network have: Google's, and Azure's two.
const METADATA_HEADERS: [&str; 3] = ["metadata-flavor", "metadata", "x-identity-header"];

/// Whether a request is one to the service that gives this machine's credentials, wherever variables say that it is.
pub(crate) fn is_of_metadata(host: &str, headers: &HeaderMap) -> bool {
    METADATA_HOSTS.contains(&host) || METADATA_HEADERS.iter().any(|name| headers.contains_key(*name))
}

/// What tells one client from another.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ClientKey {
    pub(crate) policy: RetryPolicy,
    /// Certificates to trust instead of the system's.
    pub(crate) bundle: Option<CaBundle>,
    pub(crate) proxies: Arc<Proxies>,
    /// Whether answers may send elsewhere. Signed requests mean one host.
    pub(crate) follow: bool,
}

impl ClientKey {
    /// The key of clients for a provider, as `environment` wants them.
    ///
    /// # Errors
    /// `Config` for a proxy that is no URL.
    pub(crate) fn of(
        environment: &Environment,
        provider: Provider,
        policy: RetryPolicy,
        follow: bool,
    ) -> Result<Self> {
        let proxies = Arc::new(Proxies::of(environment)?);
        Ok(Self { policy, bundle: tls::bundle(environment, provider), proxies, follow })
    }

    /// The key of clients for metadata services, if `is_metadata`: of servers that answer at once or are not there, no
    /// connection is waited for long, and no answer as long as a store's.
    pub(crate) fn for_metadata(&self, is_metadata: bool) -> Self {
        let mut key = self.clone();
        if is_metadata {
            key.policy.connect = METADATA_CONNECT.min(key.policy.connect);
            key.policy.idle = METADATA_IDLE.min(key.policy.idle);
        }
        key
    }
}
