//! Google Cloud Storage.
//!
//! Credentials are Google's application default ones: `GOOGLE_APPLICATION_CREDENTIALS`, what `gcloud auth
//! application-default login` wrote, or the machine's service account; `GOOGLE_SERVICE_ACCOUNT` and
//! `GOOGLE_SERVICE_ACCOUNT_KEY` come before them. Federated identities among them are `external_account`'s business, the
//! others `object_store`'s; `CLOUDSDK_CONFIG` says where gcloud keeps its files. `GOOGLE_SKIP_SIGNATURE=true` asks for
//! public objects without any. `STORAGE_EMULATOR_HOST` leads to an emulator, which wants none either, as in Google's own libraries.

use std::sync::Arc;

use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};

use super::address::Address;
use super::backend::{Made, never_again, refused};
use super::environment::Environment;
use super::external_account::{ExternalAccount, well_known};
use super::keys::{Keys, Renewable};
use super::transport::{ClientKey, Connector};
use crate::error::Result;

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
    let anonymous = emulator.is_some() || environment.is_set(&["GOOGLE_SKIP_SIGNATURE"]);
    let credentials = if anonymous {
        "none"
    } else if environment.get(&["GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"]).is_some() {
        "GOOGLE_SERVICE_ACCOUNT"
    } else if environment.get(&["GOOGLE_SERVICE_ACCOUNT_KEY"]).is_some() {
        "GOOGLE_SERVICE_ACCOUNT_KEY"
    } else if environment.get(&["GOOGLE_APPLICATION_CREDENTIALS"]).is_some() {
        "GOOGLE_APPLICATION_CREDENTIALS"
    } else {
        "Google's application default credentials"
    };
    // `object_store` looks under the home directory only.
    let moved = environment.get(&["CLOUDSDK_CONFIG"]).is_some() && credentials.starts_with("Google's");
    if let Some(path) = well_known(environment).filter(|path| moved && path.is_file()) {
        builder = builder.with_application_credentials(path.to_string_lossy());
    }
    let service_account = credentials.starts_with("GOOGLE_SERVICE_ACCOUNT");
    let federated = match anonymous || service_account {
        true => None,
        false => ExternalAccount::of(environment, client).map_err(|error| error.object(address.shown()))?,
    };
    let credentials = federated.as_ref().map_or_else(|| credentials.to_owned(), |account| account.origin());
    let keys = federated.map(|account| Arc::new(Keys::new(account)));
    if let Some(keys) = &keys {
        builder = builder.with_credentials(Arc::clone(keys) as _);
    }
    let store = builder
        .with_bucket_name(&address.bucket)
        .with_retry(never_again())
        .with_http_connector(connector)
        .build()
        .map_err(|error| refused(address, environment, &error).remedy(REMEDY))?;
    let keys = keys.map(|keys| keys as Arc<dyn Renewable>);
    Ok(Made { store: Arc::new(store), credentials, keys, region: None })
}

/// What to do where there are no credentials.
pub(super) const REMEDY: &str = "Set GOOGLE_APPLICATION_CREDENTIALS to a service account's key file, run `gcloud auth \
                                 application-default login`, or set GOOGLE_SKIP_SIGNATURE=true for a public bucket";
