//! Google Cloud Storage.
//!
//! Credentials are Google's application default ones: `GOOGLE_APPLICATION_CREDENTIALS`, what `gcloud auth
//! application-default login` wrote, or the machine's service account; `GOOGLE_SERVICE_ACCOUNT` and
//! `GOOGLE_SERVICE_ACCOUNT_KEY` come before them. Federated identities, workforce logins and service accounts that are
//! acted as are `google`'s business, the others `object_store`'s; `CLOUDSDK_CONFIG` says where gcloud keeps its files.
//! `GOOGLE_SKIP_SIGNATURE=true` asks for public objects without any. `STORAGE_EMULATOR_HOST` leads to an emulator, which
//! wants none either, as in Google's own libraries.

use std::sync::Arc;

use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};

use super::address::Address;
use super::backend::{Made, never_again, normal, refused};
use super::environment::Environment;
use super::google::{self, Account, well_known};
use super::keys::{Keys, Renewable};
use super::transport::{ClientKey, Connector};
use crate::error::Result;

/// Where credentials come from, in the order in which they count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// None are wanted.
    Nobody,
    /// A service account's key, in this variable or in the file that it names.
    Key(&'static str),
    /// A token that someone else fetched.
    Token,
    /// The file that [`google::VARIABLE`] names.
    File,
    /// What `gcloud` wrote, or the machine's service account.
    Default,
}

impl Origin {
    fn of(environment: &Environment) -> Self {
        const KEYS: [&str; 3] =
            ["GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY"];
        if environment.is_set(&["GOOGLE_SKIP_SIGNATURE"]) {
            return Self::Nobody;
        }
        if environment.get(&["GOOGLE_BEARER_TOKEN"]).is_some() {
            return Self::Token;
        }
        match KEYS.into_iter().find(|name| environment.get(&[name]).is_some()) {
            Some(name) => Self::Key(name),
            None if environment.get(&[google::VARIABLE]).is_some() => Self::File,
            None => Self::Default,
        }
    }

    /// As errors call it.
    fn shown(self, environment: &Environment) -> &'static str {
        match self {
            Self::Nobody => "none",
            Self::Key(name) => environment.origin(name),
            Self::Token => environment.origin("GOOGLE_BEARER_TOKEN"),
            Self::File => environment.origin(google::VARIABLE),
            Self::Default => "Google's application default credentials",
        }
    }
}

pub(super) fn make(
    address: &Address,
    environment: &Arc<Environment>,
    client: &ClientKey,
    connector: Connector,
) -> Result<Made> {
    let mut builder = GoogleCloudStorageBuilder::new();
    for (name, value) in environment.starting_with("GOOGLE_") {
        if let Ok(key) = name.to_ascii_lowercase().parse::<GoogleConfigKey>()
            && !matches!(key, GoogleConfigKey::Client(_) | GoogleConfigKey::Bucket)
        {
            builder = builder.with_config(key, value);
        }
    }
    let emulator = environment.get(&["STORAGE_EMULATOR_HOST"]);
    if let Some(host) = emulator {
        let url = if host.contains("://") { host.to_owned() } else { format!("http://{host}") };
        builder = builder.with_base_url(url.trim_end_matches('/')).with_skip_signature(true);
    }
    let origin = match emulator {
        Some(_) => Origin::Nobody,
        None => Origin::of(environment),
    };
    // `object_store` looks under the home directory only.
    let moved = environment.get(&["CLOUDSDK_CONFIG"]).is_some() && origin == Origin::Default;
    if let Some(path) = well_known(environment).filter(|path| moved && path.is_file()) {
        builder = builder.with_application_credentials(path.to_string_lossy());
    }
    let account = match origin {
        Origin::File | Origin::Default => {
            Account::of(environment, client).map_err(|error| error.object(address.shown()))?
        }
        Origin::Nobody | Origin::Key(_) | Origin::Token => None,
    };
    let credentials = account.as_ref().map_or_else(|| origin.shown(environment).to_owned(), Account::origin);
    let keys = account.map(|account| Arc::new(Keys::new(account)));
    if let Some(keys) = &keys {
        builder = builder.with_credentials(Arc::clone(keys) as _);
    }
    let endpoint = builder.get_config_value(&GoogleConfigKey::BaseUrl);
    let endpoint = normal(endpoint.as_deref().unwrap_or("https://storage.googleapis.com"));
    let store = builder
        .with_bucket_name(&address.bucket)
        .with_retry(never_again())
        .with_http_connector(connector)
        .build()
        .map_err(|error| refused(address, environment, &error).remedy(REMEDY))?;
    let keys = keys.map(|keys| keys as Arc<dyn Renewable>);
    Ok(Made { store: Arc::new(store), credentials, keys, region: None, endpoint })
}

/// What to do where there are no credentials.
pub(super) const REMEDY: &str = "Set GOOGLE_APPLICATION_CREDENTIALS to a service account's key file, run `gcloud auth \
                                 application-default login`, or set GOOGLE_SKIP_SIGNATURE=true for a public bucket";
