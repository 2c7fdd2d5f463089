//! Azure Blob Storage.
//!
//! The account comes from the location (`abfss://container@account.dfs.core.windows.net/…`) or from
//! `AZURE_STORAGE_ACCOUNT_NAME` (`az://container/…`). An `https://` URL of a blob is one of any server, signed or not.
//! Credentials, in this order: `AZURE_STORAGE_CONNECTION_STRING`, an account key, a bearer token, a client secret, a
//! workload identity, a SAS token, the Azure command line (`AZURE_USE_AZURE_CLI=true`), the machine's managed identity.
//! `AZURE_SKIP_SIGNATURE=true` asks for public blobs without any. A connection string with
//! `UseDevelopmentStorage=true` leads to Azurite.

use std::collections::HashMap;
use std::sync::Arc;

use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};

use super::backend::{Made, check_endpoint, never_again, normal};
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::http::transport::Connector;
use crate::store::remote::settings::address::Address;
use crate::store::remote::settings::environment::Environment;

/// What `UseDevelopmentStorage=true` stands for: Azurite's account and key, which its documentation gives to everyone.
const EMULATOR: [(&str, &str); 3] = [
    ("AccountName", "devstoreaccount1"),
    (
        "AccountKey",
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    ),
    ("BlobEndpoint", "http://127.0.0.1:10000/devstoreaccount1"),
];

const CONNECTION_STRING: &str = "AZURE_STORAGE_CONNECTION_STRING";

pub(crate) fn make(address: &Address, environment: &Environment, connector: Connector) -> Result<Made> {
    let mut builder = MicrosoftAzureBuilder::new();
    // Spellings of the Azure command line and of its machines. Those of the libraries, below, come before them.
    for (name, key) in [
        ("AZURE_STORAGE_ACCOUNT", AzureConfigKey::AccountName),
        ("AZURE_STORAGE_KEY", AzureConfigKey::AccessKey),
        ("IDENTITY_ENDPOINT", AzureConfigKey::MsiEndpoint),
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
    let mut credentials = source(environment);
    let of_location = address.account.as_ref();
    // A connection string speaks for its own account only.
    let parts = connection(environment)?
        .filter(|parts| of_location.is_none_or(|(account, _)| Some(account) == parts.get("AccountName")));
    if let Some((account, host)) = of_location {
        builder = builder.with_account(account).with_endpoint(format!("https://{host}"));
    }
    if let Some(parts) = &parts {
        // Some name the endpoint only.
        if ["AccountKey", "SharedAccessSignature"].iter().any(|part| parts.contains_key(*part)) {
            credentials = environment.origin(CONNECTION_STRING);
        }
        builder = connected(builder, parts);
    }
    let account = builder.get_config_value(&AzureConfigKey::AccountName).unwrap_or_default();
    let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
    if account.is_empty() && endpoint.is_none() {
        let cause = "no storage account is named: the location does not say it, and AZURE_STORAGE_ACCOUNT_NAME is not set";
        return Err(Error::new(ErrorKind::Config, cause).object(address.shown()).remedy(
            "Set AZURE_STORAGE_ACCOUNT_NAME or the storage option account_name, or write the location as \
             abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH",
        ));
    }
    let endpoint = endpoint.unwrap_or_else(|| format!("https://{account}.blob.core.windows.net"));
    check_endpoint("the endpoint of Azure's storage", &endpoint)?;
    let endpoint = format!("{account} {}", normal(&endpoint));
    let store = builder
        .with_container_name(&address.bucket)
        .with_retry(never_again())
        .with_http_connector(connector)
        .build()
        .map_err(|error| {
            let cause = environment.scrub(&error.to_string());
            Error::new(ErrorKind::Config, format!("the credentials ({credentials}) cannot be used: {cause}"))
                .object(address.shown())
                .remedy(REMEDY)
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
    if parts.get("UseDevelopmentStorage").is_some_and(|yes| yes.eq_ignore_ascii_case("true")) {
        return Ok(Some(EMULATOR.map(|(name, value)| (name.to_owned(), value.to_owned())).into()));
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

fn connected(mut builder: MicrosoftAzureBuilder, parts: &HashMap<String, String>) -> MicrosoftAzureBuilder {
    let part = |name: &str| parts.get(name).map(String::as_str);
    let endpoint = match (part("BlobEndpoint"), part("AccountName")) {
        (Some(endpoint), _) => Some(endpoint.trim_end_matches('/').to_owned()),
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
