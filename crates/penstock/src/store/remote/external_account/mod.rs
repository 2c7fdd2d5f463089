//! Google's workload (and workforce) identity federation: credentials of type `external_account`.
//!
//! Whoever has an identity elsewhere (a Kubernetes cluster, a CI service, AWS, an identity provider of one's own) shows
//! a *subject token* of it to Google's token service, which gives an access token for it; where the settings say so, that
//! one is shown for a token of a service account. Settings are a JSON file without secrets that says where the subject
//! token comes from, as `gcloud iam workload-identity-pools create-cred-config` writes it.
//!
//! * `settings`: the file. `subject`: tokens of files, URLs and programs; `aws`: of AWS. `exchange`: what is got for them.
//!
//! Tokens are fetched when the first request needs them, renewed by `keys` while a load goes on, and never shown. A
//! token service that is busy is asked again, as a store is; one that refuses is an error that says which source the
//! subject token came from, and what to look at. Nothing here looks at the process's variables except through
//! [`Environment`], and nothing here knows a bucket.
//!
//! Why not Google's own `google-cloud-auth`: it renews tokens in a task that it leaves to the runtime it was made in, and
//! here runtimes are driven only while someone waits in them (see `runtime`); it makes HTTP clients of its own, past
//! this module's timeouts, certificates and witness; and it would bring a second TLS library and a JWT library.

mod aws;
mod exchange;
mod settings;
mod subject;

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use object_store::gcp::GcpCredential;

use super::environment::Environment;
use super::keys::{Fetched, Source};
use super::transport::ClientKey;
use super::witness::Lack;
use crate::error::Result;

use settings::Settings;

/// The variable that names a file of credentials.
const VARIABLE: &str = "GOOGLE_APPLICATION_CREDENTIALS";
/// What `gcloud auth application-default login` calls the one that it writes.
const WELL_KNOWN: &str = "application_default_credentials.json";

/// Where `gcloud auth application-default login` puts credentials.
pub(super) fn well_known(environment: &Environment) -> Option<PathBuf> {
    let home = || Some(PathBuf::from(environment.get(&["HOME"])?).join(".config/gcloud"));
    let directory = environment.get(&["CLOUDSDK_CONFIG"]).map(PathBuf::from).or_else(home)?;
    Some(directory.join(WELL_KNOWN))
}

/// An identity elsewhere that Google takes. It has no `Debug` form.
pub(super) struct ExternalAccount {
    settings: Settings,
    environment: Arc<Environment>,
    client: ClientKey,
}

impl ExternalAccount {
    /// The federated identity that `environment` leads to, if it leads to one and not to other credentials.
    ///
    /// # Errors
    /// `Config` where its settings cannot be used.
    pub(super) fn of(environment: &Arc<Environment>, client: &ClientKey) -> Result<Option<Self>> {
        let (name, path) = match environment.get(&[VARIABLE]) {
            Some(path) => (format!("{VARIABLE}={path}"), PathBuf::from(path)),
            None => {
                let Some(path) = well_known(environment) else { return Ok(None) };
                (path.display().to_string(), path)
            }
        };
        // What cannot be read is told by whoever reads the other kinds of credentials.
        let Ok(text) = std::fs::read(path) else { return Ok(None) };
        let Some(settings) = Settings::parse(&name, &text)? else { return Ok(None) };
        Ok(Some(Self { settings, environment: Arc::clone(environment), client: client.clone() }))
    }

    /// Where its tokens come from, for errors.
    pub(super) fn origin(&self) -> String {
        let Settings { name, subject, impersonated, .. } = &self.settings;
        let account = impersonated.as_ref().and_then(|impersonated| impersonated.account());
        let as_account = account.map(|account| format!(", as {account}")).unwrap_or_default();
        format!("a federated identity ({name}: {}{as_account})", subject.shown())
    }
}

#[async_trait]
impl Source for ExternalAccount {
    type Credential = GcpCredential;

    async fn fetch(&self) -> Result<Fetched<GcpCredential>, Lack> {
        // What is wrong is told with whose it is.
        let told = |lack: Lack| Lack { why: format!("{}: {}", self.origin(), lack.why), ..lack };
        let subject = self.settings.subject.token(self).await.map_err(told)?;
        let (bearer, expires) = exchange::access_token(self, &subject).await.map_err(told)?;
        Ok(Fetched { credential: GcpCredential { bearer }, expires: Some(expires), origin: self.origin() })
    }
}
