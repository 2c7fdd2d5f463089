//! Workload identity federation: settings without secrets, as `gcloud iam workload-identity-pools create-cred-config`
//! writes them, that say where a subject token comes from and whom it is shown to.
//!
//! What is got for it is an access token of Google's token service (RFC 8693).

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;
use url::Url;

use super::impersonation::Impersonated;
use super::subject_token::{Format, Subject};
use super::token_client::{TokenContext, TokenGrant, form, grant, service, set_basic};
use crate::store::remote::http::response_recorder::CredentialError;

const TOKEN_URL: &str = "https://sts.googleapis.com/v1/token";
/// How long a program may take for a token, if the file does not say.
const TIMEOUT_MILLIS: u64 = 30_000;
const GRANT: &str = "urn:ietf:params:oauth:grant-type:token-exchange";
const ACCESS_TOKEN: &str = "urn:ietf:params:oauth:token-type:access_token";

/// An identity of another cloud, or of a file, a URL or a program. It has no `Debug` form.
pub(super) struct Federated {
    pub(super) audience: String,
    pub(super) token_type: String,
    token_url: Url,
    subject: Subject,
    /// The client that a token service may want to know: its name and its secret.
    client: Option<(String, String)>,
    /// The project that is charged, of identities of people.
    user_project: Option<String>,
    /// The service account that is acted as first, for programs that make tokens.
    pub(super) account: Option<String>,
}

/// The file.
#[derive(Deserialize)]
pub(super) struct File {
    audience: String,
    subject_token_type: String,
    token_url: Option<String>,
    credential_source: CredentialSource,
    service_account_impersonation_url: Option<String>,
    service_account_impersonation: Option<Impersonation>,
    client_id: Option<String>,
    client_secret: Option<String>,
    workforce_pool_user_project: Option<String>,
}

#[derive(Deserialize)]
struct Impersonation {
    token_lifetime_seconds: Option<u64>,
}

#[derive(Deserialize)]
struct CredentialSource {
    file: Option<PathBuf>,
    url: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    format: Option<FileFormat>,
    executable: Option<Executable>,
    environment_id: Option<String>,
    regional_cred_verification_url: Option<String>,
}

#[derive(Deserialize)]
struct FileFormat {
    #[serde(rename = "type")]
    kind: String,
    subject_token_field_name: Option<String>,
}

#[derive(Deserialize)]
struct Executable {
    command: String,
    timeout_millis: Option<u64>,
    output_file: Option<PathBuf>,
}

impl Federated {
    /// The identity that a file describes, and the service account that it acts as.
    ///
    /// # Errors
    /// What is wrong, by field.
    pub(super) fn of(file: File) -> Result<(Self, Option<Impersonated>), String> {
        let impersonated = match &file.service_account_impersonation_url {
            None => None,
            Some(url) => {
                let asked = file.service_account_impersonation.as_ref();
                let seconds = asked.and_then(|asked| asked.token_lifetime_seconds);
                Some(Impersonated::new(url, Vec::new(), seconds)?)
            }
        };
        let account = impersonated.as_ref().and_then(Impersonated::account).map(str::to_owned);
        let federated = Self {
            token_url: service("token_url", file.token_url.as_deref().unwrap_or(TOKEN_URL))?,
            subject: subject(file.credential_source)?,
            audience: file.audience,
            token_type: file.subject_token_type,
            client: file.client_id.map(|id| (id, file.client_secret.unwrap_or_default())),
            user_project: file.workforce_pool_user_project,
            account,
        };
        Ok((federated, impersonated))
    }

    /// Where subject tokens come from, for errors.
    pub(super) fn shown(&self) -> String {
        self.subject.shown()
    }

    /// An access token for `scope`.
    pub(super) async fn token(&self, cx: &TokenContext, scope: &str) -> Result<TokenGrant, CredentialError> {
        let subject = self.subject.token(self, cx).await?;
        let asked = grant(&cx.client, self.exchange(&subject, scope)?, "Google's token service").await;
        let (granted, _) = asked.map_err(|error| CredentialError {
            why: error.why.replace(&subject, "***"),
            remedy: Some(
                "Check the audience of the file of credentials, and that its provider takes tokens of this issuer, \
                 audience and subject"
                    .into(),
            ),
            ..error
        })?;
        Ok(granted)
    }

    /// The request that shows a subject token.
    fn exchange(&self, subject: &str, scope: &str) -> Result<reqwest::Request, CredentialError> {
        let mut fields = vec![
            ("grant_type", GRANT),
            ("audience", &self.audience),
            ("scope", scope),
            ("requested_token_type", ACCESS_TOKEN),
            ("subject_token_type", &self.token_type),
            ("subject_token", subject),
        ];
        // A client has a project of its own.
        let project = self.user_project.as_ref().filter(|_| self.client.is_none());
        let options = project.map(|project| json!({"userProject": project}).to_string());
        fields.extend(options.as_deref().map(|options| ("options", options)));
        let mut request = form(&self.token_url, &fields);
        if let Some((id, secret)) = &self.client {
            set_basic(request.headers_mut(), id, secret)?;
        }
        Ok(request)
    }
}

fn subject(source: CredentialSource) -> Result<Subject, String> {
    let format = match source.format {
        None => Format::Text,
        Some(FileFormat { kind, .. }) if kind == "text" => Format::Text,
        Some(FileFormat { kind, subject_token_field_name: Some(field) }) if kind == "json" => {
            Format::Json(field)
        }
        Some(FileFormat { kind, .. }) if kind == "json" => {
            return Err("missing field `subject_token_field_name`".into());
        }
        Some(_) => return Err("the format of its credential_source is neither text nor json".into()),
    };
    if let Some(environment) = source.environment_id {
        let url = source.regional_cred_verification_url.filter(|_| environment == "aws1");
        let url = url.ok_or("its credential_source is of an AWS that is not known (aws1 is)")?;
        return Ok(Subject::Aws { url });
    }
    match (source.file, source.url, source.executable) {
        (Some(path), None, None) => Ok(Subject::File { path, format }),
        (None, Some(url), None) => {
            let url = Url::parse(&url).map_err(|_| "the url of its credential_source is not a URL")?;
            if !["http", "https"].contains(&url.scheme()) {
                return Err("the url of its credential_source is not an HTTP URL".into());
            }
            Ok(Subject::Url { url, headers: source.headers, format })
        }
        (None, None, Some(Executable { command, timeout_millis, output_file })) => {
            let timeout = Duration::from_millis(timeout_millis.unwrap_or(TIMEOUT_MILLIS));
            Ok(Subject::Executable { command, timeout, output_file })
        }
        _ => Err(
            "its credential_source is none of those that are supported (one of file, url, executable, or AWS)"
                .into(),
        ),
    }
}
