//! Azure Blob Storage.
//!
//! The account comes from the location (`abfss://container@account.dfs.core.windows.net/…`,
//! `https://account.blob.core.windows.net/container/…`) or from `AZURE_STORAGE_ACCOUNT_NAME` (`az://container/…`).
//! Credentials, in this order: a signature in the location, `AZURE_STORAGE_CONNECTION_STRING`, an account key, a bearer
//! token, a client secret, a workload identity, a SAS token, the Azure command line (`AZURE_USE_AZURE_CLI=true`), the
//! machine's managed identity. `AZURE_SKIP_SIGNATURE=true` asks for public blobs without any. A connection string with
//! `UseDevelopmentStorage=true`, or `AZURE_STORAGE_USE_EMULATOR=true`, leads to Azurite.

use std::collections::HashMap;
use std::sync::Arc;

use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};

use super::backend::{Made, check_endpoint, never_again, normal, refused};
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::http::transport::Connector;
use crate::store::remote::settings::address::Address;
use crate::store::remote::settings::environment::Environment;

/// Azurite's account and key, which its documentation gives to everyone.
const EMULATOR_ACCOUNT: &str = "devstoreaccount1";
const EMULATOR_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
const EMULATOR_URL: &str = "http://127.0.0.1:10000";

const CONNECTION_STRING: &str = "AZURE_STORAGE_CONNECTION_STRING";

pub(crate) fn make(address: &Address, environment: &Environment, connector: Connector) -> Result<Made> {
    let mut builder = MicrosoftAzureBuilder::new();
    // Spellings of the Azure command line. Those of the libraries, below, come before them.
    for (name, key) in [
        ("AZURE_STORAGE_ACCOUNT", AzureConfigKey::AccountName),
        ("AZURE_STORAGE_KEY", AzureConfigKey::AccessKey),
    ] {
        if let Some(value) = environment.get(&[name]) {
            builder = builder.with_config(key, value);
        }
    }
    for (name, value) in environment.starting_with("AZURE_") {
        if let Ok(key) = name.to_ascii_lowercase().parse::<AzureConfigKey>()
            && !matches!(
                key,
                AzureConfigKey::Client(_) | AzureConfigKey::UseEmulator | AzureConfigKey::ContainerName
            )
        {
            builder = builder.with_config(key, value);
        }
    }
    // Spellings of Microsoft's identity libraries, and of what Kubernetes' workload identity injects.
    for (name, key) in [
        ("AZURE_CLIENT_ID", AzureConfigKey::ClientId),
        ("AZURE_CLIENT_SECRET", AzureConfigKey::ClientSecret),
        ("AZURE_TENANT_ID", AzureConfigKey::AuthorityId),
        ("AZURE_FEDERATED_TOKEN_FILE", AzureConfigKey::FederatedTokenFile),
        ("IDENTITY_ENDPOINT", AzureConfigKey::MsiEndpoint),
    ] {
        if let Some(value) = environment.get(&[name]) {
            builder = builder.with_config(key, value);
        }
    }
    let mut credentials = source(environment);
    let parts = connection(environment)?;
    let of_location = address.account.as_ref();
    // A connection string speaks for its own account only.
    let parts = parts
        .filter(|parts| of_location.is_none_or(|(account, _)| Some(account) == parts.get("AccountName")));
    if let Some((account, host)) = of_location {
        builder = builder.with_account(account).with_endpoint(format!("https://{host}"));
    }
    if let Some(parts) = &parts {
        // Some name the endpoint only.
        if ["AccountKey", "SharedAccessSignature"].iter().any(|part| parts.contains_key(*part)) {
            credentials = environment.origin(CONNECTION_STRING);
        }
        builder = connected(builder, parts, environment);
    } else if environment.is_set(&["AZURE_STORAGE_USE_EMULATOR"]) && of_location.is_none() {
        credentials = "the emulator's key";
        builder = connected(builder, &emulator(), environment);
    }
    if let (true, Some((account, host))) = (address.query.contains("sig="), of_location) {
        credentials = OF_URL;
        // Anew, as a key of the environment would come before it.
        builder = MicrosoftAzureBuilder::new()
            .with_account(account)
            .with_endpoint(format!("https://{host}"))
            .with_config(AzureConfigKey::SasKey, address.query.trim_start_matches('?'));
    }
    let settings =
        AccountSettings { environment, address, connected: parts.is_some(), in_url: credentials == OF_URL };
    let account = builder.get_config_value(&AzureConfigKey::AccountName).unwrap_or_default();
    let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
    settings.check_account(&account, endpoint.is_some()).map_err(|error| error.object(address.shown()))?;
    let endpoint = endpoint.unwrap_or_else(|| format!("https://{account}.blob.core.windows.net"));
    check_endpoint("the endpoint of Azure's storage", &endpoint)?;
    let endpoint = format!("{account} {}", normal(&endpoint));
    let key = builder.get_config_value(&AzureConfigKey::AccessKey);
    let signature = builder.get_config_value(&AzureConfigKey::SasKey);
    let store = builder
        .with_container_name(&address.bucket)
        .with_retry(never_again())
        .with_http_connector(connector)
        .build()
        .map_err(|error| match settings.unusable(key.as_deref(), signature.as_deref()) {
            Some(error) => error.object(address.shown()),
            None => refused(address, environment, &error).remedy(REMEDY),
        })?;
    Ok(Made { store: Arc::new(store), credentials: credentials.into(), keys: None, region: None, endpoint })
}

/// Where settings are from, to say which of them is wrong. Their values are never shown.
struct AccountSettings<'a> {
    environment: &'a Environment,
    address: &'a Address,
    /// Whether a connection string, or the emulator's, counts.
    connected: bool,
    /// Whether a signature of the location counts.
    in_url: bool,
}

impl AccountSettings<'_> {
    /// The setting behind the first of these variables that is set, unless it is `part` of the connection string.
    fn named(&self, part: &str, variables: &[&str]) -> String {
        match variables.iter().find(|name| self.environment.get(&[name]).is_some()) {
            _ if self.connected => format!("{part} of {}", self.environment.setting(CONNECTION_STRING)),
            Some(name) => self.environment.setting(name),
            None => variables.first().copied().unwrap_or_default().to_owned(),
        }
    }

    /// # Errors
    /// `Config` where no account is named, and for what is no account's name though a host is made of it.
    fn check_account(&self, account: &str, has_endpoint: bool) -> Result<()> {
        if account.is_empty() && !has_endpoint {
            let cause = "no storage account is named: the location does not say it, and AZURE_STORAGE_ACCOUNT_NAME is not set";
            return Err(Error::new(ErrorKind::Config, cause).remedy(
                "Set AZURE_STORAGE_ACCOUNT_NAME or the storage option account_name, or write the location as \
                 abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH",
            ));
        }
        let is_name = account.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
        if is_name || has_endpoint || self.address.account.is_some() {
            return Ok(());
        }
        let setting = self.named("AccountName", &["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"]);
        Err(wrong(
            &setting,
            "is not the name of a storage account",
            "A name has 3 to 24 small letters and digits; give it \
             alone, without https:// and .blob.core.windows.net",
        ))
    }

    /// Which of the credentials cannot be used; none where they look as they should.
    fn unusable(&self, key: Option<&str>, signature: Option<&str>) -> Option<Error> {
        if let Some(key) = key.filter(|key| !is_base64(key)) {
            let setting = self.named("AccountKey", &KEYS);
            let remedy = match key {
                _ if key.contains("AccountKey=") || key.contains("AccountName=") => {
                    "This looks like a connection string: give it as AZURE_STORAGE_CONNECTION_STRING or the storage option \
                     connection_string"
                }
                _ if key.contains("sig=") => {
                    "This looks like a SAS token: give it as AZURE_STORAGE_SAS_TOKEN or the storage option sas_token"
                }
                _ => {
                    "Copy the whole key anew from the storage account's page (Access keys), or run `az storage account keys \
                     list`"
                }
            };
            return Some(wrong(&setting, "is not the key of a storage account: it is not base64", remedy));
        }
        if key.is_none() && signature.is_some() {
            let setting = match self.in_url {
                true => "the URL's query".to_owned(),
                false => {
                    self.named("SharedAccessSignature", &["AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"])
                }
            };
            let remedy = "Copy the whole token anew: it consists of NAME=VALUE joined by &, such as sv=…&se=…&sr=…&sp=…&sig=…";
            return Some(wrong(&setting, "is not a SAS token", remedy));
        }
        None
    }
}

/// The variables of an account's key, in the order in which they count.
const KEYS: [&str; 4] = [
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_KEY",
];

const OF_URL: &str = "the URL's signature";

fn wrong(setting: &str, what: &str, remedy: &'static str) -> Error {
    Error::new(ErrorKind::Config, format!("{setting} {what}")).detail("setting", setting).remedy(remedy)
}

fn is_base64(text: &str) -> bool {
    let digits = text.trim_end_matches('=');
    let in_alphabet = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'+' || byte == b'/';
    text.len().is_multiple_of(4) && text.len() - digits.len() <= 2 && digits.bytes().all(in_alphabet)
}

fn source(environment: &Environment) -> &'static str {
    [
        "AZURE_SKIP_SIGNATURE",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_TOKEN",
        "AZURE_CLIENT_SECRET",
        "AZURE_STORAGE_CLIENT_SECRET",
        "AZURE_FEDERATED_TOKEN_FILE",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_USE_AZURE_CLI",
    ]
    .into_iter()
    .find(|name| environment.get(&[name]).is_some())
    .map(|name| environment.origin(name))
    .unwrap_or("the machine's managed identity")
}

/// What connection strings consist of, besides endpoints.
const PARTS: [&str; 8] = [
    "AccountName",
    "AccountKey",
    "BlobEndpoint",
    "SharedAccessSignature",
    "DefaultEndpointsProtocol",
    "EndpointSuffix",
    "UseDevelopmentStorage",
    "DevelopmentStorageProxyUri",
];

/// The connection string's parts, if one is set.
fn connection(environment: &Environment) -> Result<Option<HashMap<String, String>>> {
    let Some(text) = environment.get(&[CONNECTION_STRING]) else { return Ok(None) };
    if text.split(';').any(|part| !part.trim().is_empty() && !part.contains('=')) {
        // A part of a password that holds what parts are told by would be taken for a host.
        let cause = format!("{CONNECTION_STRING} has a part that is no NAME=VALUE");
        return Err(Error::new(ErrorKind::Config, cause)
            .remedy("Copy it anew; a semicolon in the user or the password of a URL is escaped (%3B)"));
    }
    let parts: HashMap<String, String> = text
        .split(';')
        .filter_map(|part| part.split_once('='))
        .map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()))
        .collect();
    let known = |name: &str| PARTS.contains(&name) || name.ends_with("Endpoint");
    if let Some(name) = parts.keys().filter(|name| !known(name)).min() {
        // A key with a typo in its name would be no key, and the machine's identity would be asked instead.
        let shown = if name.chars().all(|c| c.is_ascii_alphanumeric()) { name } else { "***" };
        let cause = format!("{CONNECTION_STRING} has a part {shown:?}, which Azure does not have");
        return Err(
            Error::new(ErrorKind::Config, cause).remedy(format!("Its parts are {}", PARTS.join(", ")))
        );
    }
    if parts.get("UseDevelopmentStorage").is_some_and(|yes| yes.eq_ignore_ascii_case("true")) {
        return Ok(Some(emulator()));
    }
    if !parts.contains_key("AccountName") && !parts.contains_key("BlobEndpoint") {
        return Err(Error::new(
            ErrorKind::Config,
            format!("{CONNECTION_STRING} names neither an account nor a blob endpoint"),
        )
        .remedy(
            "Copy it from the storage account's page, or run `az storage account show-connection-string`",
        ));
    }
    Ok(Some(parts))
}

fn emulator() -> HashMap<String, String> {
    [("AccountName", EMULATOR_ACCOUNT), ("AccountKey", EMULATOR_KEY), ("Emulator", "true")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
}

fn connected(
    mut builder: MicrosoftAzureBuilder,
    parts: &HashMap<String, String>,
    environment: &Environment,
) -> MicrosoftAzureBuilder {
    let part = |name: &str| parts.get(name).map(String::as_str);
    let endpoint = match (part("BlobEndpoint"), part("AccountName")) {
        (Some(endpoint), _) => Some(endpoint.trim_end_matches('/').to_owned()),
        (None, Some(account)) if part("Emulator").is_some() => {
            let url = environment.get(&["AZURITE_BLOB_STORAGE_URL"]).unwrap_or(EMULATOR_URL);
            Some(format!("{}/{account}", url.trim_end_matches('/')))
        }
        (None, Some(account)) => {
            let protocol = part("DefaultEndpointsProtocol").unwrap_or("https");
            let suffix = part("EndpointSuffix").unwrap_or("core.windows.net");
            Some(format!("{protocol}://{account}.blob.{suffix}"))
        }
        (None, None) => None,
    };
    let account = part("AccountName").map(str::to_owned).or_else(|| {
        let host = endpoint.as_deref()?.split("://").nth(1)?;
        host.split('.').next().map(str::to_owned)
    });
    if let Some(endpoint) = endpoint {
        builder = builder.with_allow_http(endpoint.starts_with("http://")).with_endpoint(endpoint);
    }
    if let Some(account) = account {
        builder = builder.with_account(account);
    }
    if let Some(key) = part("AccountKey") {
        builder = builder.with_access_key(key);
    } else if let Some(signature) = part("SharedAccessSignature") {
        builder = builder.with_config(AzureConfigKey::SasKey, signature);
    }
    builder
}

/// Whether a failure is of an identity of this machine: of the Azure command line, or of the file of a workload's token.
/// `object_store` tells these by their words only.
pub(crate) fn is_about_identity(what: &str) -> bool {
    ["az account get-access-token", "azure cli response", "federated token file"]
        .iter()
        .any(|words| what.contains(words))
}

/// What such a failure says, with the setting that leads to it.
pub(crate) fn of_identity(what: &str, environment: &Environment) -> String {
    match what.contains("federated token file") {
        true => {
            let setting = environment.setting("AZURE_FEDERATED_TOKEN_FILE");
            format!("the file of a token that {setting} names cannot be read")
        }
        false => what.lines().next().unwrap_or_default().trim().to_owned(),
    }
}

/// What to do where there are no credentials.
pub(crate) const REMEDY: &str = "Set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and \
                                 AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or sign in with `az login` and set \
                                 AZURE_USE_AZURE_CLI=true; for a public container set AZURE_SKIP_SIGNATURE=true";
