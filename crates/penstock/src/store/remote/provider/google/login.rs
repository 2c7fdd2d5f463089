//! People who signed in with `gcloud`: a refresh token, shown to the service that gave it for an access token.
//!
//! A person's own login is of type `authorized_user`; that of someone of a workforce pool is of type
//! `external_account_authorized_user`, whose service may give another refresh token with each access token. The new one is
//! kept in memory: the file is `gcloud`'s.
//!
//! What its tokens are for was decided by whoever signed in, so no scope is asked for.

use std::sync::{Mutex, PoisonError};

use serde::Deserialize;
use url::Url;

use super::token_client::{TokenContext, TokenGrant, service};
use crate::store::remote::http::response_recorder::CredentialError;

const PERSON_URL: &str = "https://oauth2.googleapis.com/token";
const WORKFORCE_URL: &str = "https://sts.googleapis.com/v1/oauthtoken";

/// Someone who has signed in. It has no `Debug` form.
pub(super) struct Login {
    workforce: bool,
    token_url: Url,
    file: File,
}

/// The file, of either type.
#[derive(Deserialize)]
pub(super) struct File {
    client_id: String,
    client_secret: String,
    /// The one to show next.
    refresh_token: Mutex<String>,
    /// As the file of a workforce pool calls it.
    token_url: Option<String>,
    token_uri: Option<String>,
    /// Proof of a person who had to sign in a second time.
    rapt_token: Option<String>,
    quota_project_id: Option<String>,
}

impl Login {
    /// The login that a file describes: someone's of a `workforce` pool, or a person's own.
    ///
    /// # Errors
    /// What is wrong, by field.
    pub(super) fn of(file: File, workforce: bool) -> Result<Self, String> {
        let (field, url, usual) = match workforce {
            true => ("token_url", &file.token_url, WORKFORCE_URL),
            false => ("token_uri", &file.token_uri, PERSON_URL),
        };
        let token_url = service(field, url.as_deref().unwrap_or(usual))?;
        Ok(Self { workforce, token_url, file })
    }

    /// What it is, for errors.
    pub(super) fn shown(&self) -> &'static str {
        if self.workforce { "a workforce login" } else { "a Google login" }
    }

    /// The project whose quota its requests count against.
    pub(super) fn project(&self) -> Option<&str> {
        self.file.quota_project_id.as_deref()
    }

    /// What to do where it is refused; `account` is the service account that is acted as in the end.
    pub(super) fn with_remedy(&self, error: CredentialError, account: Option<&str>) -> CredentialError {
        let mut remedy = "Sign in again: gcloud auth application-default login".to_owned();
        if self.workforce {
            remedy.push_str(" --login-config=FILE, with the login configuration of the workforce pool");
        } else if let Some(account) = account {
            remedy.push_str(&format!(" --impersonate-service-account={account}"));
        }
        error.with_remedy(remedy)
    }

    pub(super) async fn token(&self, cx: &TokenContext) -> Result<TokenGrant, CredentialError> {
        let File { client_id, client_secret, refresh_token, rapt_token, .. } = &self.file;
        let refresh = refresh_token.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut fields = vec![("grant_type", "refresh_token"), ("refresh_token", refresh.as_str())];
        if !self.workforce {
            fields.extend([("client_id", client_id.as_str()), ("client_secret", client_secret)]);
        }
        fields.extend(rapt_token.as_deref().map(|rapt| ("rapt", rapt)));
        let mut request = cx.form(&self.token_url, &fields)?;
        if self.workforce {
            request = request.basic_auth(client_id, Some(client_secret));
        }
        let rapt = rapt_token.as_deref().unwrap_or_default();
        let granted = cx.grant(request).await;
        let (granted, next) = granted.map_err(|error| error.without(&[&refresh, client_secret, rapt]))?;
        if let Some(next) = next {
            *refresh_token.lock().unwrap_or_else(PoisonError::into_inner) = next;
        }
        Ok(granted)
    }
}
