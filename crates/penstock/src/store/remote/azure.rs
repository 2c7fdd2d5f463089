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

use super::address::Address;
use super::backend::{Made, check_endpoint, never_again, normal, refused};
use super::environment::Environment;
use super::transport::Connector;
use crate::error::{Error, ErrorKind, Result};

/// Azurite's account and key, which its documentation gives to everyone.
const EMULATOR_ACCOUNT: &str = "devstoreaccount1";
const EMULATOR_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
const EMULATOR_URL: &str = "http://127.0.0.1:10000";

const CONNECTION_STRING: &str = "AZURE_STORAGE_CONNECTION_STRING";

pub(super) fn make(address: &Address, environment: &Environment, connector: Connector) -> Result<Made> {
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
        credentials = "the URL's signature";
        // Anew, as a key of the environment would come before it.
        builder = MicrosoftAzureBuilder::new()
            .with_account(account)
            .with_endpoint(format!("https://{host}"))
            .with_config(AzureConfigKey::SasKey, address.query.trim_start_matches('?'));
    }
    let account = builder.get_config_value(&AzureConfigKey::AccountName).unwrap_or_default();
    let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
    let endpoint = endpoint.unwrap_or_else(|| format!("https://{account}.blob.core.windows.net"));
    check_endpoint("the endpoint of Azure's storage", &endpoint)?;
    let endpoint = format!("{account} {}", normal(&endpoint));
    let store = builder
        .with_container_name(&address.bucket)
        .with_retry(never_again())
        .with_http_connector(connector)
        .build()
        .map_err(|error| {
            refused(address, environment, &error)
                .remedy("Set AZURE_STORAGE_ACCOUNT_NAME, and credentials for it")
        })?;
    Ok(Made { store: Arc::new(store), credentials: credentials.into(), keys: None, region: None, endpoint })
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
pub(super) fn is_about_identity(what: &str) -> bool {
    ["az account get-access-token", "azure cli response", "federated token file"]
        .iter()
        .any(|words| what.contains(words))
}

/// What to do where there are no credentials.
pub(super) const REMEDY: &str = "Set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and \
                                 AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or sign in with `az login` and set \
                                 AZURE_USE_AZURE_CLI=true; for a public container set AZURE_SKIP_SIGNATURE=true";
