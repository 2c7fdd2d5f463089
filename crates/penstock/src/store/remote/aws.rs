//! AWS's own chain of credentials and settings, for the S3 store.
//!
//! `aws-config` knows every place that credentials come from (variables, profiles, SSO, assumed roles, credential
//! processes, web identities, containers, EKS pods, instances) and is kept up to date by its makers; `object_store`
//! knows a few. So the chain is asked here, with this module's HTTP client underneath, and what it finds is kept by `keys`.

use async_trait::async_trait;
use aws_config::environment::EnvironmentVariableRegionProvider;
use aws_config::meta::region::RegionProviderChain;
use aws_config::profile::ProfileFileRegionProvider;
use aws_config::provider_config::ProviderConfig;
use aws_config::{BehaviorVersion, SdkConfig};
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

use super::keys::{Fetched, Source};
use super::transport::{ClientKey, send};
use super::witness::Lack;

/// The region of buckets of which nobody says where they are. A bucket elsewhere says so itself.
pub(super) const DEFAULT_REGION: &str = "us-east-1";

/// What AWS's files, variables and metadata services say.
pub(super) async fn load(key: &ClientKey) -> SdkConfig {
    let client = Client(key.clone());
    let config = ProviderConfig::without_region().with_http_client(client.clone());
    // The instance's metadata is not asked for the region: off EC2 that is a wait for nothing.
    let region = RegionProviderChain::first_try(EnvironmentVariableRegionProvider::new())
        .or_else(ProfileFileRegionProvider::builder().configure(&config).build())
        .or_else(DEFAULT_REGION)
        .region()
        .await;
    aws_config::defaults(BehaviorVersion::v2026_01_12()).region(region).http_client(client).load().await
}

/// AWS's chain as a source of keys.
pub(super) struct Chain(pub(super) SharedCredentialsProvider);

#[async_trait]
impl Source for Chain {
    type Credential = AwsCredential;

    async fn fetch(&self) -> Result<Fetched<AwsCredential>, Lack> {
        let credentials = self.0.provide_credentials().await.map_err(|error| Lack::new(explain(&error)))?;
        Ok(Fetched {
            credential: AwsCredential {
                key_id: credentials.access_key_id().to_owned(),
                secret_key: credentials.secret_access_key().to_owned(),
                token: credentials.session_token().map(str::to_owned),
            },
            expires: credentials.expiry(),
            origin: source(&credentials).to_owned(),
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

/// Why there are no credentials: the innermost reason, which is the one that can be acted upon.
pub(super) fn explain(error: &CredentialsError) -> String {
    if matches!(error, CredentialsError::CredentialsNotLoaded(_)) {
        return "no AWS credentials were found".into();
    }
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    format!("AWS credentials could not be had: {innermost}")
}

/// The HTTP client that AWS's credential services are asked with.
#[derive(Debug, Clone)]
struct Client(ClientKey);

impl HttpClient for Client {
    fn http_connector(&self, settings: &HttpConnectorSettings, _: &RuntimeComponents) -> SharedHttpConnector {
        let mut key = self.0.clone();
        if let Some(connect) = settings.connect_timeout() {
            key.patience.connect = connect;
        }
        if let Some(idle) = settings.read_timeout() {
            key.patience.idle = idle;
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
            let answer = send(&client, request, &host).await.map_err(|error| {
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
