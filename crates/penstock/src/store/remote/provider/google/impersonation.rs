//! Acting as a service account: Google's IAM gives a token of it to whoever may.
//!
//! With delegates, each of them may act as the next, and the last as the account; IAM goes the whole way by itself.

use std::time::{Duration, SystemTime};

use aws_smithy_types::date_time::{DateTime, Format};
use http::Method;
use http::header::CONTENT_TYPE;
use serde::Deserialize;
use serde_json::json;
use url::Url;

use super::token_client::{TokenContext, TokenGrant, service};
use crate::store::remote::http::response_recorder::CredentialError;

/// The role that it takes, unless the identity is one of a workload elsewhere.
pub(super) const CREATOR: &str = "roles/iam.serviceAccountTokenCreator";
/// How long tokens are asked for, if the file does not say.
const LIFETIME: u64 = 3600;
const PROJECT: &str = "x-goog-user-project";

/// A service account that is acted as.
pub(super) struct Impersonated {
    url: Url,
    /// Its name, out of `…/serviceAccounts/NAME:generateAccessToken`.
    account: String,
    delegates: Vec<String>,
    lifetime: Duration,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Generated {
    access_token: String,
    expire_time: String,
}

impl Impersonated {
    /// The account of a `service_account_impersonation_url`.
    ///
    /// # Errors
    /// What is wrong, by field.
    pub(super) fn new(url: &str, delegates: Vec<String>, seconds: Option<u64>) -> Result<Self, String> {
        let lifetime = Duration::from_secs(seconds.unwrap_or(LIFETIME).clamp(60, 12 * 3600));
        let url = service("service_account_impersonation_url", url)?;
        let last = url.path().rsplit_once('/').and_then(|(_, last)| last.split_once(':'));
        let account = last.ok_or("service_account_impersonation_url names no service account")?.0.to_owned();
        Ok(Self { url, account, delegates, lifetime })
    }

    #[cfg(test)]
    pub(super) fn lifetime(&self) -> Duration {
        self.lifetime
    }

    pub(super) fn account(&self) -> &str {
        &self.account
    }

    /// A token of the account for `scope`, given to whoever has the token `of`. `role` is what they need.
    pub(super) async fn token(
        &self,
        cx: &TokenContext,
        of: &TokenGrant,
        scope: &str,
        project: Option<&str>,
        role: &str,
    ) -> Result<TokenGrant, CredentialError> {
        let body = json!({
            "delegates": self.delegates,
            "lifetime": format!("{}s", self.lifetime.as_secs()),
            "scope": [scope],
        });
        let mut request = cx.request(Method::POST, &self.url)?.bearer_auth(&of.token);
        if let Some(project) = project {
            request = request.header(PROJECT, project);
        }
        let request = request.header(CONTENT_TYPE, "application/json").body(body.to_string());
        let whom = match self.delegates.len() {
            0 => "whoever asks",
            _ => "whoever asks and each delegate",
        };
        let answer = cx.ask(request, "Google's IAM").await.map_err(|error| {
            error.without(&[&of.token]).with_remedy(format!(
                "Give {whom} the role {role} of the service account that is acted as next, and enable the IAM Service \
                 Account Credentials API"
            ))
        })?;
        let nothing = || CredentialError::new("Google's IAM gave no token");
        let Generated { access_token, expire_time } =
            serde_json::from_slice(&answer).map_err(|_| nothing())?;
        let end = DateTime::from_str(&expire_time, Format::DateTimeWithOffset).map_err(|_| nothing())?;
        let expires = SystemTime::try_from(end).map_err(|_| nothing())?;
        Ok(TokenGrant { token: access_token, expires: Some(expires) })
    }
}
