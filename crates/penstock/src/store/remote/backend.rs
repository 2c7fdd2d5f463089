//! How a store is reached: the `object_store` behind a bucket, set up from the environment.
//!
//! One for each bucket, kept for the process. Each provider's own module says which variables count and where
//! credentials come from; what they share is the transport, and that `object_store` itself never tries again.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use object_store::{ObjectStore, RetryConfig};

use super::address::{Address, Provider};
use super::credential_cache::Renewable;
use super::environment::Environment;
use super::retry::RetryPolicy;
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::{is_doubtful_setting, shown_setting};

/// Where credentials for a plain HTTP server are from.
pub(super) const OF_USER: &str = "the URL's user and password";
pub(super) const OF_QUERY: &str = "the URL's query";

/// A bucket that can be reached.
pub(super) struct Backend {
    pub(super) provider: Provider,
    pub(super) store: Arc<dyn ObjectStore>,
    /// Where credentials come from, where that is known from the start.
    credentials: String,
    keys: Option<Arc<dyn Renewable>>,
    /// S3: the region that requests are signed for.
    pub(super) region: Option<String>,
    /// What serves the bucket, whatever region or host name it is reached by: no two backends of one endpoint have
    /// different buckets of one name. Without secrets. Empty where the location says it.
    pub(super) endpoint: String,
    /// The hub: the repository's page.
    pub(super) page: Option<String>,
    pub(super) environment: Arc<Environment>,
    pub(super) policy: RetryPolicy,
}

/// What a provider's module makes.
pub(super) struct Made {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) credentials: String,
    pub(super) keys: Option<Arc<dyn Renewable>>,
    pub(super) region: Option<String>,
    pub(super) endpoint: String,
}

impl Backend {
    /// A backend of what a provider's module made.
    pub(super) fn assemble(
        provider: Provider,
        made: Made,
        environment: Arc<Environment>,
        policy: RetryPolicy,
    ) -> Self {
        let Made { store, credentials, keys, region, endpoint } = made;
        Self { provider, store, credentials, keys, region, endpoint, page: None, environment, policy }
    }

    /// The same, for a repository with a page.
    pub(super) fn with_page(self, page: String) -> Self {
        Self { page: Some(page), ..self }
    }

    /// Whether there may be other credentials than those in use.
    pub(super) fn can_renew(&self) -> bool {
        self.keys.is_some()
    }

    /// Has credentials fetched anew before the next request, unless those in use are later than `asked`: of many readers
    /// whose requests are refused together, one fetches for all.
    pub(super) fn renew(&self, asked: Instant) {
        if let Some(keys) = &self.keys {
            keys.forget(asked);
        }
    }

    /// Where the credentials come from, for errors.
    pub(super) fn credentials(&self) -> Cow<'_, str> {
        match self.keys.as_ref().and_then(|keys| keys.origin()) {
            Some(origin) => origin.into(),
            None => self.credentials.as_str().into(),
        }
    }
}

/// Requests are tried again by `retry`, which sees more of them.
pub(super) fn never_again() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

/// A setting that `object_store` refuses.
pub(super) fn refused(address: &Address, environment: &Environment, error: &object_store::Error) -> Error {
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let cause = environment.scrub(&innermost.to_string());
    Error::new(ErrorKind::Config, format!("{} cannot be set up: {cause}", address.provider.name()))
        .object(address.shown())
}

/// Refuses the URL of a server that can be read in more than one way: what a password has before an `@` is then taken for
/// a host or a path, and sent there. `what` is where it is from.
///
/// # Errors
/// `Config`, which does not show what may be of the password.
pub(super) fn check_endpoint(what: &str, url: &str) -> Result<()> {
    // Requests are made of what both take for a URL.
    match is_doubtful_setting(url) || url::Url::parse(url).is_err() || url.parse::<http::Uri>().is_err() {
        true => Err(Error::new(ErrorKind::Config, format!("{what} {:?} is not the URL of a server", shown_setting(url))).remedy(
            "Write a URL such as https://storage.example.com:9000; what is special in a user and a password is escaped (%2F \
             for /, %3F for ?, %23 for #, %40 for @)",
        )),
        false => Ok(()),
    }
}

/// A URL of a setting as part of [`Backend::endpoint`]: without secrets, and written in one way.
pub(super) fn normal(url: &str) -> String {
    let parsed = url::Url::parse(url).map_or_else(|_| url.to_owned(), String::from);
    shown_setting(&parsed).trim_end_matches('/').to_owned()
}
