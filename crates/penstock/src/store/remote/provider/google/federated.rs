//! Workload identity federation: settings without secrets, as `gcloud iam workload-identity-pools create-cred-config`
//! writes them, that say where a subject token comes from and whom it is shown to.
//!
//! What is got for it is an access token of Google's token service (RFC 8693).

use reqwest::RequestBuilder;
use serde::Deserialize;
use serde_json::json;
use url::Url;

use super::impersonation::Impersonated;
use super::subject_token::{CredentialSource, Subject};
use super::token_client::{TokenContext, TokenGrant, service};
use crate::store::remote::http::response_recorder::CredentialError;

const TOKEN_URL: &str = "https://sts.googleapis.com/v1/token";
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
        let account = impersonated.as_ref().map(|account| account.account().to_owned());
        let federated = Self {
            token_url: service("token_url", file.token_url.as_deref().unwrap_or(TOKEN_URL))?,
            subject: file.credential_source.subject()?,
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
        let (granted, _) = cx.grant(self.exchange(cx, &subject, scope)?).await.map_err(|error| {
            error.without(&[&subject]).with_remedy(
                "Check the audience of the file of credentials, and that its provider takes tokens of this issuer, \
                 audience and subject",
            )
        })?;
        Ok(granted)
    }

    /// The request that shows a subject token.
    fn exchange(
        &self,
        cx: &TokenContext,
        subject: &str,
        scope: &str,
    ) -> Result<RequestBuilder, CredentialError> {
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
        let request = cx.form(&self.token_url, &fields)?;
        Ok(match &self.client {
            Some((id, secret)) => request.basic_auth(id, Some(secret)),
            None => request,
        })
    }
}
