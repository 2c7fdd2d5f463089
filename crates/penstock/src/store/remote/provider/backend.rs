//! How a store is reached: the `object_store` behind a bucket, set up from the environment.
//!
//! One for each bucket, kept for the process. Each provider's own module says which variables count and where
//! credentials come from; what they share is the transport, and that `object_store` itself never tries again.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use object_store::multipart::MultipartStore;
use object_store::{ObjectStore, RetryConfig};

use super::credential_cache::Renewable;
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::{is_doubtful_setting, shown_setting};
use crate::store::remote::request::retry::RetryPolicy;
use crate::store::remote::settings::address::{Address, Provider};
use crate::store::remote::settings::environment::Environment;

/// Where credentials for a plain HTTP server are from.
pub(crate) const OF_USER: &str = "the URL's user and password";
pub(crate) const OF_QUERY: &str = "the URL's query";

/// A bucket that can be reached.
pub(crate) struct Backend {
    pub(crate) provider: Provider,
    pub(crate) store: Arc<dyn ObjectStore>,
    /// The same store for uploads in parts, where it takes any.
    pub(crate) uploads: Option<Arc<dyn MultipartStore>>,
    /// Where credentials come from, where that is known from the start.
    credentials: String,
    /// How to give credentials after all, where none are used because that was asked for.
    pub(crate) anonymous: Option<String>,
    keys: Option<Arc<dyn Renewable>>,
    /// S3: the region that requests are signed for.
    pub(crate) region: Option<String>,
    /// What serves the bucket, whatever region or host name it is reached by: no two backends of one endpoint have
    /// different buckets of one name. Without secrets. Empty where the location says it.
    pub(crate) endpoint: String,
    /// The hub: the repository's page.
    pub(crate) page: Option<String>,
    pub(crate) environment: Arc<Environment>,
    pub(crate) policy: RetryPolicy,
}

/// What a provider's module makes.
pub(crate) struct Made {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) uploads: Option<Arc<dyn MultipartStore>>,
    pub(crate) credentials: String,
    pub(crate) anonymous: Option<String>,
    pub(crate) keys: Option<Arc<dyn Renewable>>,
    pub(crate) region: Option<String>,
    pub(crate) endpoint: String,
}

impl Backend {
    /// A backend of what a provider's module made.
    pub(crate) fn assemble(
        provider: Provider,
        made: Made,
        environment: Arc<Environment>,
        policy: RetryPolicy,
    ) -> Self {
        let Made { store, uploads, credentials, anonymous, keys, region, endpoint } = made;
        let page = None;
        Self {
            provider,
            store,
            uploads,
            credentials,
            anonymous,
            keys,
            region,
            endpoint,
            page,
            environment,
            policy,
        }
    }

    /// The same, for a repository with a page.
    pub(crate) fn with_page(self, page: String) -> Self {
        Self { page: Some(page), ..self }
    }

    /// Whether there may be other credentials than those in use.
    pub(crate) fn can_renew(&self) -> bool {
        self.keys.is_some()
    }

    /// Has credentials fetched anew before the next request, unless those in use are later than `asked`: of many readers
    /// whose requests are refused together, one fetches for all.
    pub(crate) fn renew(&self, asked: Instant) {
        if let Some(keys) = &self.keys {
            keys.forget(asked);
        }
    }

    /// Where the credentials come from, for errors.
    pub(crate) fn credentials(&self) -> Cow<'_, str> {
        match self.keys.as_ref().and_then(|keys| keys.origin()) {
            Some(origin) => origin.into(),
            None => self.credentials.as_str().into(),
        }
    }
}

/// Requests are tried again by `retry`, which sees more of them.
pub(crate) fn never_again() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

/// A setting that `object_store` refuses.
pub(crate) fn refused(address: &Address, environment: &Environment, error: &object_store::Error) -> Error {
    let cause = environment.scrub(&innermost(error));
    Error::new(ErrorKind::Config, format!("{} cannot be set up: {cause}", address.provider.name()))
        .object(address.shown())
}

/// The first cause of an error.
pub(crate) fn innermost(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

/// Refuses the URL of a server that can be read in more than one way: what a password has before an `@` is then taken for
/// a host or a path, and sent there. `what` is where it is from.
///
/// # Errors
/// `Config`, which does not show what may be of the password.
pub(crate) fn check_endpoint(what: &str, url: &str) -> Result<()> {
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
pub(crate) fn normal(url: &str) -> String {
    let parsed = url::Url::parse(url).map_or_else(|_| url.to_owned(), String::from);
    shown_setting(&parsed).trim_end_matches('/').to_owned()
}
