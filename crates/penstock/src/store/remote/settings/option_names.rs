//! Names of storage options, and the variables that mean the same: those of fsspec's file systems and of `object_store`.

use super::address::Provider;

pub(super) const KEY: &str = "AWS_ACCESS_KEY_ID";
pub(super) const SECRET: &str = "AWS_SECRET_ACCESS_KEY";
pub(super) const SESSION: &str = "AWS_SESSION_TOKEN";
pub(super) const AWS_ANONYMOUS: &str = "AWS_SKIP_SIGNATURE";
pub(super) const AWS_ENDPOINT: &str = "AWS_ENDPOINT_URL_S3";
pub(super) const GOOGLE_ANONYMOUS: &str = "GOOGLE_SKIP_SIGNATURE";
pub(super) const GOOGLE_TOKEN: &str = "GOOGLE_BEARER_TOKEN";
pub(super) const GOOGLE_FILE: &str = "GOOGLE_APPLICATION_CREDENTIALS";
pub(super) const GOOGLE_KEY: &str = "GOOGLE_SERVICE_ACCOUNT_KEY";
pub(super) const GOOGLE_ENDPOINT: &str = "GOOGLE_BASE_URL";
pub(super) const ACCOUNT: &str = "AZURE_STORAGE_ACCOUNT_NAME";
pub(super) const AZURE_ANONYMOUS: &str = "AZURE_SKIP_SIGNATURE";
pub(super) const HUB_TOKEN: &str = "HF_TOKEN";
pub(super) const HUB_ENDPOINT: &str = "HF_ENDPOINT";
pub(crate) const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// As huggingface_hub has it: a token that is only saved on this machine is not sent.
pub(crate) const HUB_ANONYMOUS: &str = "HF_HUB_DISABLE_IMPLICIT_TOKEN";

/// What can be said to a provider's stores.
pub(super) struct Options {
    pub(super) provider: Provider,
    /// How the provider's variables begin: without that, a variable's name in small letters is an option of that meaning.
    prefixes: &'static [&'static str],
    /// Variables, and the other options that mean the same; no variable where reading needs none.
    names: &'static [(Option<&'static str>, &'static [&'static str])],
    /// Variables that say who asks.
    pub(super) identity: &'static [&'static str],
    /// The variable that says that nobody asks.
    pub(super) anonymous: &'static str,
}

impl Options {
    /// Those of a provider; none where it takes none.
    pub(super) fn of(provider: Provider) -> Option<&'static Self> {
        ALL.iter().find(|options| options.provider == provider)
    }

    /// The variable of an option: none where there is no such option.
    pub(super) fn variable(&self, name: &str) -> Option<Option<&'static str>> {
        let name = name.to_ascii_lowercase();
        self.names().find(|(_, known)| *known == name).map(|(variable, _)| variable)
    }

    /// Every name, with the variable that means the same.
    pub(super) fn names(&self) -> impl Iterator<Item = (Option<&'static str>, String)> {
        self.names.iter().flat_map(move |(variable, names)| {
            let own = variable.map(str::to_ascii_lowercase);
            let short = self.prefixes.iter().filter_map(|prefix| own.as_deref()?.strip_prefix(prefix));
            let all: Vec<_> =
                names.iter().copied().chain(short).map(str::to_owned).chain(own.clone()).collect();
            all.into_iter().map(move |name| (*variable, name))
        })
    }
}

/// The stores that options can be given for.
pub(super) const ALL: [Options; 4] = [
    Options {
        provider: Provider::S3,
        prefixes: &["aws_"],
        names: &[
            (Some(KEY), &["key", "username"]),
            (Some(SECRET), &["secret", "password"]),
            (Some(SESSION), &["token", "aws_token"]),
            (Some(AWS_ENDPOINT), &["endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url"]),
            (Some("AWS_REGION"), &["region_name", "default_region", "aws_default_region"]),
            (Some(AWS_ANONYMOUS), &["anon", "anonymous"]),
            (Some("AWS_PROFILE"), &["profile_name"]),
            (Some("AWS_REQUEST_PAYER"), &["requester_pays"]),
            (Some("AWS_VIRTUAL_HOSTED_STYLE_REQUEST"), &[]),
            (Some("AWS_CA_BUNDLE"), &[]),
            (None, &["allow_http", "aws_allow_http", "use_ssl"]),
        ],
        identity: &[
            KEY,
            SECRET,
            SESSION,
            AWS_ANONYMOUS,
            "AWS_PROFILE",
            "AWS_NO_SIGN_REQUEST",
            "AWS_DEFAULT_PROFILE",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_ROLE_ARN",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        ],
        anonymous: AWS_ANONYMOUS,
    },
    Options {
        provider: Provider::Gcs,
        prefixes: &["google_"],
        names: &[
            (Some(GOOGLE_TOKEN), &["token", "bearer_token", "google_bearer_token"]),
            (
                Some("GOOGLE_SERVICE_ACCOUNT"),
                &[
                    "service_account",
                    "service_account_path",
                    "google_service_account",
                    "google_service_account_path",
                ],
            ),
            (Some(GOOGLE_KEY), &["service_account_key", "google_service_account_key"]),
            (Some(GOOGLE_FILE), &["application_credentials", "google_application_credentials"]),
            (Some(GOOGLE_ENDPOINT), &["endpoint", "endpoint_url", "base_url", "google_base_url"]),
            (Some(GOOGLE_ANONYMOUS), &["anon", "anonymous", "skip_signature", "google_skip_signature"]),
            (None, &["project", "project_id"]),
        ],
        identity: &[
            GOOGLE_TOKEN,
            "GOOGLE_SERVICE_ACCOUNT",
            GOOGLE_KEY,
            GOOGLE_FILE,
            GOOGLE_ANONYMOUS,
            "GOOGLE_SERVICE_ACCOUNT_PATH",
        ],
        anonymous: GOOGLE_ANONYMOUS,
    },
    Options {
        provider: Provider::Azure,
        prefixes: &["azure_storage_", "azure_"],
        names: &[
            (Some(ACCOUNT), &[]),
            (Some("AZURE_STORAGE_ACCOUNT_KEY"), &["access_key", "azure_storage_access_key"]),
            (Some("AZURE_STORAGE_SAS_TOKEN"), &["sas_key", "azure_storage_sas_key"]),
            (Some("AZURE_STORAGE_CONNECTION_STRING"), &[]),
            (Some("AZURE_STORAGE_TOKEN"), &["bearer_token"]),
            (Some("AZURE_CLIENT_ID"), &["azure_storage_client_id"]),
            (Some("AZURE_CLIENT_SECRET"), &["azure_storage_client_secret"]),
            (Some("AZURE_TENANT_ID"), &["azure_storage_tenant_id"]),
            (Some("AZURE_FEDERATED_TOKEN_FILE"), &[]),
            (Some("AZURE_USE_AZURE_CLI"), &[]),
            (Some("AZURE_STORAGE_ENDPOINT"), &["azure_endpoint"]),
            (Some(AZURE_ANONYMOUS), &["anon", "anonymous"]),
            (None, &["allow_http", "azure_allow_http"]),
        ],
        identity: &[
            "AZURE_STORAGE_ACCOUNT_KEY",
            "AZURE_STORAGE_SAS_TOKEN",
            "AZURE_STORAGE_CONNECTION_STRING",
            "AZURE_STORAGE_TOKEN",
            "AZURE_CLIENT_SECRET",
            "AZURE_FEDERATED_TOKEN_FILE",
            "AZURE_USE_AZURE_CLI",
            AZURE_ANONYMOUS,
            "AZURE_STORAGE_KEY",
            "AZURE_STORAGE_ACCESS_KEY",
            "AZURE_STORAGE_MASTER_KEY",
            "AZURE_STORAGE_SAS_KEY",
            "AZURE_STORAGE_CLIENT_SECRET",
            "AZURE_CLIENT_ID",
            "AZURE_TENANT_ID",
            "AZURE_STORAGE_CLIENT_ID",
        ],
        anonymous: AZURE_ANONYMOUS,
    },
    Options {
        provider: Provider::Hub,
        prefixes: &["hf_"],
        names: &[
            (Some(HUB_TOKEN), &[]),
            (Some(HUB_ENDPOINT), &["endpoint_url"]),
            (Some(HUB_ANONYMOUS), &["anon", "anonymous"]),
        ],
        identity: &[HUB_TOKEN, HUB_ANONYMOUS, "HUGGING_FACE_HUB_TOKEN"],
        anonymous: HUB_ANONYMOUS,
    },
];

/// Of another account than the one that an option names.
pub(super) const OF_ACCOUNT: [&str; 9] = [
    "AZURE_STORAGE_ACCOUNT",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_ENDPOINT",
];

/// Variables that name a profile.
pub(super) const PROFILES: [&str; 2] = ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"];
/// Variables that are on or off.
pub(super) const SWITCHES: [&str; 6] = [
    AWS_ANONYMOUS,
    GOOGLE_ANONYMOUS,
    AZURE_ANONYMOUS,
    HUB_ANONYMOUS,
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
    "AZURE_USE_AZURE_CLI",
];
