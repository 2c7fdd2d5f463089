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

use super::backend::{Made, check_endpoint, never_again, normal, refused};
use super::credential_cache::{CredentialCache, Renewable};
use super::google::{self, Account, well_known};
use crate::error::Result;
use crate::store::remote::http::client_key::ClientKey;
use crate::store::remote::http::transport::Connector;
use crate::store::remote::settings::address::Address;
use crate::store::remote::settings::environment::Environment;

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

pub(crate) fn make(
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
    let keys = account.map(|account| Arc::new(CredentialCache::new(account)));
    if let Some(keys) = &keys {
        builder = builder.with_credentials(Arc::clone(keys) as _);
    }
    // A service account's file may say where its storage is: what is kept of it must be known by that place.
    let set = builder.get_config_value(&GoogleConfigKey::BaseUrl).or_else(|| base_url_of_key(&builder));
    let endpoint = set.as_deref().unwrap_or("https://storage.googleapis.com");
    check_endpoint("the endpoint of Google's storage", endpoint)?;
    let endpoint = normal(endpoint);
    let store = builder
        .with_bucket_name(&address.bucket)
        .with_retry(never_again())
        .with_http_connector(connector)
        .build()
        .map_err(|error| {
            let unusable = match origin {
                Origin::Key(name) => google::unusable_key(environment, name),
                Origin::File | Origin::Default => google::unusable_file(environment),
                Origin::Nobody | Origin::Token => None,
            };
            let error = unusable.unwrap_or_else(|| refused(address, environment, &error).remedy(REMEDY));
            error.object(address.shown())
        })?;
    let keys = keys.map(|keys| keys as Arc<dyn Renewable>);
    Ok(Made { store: Arc::new(store), credentials, keys, region: None, endpoint })
}

/// The URL of storage that the file of a service account's key names, by which `object_store` goes too.
fn base_url_of_key(builder: &GoogleCloudStorageBuilder) -> Option<String> {
    let given = |key| builder.get_config_value(&key);
    let text = given(GoogleConfigKey::ServiceAccountKey)
        .or_else(|| std::fs::read_to_string(given(GoogleConfigKey::ServiceAccount)?).ok())?;
    // By its name: of a list, the first item would be taken for it, and shown.
    let file: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).ok()?;
    Some(file.get("gcs_base_url")?.as_str()?.to_owned())
}

/// What to do where there are no credentials.
pub(crate) const REMEDY: &str = "Set GOOGLE_APPLICATION_CREDENTIALS to a service account's key file, run `gcloud auth \
                                 application-default login`, or set GOOGLE_SKIP_SIGNATURE=true for a public bucket";

#[cfg(test)]
mod tests {
    use crate::store::remote::{Environment, RemoteStore, RetryPolicy};

    #[test]
    fn the_storage_that_a_service_accounts_file_names_tells_its_objects_from_others() {
        let key = |url: &str| {
            let url = if url.is_empty() { String::new() } else { format!(", \"gcs_base_url\": \"{url}\"") };
            format!(
                "{{\"private_key\": \"k\", \"private_key_id\": \"i\", \"client_email\": \"e\", \"disable_oauth\": true{url}}}"
            )
        };
        let resource = |variables: &[(&str, &str)]| {
            let store = RemoteStore::new(Environment::of(variables.iter().copied()), RetryPolicy::default());
            store.resource("gs://b/a").unwrap()
        };
        let (one, other, none) = (key("https://one.example:4443/"), key("https://other.example"), key(""));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &one).unwrap();
        let path = file.path().to_str().unwrap();
        let of_one = resource(&[("GOOGLE_SERVICE_ACCOUNT_KEY", &one)]);
        assert!(of_one.starts_with("https://one.example:4443\n"), "{of_one}");
        assert_eq!(resource(&[("GOOGLE_SERVICE_ACCOUNT", path)]), of_one);
        assert_eq!(resource(&[("GOOGLE_BASE_URL", "https://one.example:4443")]), of_one);
        let of_other = resource(&[("GOOGLE_SERVICE_ACCOUNT_KEY", &other)]);
        let of_google = resource(&[("GOOGLE_SERVICE_ACCOUNT_KEY", &none)]);
        assert!(of_one != of_other && of_other != of_google && of_google != of_one);
        // What is set comes first, as where requests go.
        let set =
            resource(&[("GOOGLE_SERVICE_ACCOUNT_KEY", &one), ("GOOGLE_BASE_URL", "https://other.example")]);
        assert_eq!(set, of_other);
    }
}
