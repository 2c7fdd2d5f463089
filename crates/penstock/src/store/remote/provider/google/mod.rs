//! Google's credentials that are got for something else: a login, an identity elsewhere, a service account's key.
//!
//! Application default credentials are a JSON file whose `type` says how it begins. Those that `object_store` does not
//! know are read here:
//!
//! * `"external_account"`: workload (and workforce) identity federation. Whoever has an identity elsewhere (a Kubernetes
//!   cluster, a CI service, AWS, an identity provider of one's own) shows a *subject token* of it to Google's token
//!   service.
//! * `"external_account_authorized_user"`: someone of a workforce pool who signed in with `gcloud`; a refresh token.
//! * `"impersonated_service_account"`: one of these, a person's login or a service account's key, that acts as a service
//!   account.
//!
//! An [`Account`] is an identity and the service accounts that it acts as, one after the other.
//!
//! * `file`: an account from a file. `unusable`: what is wrong with files of other kinds.
//! * `federated`, `login`, `key`: the identities. `subject_token`, `aws`: what `federated` shows to the token service.
//! * `impersonation`: acting as a service account. `token_client`: how services are asked.
//!
//! Tokens are fetched when the first request needs them, renewed by `credential_cache` while a load goes on, and never shown. A
//! token service that is busy is asked again, as a store is; one that refuses is an error that says whose token it was,
//! and what to look at. Nothing here looks at the process's variables except through [`Environment`], and nothing here
//! knows a bucket.
//!
//! Why neither Google's `google-cloud-auth` nor its `google-auth`: docs/architecture.md has what was tried with them.

mod aws;
mod federated;
mod file;
mod impersonation;
mod key;
mod login;
mod subject_token;
mod token_client;
mod unusable;

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use object_store::gcp::GcpCredential;

use super::credential_cache::{Fetched, Source};
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::http::client_key::ClientKey;
use crate::store::remote::http::response_recorder::CredentialError;
use crate::store::remote::settings::environment::Environment;

use federated::Federated;
use impersonation::Impersonated;
use key::Key;
use login::Login;
use token_client::TokenContext;
use token_client::TokenGrant;

pub(super) use unusable::{unusable_file, unusable_key};

/// What tokens are for: reading objects and listing them.
const READ: &str = "https://www.googleapis.com/auth/devstorage.read_only";
/// What acting as a service account takes.
const ACT: &str = "https://www.googleapis.com/auth/cloud-platform";
/// The variable that names a file of credentials.
pub(super) const VARIABLE: &str = "GOOGLE_APPLICATION_CREDENTIALS";
/// What `gcloud auth application-default login` calls the one that it writes.
const WELL_KNOWN: &str = "application_default_credentials.json";

/// Where `gcloud auth application-default login` puts credentials.
pub(super) fn well_known(environment: &Environment) -> Option<PathBuf> {
    let home = || Some(PathBuf::from(environment.get(&["HOME"])?).join(".config/gcloud"));
    let directory = environment.get(&["CLOUDSDK_CONFIG"]).map(PathBuf::from).or_else(home)?;
    Some(directory.join(WELL_KNOWN))
}

/// Where a file of credentials is.
struct CredentialsFile {
    /// As errors name it.
    name: String,
    /// What names it: a variable, an option, or its own path.
    setting: String,
    path: PathBuf,
}

impl CredentialsFile {
    /// The one that [`VARIABLE`] names, or the one that `gcloud` writes.
    fn of(environment: &Environment) -> Option<Self> {
        if let Some(path) = environment.get(&[VARIABLE]) {
            return Some(Self::named(environment.setting(VARIABLE), path));
        }
        let path = well_known(environment)?;
        let name = path.display().to_string();
        Some(Self { setting: name.clone(), name, path })
    }

    /// The one at this path, which may be the key itself: such a path is not shown.
    fn named(setting: String, path: &str) -> Self {
        let name = match path.len() > 255 || path.contains(['{', '\n']) {
            true => format!("{setting} (no path)"),
            false => format!("{setting}={path}"),
        };
        Self { name, setting, path: path.into() }
    }
}

/// Whose tokens come first.
enum Identity {
    Federated(Federated),
    Login(Login),
    Key(Key),
}

/// Someone whom Google knows, and whom they act as. It has no `Debug` form.
pub(super) struct Account {
    /// The file, as errors name it.
    name: String,
    identity: Identity,
    /// The service accounts that are acted as, each by the one before it.
    acting: Vec<Impersonated>,
    cx: TokenContext,
}

impl Account {
    /// The account that `environment` leads to, if it leads to one and not to other credentials.
    ///
    /// # Errors
    /// `Config` where its file cannot be used.
    pub(super) fn of(environment: &Arc<Environment>, client: &ClientKey) -> Result<Option<Self>> {
        let Some(CredentialsFile { name, setting, path }) = CredentialsFile::of(environment) else {
            return Ok(None);
        };
        let text = match std::fs::read(path) {
            Ok(text) => text,
            // Someone may have put the file itself there.
            Err(error) if environment.get(&[VARIABLE]).is_some() => {
                let cause = environment.scrub(&format!("{name}: {error}"));
                return Err(Error::new(ErrorKind::Config, cause)
                    .remedy(format!("Check the path that {setting} names, or leave it out")));
            }
            Err(_) => return Ok(None),
        };
        let Some((identity, acting)) = file::parse(&name, &text, client)? else { return Ok(None) };
        let cx = TokenContext { environment: Arc::clone(environment), client: client.clone() };
        Ok(Some(Self { name, identity, acting, cx }))
    }

    /// Where its tokens come from, for errors.
    pub(super) fn origin(&self) -> String {
        let (what, which) = match &self.identity {
            Identity::Federated(federated) => ("a federated identity", Some(federated.shown())),
            Identity::Login(login) => (login.shown(), None),
            Identity::Key(key) => ("a service account's key", Some(key.email().to_owned())),
        };
        let which = which.map(|which| format!(": {which}")).unwrap_or_default();
        let accounts = self.acting.iter().map(|account| format!(", as {}", account.account()));
        let accounts: String = accounts.collect();
        format!("{what} ({}{which}{accounts})", self.name)
    }

    /// A token for `scope` of the identity itself.
    async fn own_token(&self, scope: &str) -> Result<TokenGrant, CredentialError> {
        match &self.identity {
            Identity::Federated(federated) => federated.token(&self.cx, scope).await,
            Identity::Login(login) => {
                let last = self.acting.last().map(Impersonated::account);
                login.token(&self.cx).await.map_err(|error| login.with_remedy(error, last))
            }
            Identity::Key(key) => key.token().await,
        }
    }

    async fn token(&self) -> Result<TokenGrant, CredentialError> {
        let mut left = self.acting.len();
        let scope = |left: usize| if left == 0 { READ } else { ACT };
        let mut granted = self.own_token(scope(left)).await?;
        // Whose quota asking counts against, of people, who have no project of their own; and what it takes to act.
        let (mut project, mut role) = match &self.identity {
            Identity::Federated(_) => (None, "roles/iam.workloadIdentityUser"),
            Identity::Login(login) => (login.project(), impersonation::CREATOR),
            Identity::Key(_) => (None, impersonation::CREATOR),
        };
        for account in &self.acting {
            left -= 1;
            granted = account.token(&self.cx, &granted, scope(left), project.take(), role).await?;
            role = impersonation::CREATOR;
        }
        Ok(granted)
    }
}

#[async_trait]
impl Source for Account {
    type Credential = GcpCredential;

    async fn fetch(&self) -> Result<Fetched<GcpCredential>, CredentialError> {
        // What is wrong is told with whose it is.
        let told = |error: CredentialError| CredentialError {
            why: format!("{}: {}", self.origin(), error.why),
            ..error
        };
        let TokenGrant { token, expires } = self.token().await.map_err(told)?;
        Ok(Fetched { credential: GcpCredential { bearer: token }, expires, origin: self.origin() })
    }
}
