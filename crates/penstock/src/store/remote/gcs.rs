//! Google Cloud Storage.
//!
//! Credentials are Google's application default ones: `GOOGLE_APPLICATION_CREDENTIALS`, what `gcloud auth
//! application-default login` wrote, or the machine's service account; `GOOGLE_SERVICE_ACCOUNT` and
//! `GOOGLE_SERVICE_ACCOUNT_KEY` come before them. `GOOGLE_SKIP_SIGNATURE=true` asks for public objects without any.
//! `STORAGE_EMULATOR_HOST` leads to an emulator, which wants none either, as in Google's own libraries.

use std::sync::Arc;

use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};

use super::address::Address;
use super::backend::{Made, never_again, refused};
use super::environment::Environment;
use super::transport::Connector;
use crate::error::Result;

pub(super) fn make(address: &Address, environment: &Environment, connector: Connector) -> Result<Made> {
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
    let store = builder
        .with_bucket_name(&address.bucket)
        .with_retry(never_again())
        .with_http_connector(connector)
        .build()
        .map_err(|error| refused(address, environment, &error).remedy(REMEDY))?;
    Ok(Made { store: Arc::new(store), credentials: credentials.into(), keys: None, region: None })
}

/// What to do where there are no credentials.
pub(super) const REMEDY: &str = "Set GOOGLE_APPLICATION_CREDENTIALS to a service account's key file, run `gcloud auth \
                                 application-default login`, or set GOOGLE_SKIP_SIGNATURE=true for a public bucket";
