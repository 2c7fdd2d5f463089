//! Azure Blob Storage.
//!
//! The account comes from the location (`abfss://container@account.dfs.core.windows.net/…`) or from
//! `AZURE_STORAGE_ACCOUNT_NAME` (`az://container/…`). An `https://` URL of a blob is one of any server, signed or not.
//! Credentials, in this order: a bearer token, the key of `AZURE_STORAGE_CONNECTION_STRING`, an account key, a workload
//! identity, a client secret, a SAS token, the Azure command line (`AZURE_USE_AZURE_CLI=true`), the machine's managed identity.
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

const SKIP: &str = "AZURE_SKIP_SIGNATURE";
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
    let anonymous = environment.is_set(&[SKIP]);
    let mut credentials = match anonymous {
        true => format!("none ({})", environment.origin(SKIP)),
        false => source(environment).to_owned(),
    };
    let of_location = address.account.as_ref();
    // A connection string speaks for its own account only.
    let parts = connection(environment)?
        .filter(|parts| of_location.is_none_or(|(account, _)| Some(account) == parts.get("AccountName")));
    if let Some((account, host)) = of_location {
        builder = builder.with_account(account).with_endpoint(format!("https://{host}"));
    }
    if let Some(parts) = &parts {
        // Some name the endpoint only.
        let signs = ["AccountKey", "SharedAccessSignature"].iter().any(|part| parts.contains_key(*part));
        if signs && !anonymous {
            environment.origin(CONNECTION_STRING).clone_into(&mut credentials);
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
    let makes_host = match &parts {
        Some(parts) => !parts.contains_key("BlobEndpoint"),
        None => endpoint.is_none(),
    };
    if makes_host && of_location.is_none() && !is_name(&account) {
        return Err(no_name(environment, parts.is_some()).object(address.shown()));
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
                .remedy(format!("{SIGN_IN}; {PUBLIC}"))
        })?;
    let anonymous = anonymous.then(|| environment.without(SKIP));
    let store = Arc::new(store);
    let uploads = Some(Arc::clone(&store) as _);
    Ok(Made { store, uploads, credentials, anonymous, keys: None, region: None, endpoint })
}

/// Whether a text may be the name of a storage account: of Azure's, or of an emulator's.
fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// The refusal of an account's name that is none, before a host is made of it: that would go to servers of names and into
/// errors, and may be a key in the wrong place.
fn no_name(environment: &Environment, connected: bool) -> Error {
    let variables = ["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"];
    let set = variables.into_iter().find(|name| environment.get(&[name]).is_some());
    let setting = match connected {
        true => format!("AccountName of {}", environment.setting(CONNECTION_STRING)),
        false => environment.setting(set.unwrap_or(variables[0])),
    };
    Error::new(ErrorKind::Config, format!("{setting} is not the name of a storage account"))
        .detail("setting", setting)
        .remedy(
            "Give the name alone, 3 to 24 small letters and digits, without https:// and .blob.core.windows.net; a key \
             is given as AZURE_STORAGE_ACCOUNT_KEY or the storage option account_key",
        )
}

fn source(environment: &Environment) -> &'static str {
    [
        "AZURE_STORAGE_TOKEN",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_KEY",
        "AZURE_FEDERATED_TOKEN_FILE",
        "AZURE_CLIENT_SECRET",
        "AZURE_STORAGE_CLIENT_SECRET",
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
pub(crate) const SIGN_IN: &str = "Set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and \
                                  AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or sign in with `az login` and \
                                  set AZURE_USE_AZURE_CLI=true";
/// What to do instead, where none are needed.
pub(crate) const PUBLIC: &str = "for a public container set AZURE_SKIP_SIGNATURE=true";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::remote::http::client_key::ClientKey;
    use crate::store::remote::request::retry::RetryPolicy;
    use crate::store::remote::settings::address::Provider;

    /// The endpoint of what is made of these variables.
    fn endpoint(location: &str, variables: &[(&str, &str)]) -> Result<String> {
        let environment = Arc::new(Environment::of(variables.iter().copied()));
        let client = ClientKey::of(&environment, Provider::Azure, RetryPolicy::default(), false)?;
        make(&Address::parse(location)?, &environment, Connector(client)).map(|made| made.endpoint)
    }

    #[test]
    fn what_is_no_accounts_name_makes_no_host_and_is_not_shown() {
        for value in
            ["U0VOVElORUw+c2VjcmV0==", "me:SENTINEL@host", "sv=1&sig=SENTINEL", "acc.blob.core.windows.net"]
        {
            let connection = format!("AccountName={value};AccountKey=c2VjcmV0");
            for (name, given) in [
                ("AZURE_STORAGE_ACCOUNT_NAME", value),
                ("AZURE_STORAGE_ACCOUNT", value),
                (CONNECTION_STRING, &connection),
            ] {
                let error = endpoint("az://container/m", &[(name, given)]).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Config, "{error}");
                let shown = format!("{error} {error:?}");
                assert!(shown.contains(&format!("{name} is not the name of a storage account")), "{shown}");
                assert!(!shown.contains(value) && shown.contains("account_key"), "{shown}");
            }
        }
    }

    #[test]
    fn an_accounts_name_is_not_judged_where_it_makes_no_host() {
        let name = ("AZURE_STORAGE_ACCOUNT_NAME", "my_account");
        let key = ("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0");
        let elsewhere = ("AZURE_STORAGE_ENDPOINT", "https://host/my_account");
        let connection = (CONNECTION_STRING, "AccountName=my_account;BlobEndpoint=https://host/my_account");
        let url = "abfss://container@acc.dfs.core.windows.net/m";
        for (location, variables) in [
            ("az://container/m", &[name, key, elsewhere][..]),
            ("az://container/m", &[connection]),
            (url, &[name, key]),
            ("az://container/m", &[("AZURE_STORAGE_ACCOUNT_NAME", "Acc-1"), key]),
        ] {
            assert!(endpoint(location, variables).is_ok(), "{location} {variables:?}");
        }
    }
}
