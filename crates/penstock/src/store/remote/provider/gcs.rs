//! Google Cloud Storage.
//!
//! Credentials are Google's application default ones: `GOOGLE_APPLICATION_CREDENTIALS`, what `gcloud auth
//! application-default login` wrote, or the machine's service account; `GOOGLE_SERVICE_ACCOUNT` and
//! `GOOGLE_SERVICE_ACCOUNT_KEY` come before them. `object_store` reads keys and logins and asks the machine, `google` has
//! Google's own library do the rest; `CLOUDSDK_CONFIG` says where gcloud keeps its files. `GOOGLE_SKIP_SIGNATURE=true` asks
//! for public objects without any. `STORAGE_EMULATOR_HOST` leads to an emulator, which wants none either, as in Google's
//! own libraries.

use std::sync::Arc;

use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};

use super::backend::{Made, check_endpoint, never_again, normal, refused};
use super::credential_cache::{CredentialCache, Renewable};
use super::google::{self, Account, FileVersion, well_known};
use crate::error::Result;
use crate::store::remote::http::transport::Connector;
use crate::store::remote::settings::address::Address;
use crate::store::remote::settings::environment::Environment;

const SKIP: &str = "GOOGLE_SKIP_SIGNATURE";
const EMULATOR: &str = "STORAGE_EMULATOR_HOST";

/// Variables that say who asks, in the order in which they count.
const IDENTITY: [(&str, GoogleConfigKey); 5] = [
    ("GOOGLE_BEARER_TOKEN", GoogleConfigKey::BearerToken),
    ("GOOGLE_SERVICE_ACCOUNT", GoogleConfigKey::ServiceAccount),
    ("GOOGLE_SERVICE_ACCOUNT_PATH", GoogleConfigKey::ServiceAccount),
    ("GOOGLE_SERVICE_ACCOUNT_KEY", GoogleConfigKey::ServiceAccountKey),
    (google::VARIABLE, GoogleConfigKey::ApplicationCredentials),
];

/// Which version of a file of credentials `environment` leads to.
pub(crate) fn login_version(environment: &Environment) -> Option<FileVersion> {
    let given = IDENTITY.into_iter().find(|(name, _)| environment.get(&[name]).is_some());
    FileVersion::of(environment, given.map_or(google::VARIABLE, |(name, _)| name))
}

pub(crate) fn make(address: &Address, environment: &Arc<Environment>, connector: Connector) -> Result<Made> {
    let emulator = environment.get(&[EMULATOR]).map(|host| match host.contains("://") {
        true => host.to_owned(),
        false => format!("http://{host}"),
    });
    let skips = environment.is_set(&[SKIP]).then_some(SKIP);
    let anonymous = skips.or_else(|| emulator.is_some().then_some(EMULATOR));
    let is_anonymous = anonymous.is_some();
    let base = emulator.as_deref().or_else(|| environment.get(&["GOOGLE_BASE_URL"]));
    let endpoint = base.unwrap_or("https://storage.googleapis.com").trim_end_matches('/');
    check_endpoint("the endpoint of Google's storage", endpoint)?;
    // Set in any case: a key's file may name another one, which a disk cache would not know its objects by.
    let mut builder = GoogleCloudStorageBuilder::new().with_base_url(endpoint);
    let given = IDENTITY.into_iter().find_map(|(name, key)| Some((name, key, environment.get(&[name])?)));
    let is_default = !is_anonymous && given.is_none_or(|(name, ..)| name == google::VARIABLE);
    let account = is_default.then(|| Account::of(environment)).flatten();
    let credentials = match (&account, anonymous, given) {
        (Some(account), ..) => account.origin.clone(),
        (None, Some(name), _) => format!("none ({})", environment.origin(name)),
        (None, None, Some((name, ..))) => environment.origin(name).to_owned(),
        (None, None, None) => "Google's application default credentials".to_owned(),
    };
    let keys = account.map(|account| Arc::new(CredentialCache::new(account)));
    builder = match (&keys, given) {
        // With a token, even if it is sent nowhere, no file of credentials is looked for.
        (_, _) if is_anonymous => builder.with_skip_signature(true).with_bearer_token(""),
        (Some(keys), _) => builder.with_credentials(Arc::clone(keys) as _),
        (None, Some((_, key, value))) => builder.with_config(key, value),
        // `object_store` looks under the home directory only.
        (None, None) => match well_known(environment).filter(|path| path.is_file()) {
            Some(path) => builder.with_application_credentials(path.to_string_lossy()),
            None => builder,
        },
    };
    let store = builder
        .with_bucket_name(&address.bucket)
        .with_retry(never_again())
        .with_http_connector(connector)
        .build()
        .map_err(|error| {
            let variable = given.map_or(google::VARIABLE, |(name, ..)| name);
            let unusable = google::unusable(environment, variable);
            let remedy = || format!("{SIGN_IN}; {PUBLIC}");
            let error = unusable.unwrap_or_else(|| refused(address, environment, &error).remedy(remedy()));
            error.object(address.shown())
        })?;
    let keys = keys.map(|keys| keys as Arc<dyn Renewable>);
    let anonymous = anonymous.map(|name| environment.without(name));
    let (region, endpoint) = (None, normal(endpoint));
    let store = Arc::new(store);
    let uploads = Some(Arc::clone(&store) as _);
    Ok(Made { store, uploads, credentials, anonymous, keys, region, endpoint })
}

/// What to do where there are no credentials.
pub(crate) const SIGN_IN: &str = "Set GOOGLE_APPLICATION_CREDENTIALS to a service account's key file, or run `gcloud auth \
                                  application-default login`";
/// What to do instead, where none are needed.
pub(crate) const PUBLIC: &str = "for a public bucket set GOOGLE_SKIP_SIGNATURE=true";
