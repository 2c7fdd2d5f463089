//! AWS's own chain of credentials, for the S3 store.
//!
//! `aws-config` knows every place that credentials come from (variables, profiles, SSO, assumed roles, credential
//! processes, web identities, containers, EKS pods, instances) and is kept up to date by its makers; `object_store`
//! knows a few. So its chain (see `aws_profile`) is asked here, with this module's HTTP client underneath, and what it finds is
//! kept by `credential_cache`.

use async_trait::async_trait;
use aws_credential_types::Credentials;
use aws_credential_types::credential_feature::AwsCredentialFeature as Feature;
use aws_credential_types::provider::{
    ProvideCredentials, SharedCredentialsProvider, error::CredentialsError,
};
use aws_smithy_runtime_api::client::http::{
    HttpClient, HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpConnector,
};
use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse};
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_runtime_api::client::runtime_components::RuntimeComponents;
use aws_smithy_types::body::SdkBody;
use object_store::aws::AwsCredential;

use super::aws_profile::Profile;
use super::backend::innermost;
use super::credential_cache::{Fetched, Source};
use crate::store::remote::http::client_key::ClientKey;
use crate::store::remote::http::response_recorder::CredentialError;
use crate::store::remote::http::transport::send;
use crate::store::remote::settings::environment::fits_header;

/// The region of buckets of which nobody says where they are. A bucket elsewhere says so itself.
pub(crate) const DEFAULT_REGION: &str = "us-east-1";

/// AWS's chain as a source of keys.
pub(crate) struct Chain {
    pub(crate) provider: SharedCredentialsProvider,
    /// The profile that it looks in, unless the keys are given.
    pub(crate) profile: Option<Profile>,
    /// Where keys are from that are given, for errors.
    pub(crate) given: Option<&'static str>,
    /// What is missing of keys that were given by half.
    pub(crate) half: Option<String>,
}

#[async_trait]
impl Source for Chain {
    type Credential = AwsCredential;

    async fn fetch(&self) -> Result<Fetched<AwsCredential>, CredentialError> {
        let asked = self.provider.provide_credentials().await;
        let credentials =
            asked.map_err(|error| explain(&error, self.profile.as_ref(), self.half.as_deref()))?;
        let origin = self.given.unwrap_or_else(|| source(&credentials));
        let mut words = std::iter::once(credentials.access_key_id()).chain(credentials.session_token());
        if !words.all(fits_header) {
            return Err(CredentialError::new(format!(
                "the AWS credentials of {origin} hold characters that no request can carry"
            )));
        }
        Ok(Fetched {
            credential: AwsCredential {
                key_id: credentials.access_key_id().to_owned(),
                secret_key: credentials.secret_access_key().to_owned(),
                token: credentials.session_token().map(str::to_owned),
            },
            expires: credentials.expiry(),
            origin: origin.to_owned(),
        })
    }
}

/// Where credentials come from, for errors: the most particular of what the chain says.
fn source(credentials: &Credentials) -> &'static str {
    let features = credentials.get_property::<Vec<Feature>>().map_or(&[][..], Vec::as_slice);
    let particular = features.iter().rev().find_map(|feature| match feature {
        Feature::CredentialsEnvVars => Some("environment variables"),
        Feature::CredentialsEnvVarsStsWebIdToken
        | Feature::CredentialsStsAssumeRoleWebId
        | Feature::CredentialsProfileStsWebIdToken => Some("a web identity"),
        Feature::CredentialsStsAssumeRole | Feature::CredentialsProfileSourceProfile => {
            Some("an assumed role")
        }
        Feature::CredentialsProfileSso | Feature::CredentialsSso => Some("an SSO session"),
        Feature::CredentialsProfileProcess | Feature::CredentialsProcess => Some("a credential process"),
        Feature::CredentialsHttp => Some("the container's credential service"),
        Feature::CredentialsImds => Some("the instance's role"),
        _ => None,
    });
    let profile = features.contains(&Feature::CredentialsProfile).then_some("a profile");
    particular.or(profile).unwrap_or("AWS's default chain")
}

/// Why there are no credentials, and what to do about it: the innermost reason, which is the one that can be acted upon.
fn explain(error: &CredentialsError, profile: Option<&Profile>, half: Option<&str>) -> CredentialError {
    if let Some(half) = half {
        return CredentialError::new(format!("no AWS credentials were found: {half}"));
    }
    if matches!(error, CredentialsError::CredentialsNotLoaded(_)) {
        return CredentialError::new("no AWS credentials were found");
    }
    let why = innermost(error);
    let Some(Profile { name, .. }) = profile.filter(|profile| profile.exists()) else {
        return CredentialError::new(format!("no AWS credentials were found: {why}"));
    };
    if profile.is_some_and(Profile::by_sso) {
        let remedy = format!("Sign in: aws sso login --profile {name}");
        let why = format!("the profile {name:?} (SSO) has no valid login: {why}");
        return CredentialError::new(why).with_remedy(remedy);
    }
    let why = format!("AWS credentials of the profile {name:?} could not be had: {why}");
    let remedy = format!("Try `aws sts get-caller-identity --profile {name}`, which uses the same settings");
    CredentialError::new(why).with_remedy(remedy)
}

/// The HTTP client that AWS's credential services are asked with.
#[derive(Debug, Clone)]
pub(crate) struct Client(pub(crate) ClientKey);

impl HttpClient for Client {
    fn http_connector(&self, settings: &HttpConnectorSettings, _: &RuntimeComponents) -> SharedHttpConnector {
        let mut key = self.0.clone();
        if let Some(connect) = settings.connect_timeout() {
            key.policy.connect = connect;
        }
        if let Some(idle) = settings.read_timeout() {
            key.policy.idle = idle;
        }
        SharedHttpConnector::new(Connector(key))
    }
}

#[derive(Debug)]
struct Connector(ClientKey);

impl HttpConnector for Connector {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let key = self.0.clone();
        HttpConnectorFuture::new(async move {
            let request = request.try_into_http1x().map_err(|error| ConnectorError::user(error.into()))?;
            let (parts, body) = request.into_parts();
            let host = parts.uri.host().unwrap_or_default().to_owned();
            let url = parts.uri.to_string().parse();
            let mut request = reqwest::Request::new(
                parts.method,
                url.map_err(|error| ConnectorError::user(Box::new(error)))?,
            );
            *request.headers_mut() = parts.headers;
            *request.body_mut() =
                body.bytes().filter(|bytes| !bytes.is_empty()).map(|bytes| bytes.to_vec().into());
            let client = key.client().map_err(|error| ConnectorError::user(Box::new(error)))?;
            let answer = send(&key, &client, request, &host).await.map_err(|error| {
                if error.is_timeout() {
                    ConnectorError::timeout(Box::new(error))
                } else {
                    ConnectorError::io(Box::new(error))
                }
            });
            let (status, headers, body) = answer?;
            let body = body.bytes().await.map_err(|error| ConnectorError::io(Box::new(error)))?;
            let mut response = http::Response::new(SdkBody::from(body));
            *response.status_mut() = status;
            *response.headers_mut() = headers;
            HttpResponse::try_from(response).map_err(|error| ConnectorError::other(Box::new(error), None))
        })
    }
}
