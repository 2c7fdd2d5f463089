//! How services that give tokens are asked, and what they answer.
//!
//! A service that is busy or cannot be reached is a failure that passes; one that refuses is told with its own code and
//! message. Where those may repeat what was sent, whoever sent it takes it out.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::header::{ACCEPT, CONTENT_TYPE, HeaderValue};
use http::{Method, StatusCode};
use reqwest::RequestBuilder;
use serde::Deserialize;
use url::{Url, form_urlencoded};

use crate::store::remote::http::client_key::ClientKey;
use crate::store::remote::http::response_recorder::{CredentialError, Refusal};
use crate::store::remote::http::transport::send;
use crate::store::remote::settings::environment::Environment;

/// How long a token is good where its service does not say.
const LIFETIME: u64 = 3600;

/// A token, and until when it is good, if that is known.
pub(super) struct TokenGrant {
    pub(super) token: String,
    pub(super) expires: Option<SystemTime>,
}

/// What an identity needs of the world.
pub(super) struct TokenContext {
    pub(super) environment: Arc<Environment>,
    pub(super) client: ClientKey,
}

/// What services answer that speak OAuth.
#[derive(Deserialize)]
struct Answer {
    access_token: String,
    expires_in: Option<u64>,
    refresh_token: Option<String>,
}

impl TokenContext {
    /// A request to a service.
    pub(super) fn request(&self, method: Method, url: &Url) -> Result<RequestBuilder, CredentialError> {
        let host = url.host_str().unwrap_or_default();
        let http = self.client.for_host(host).client();
        let http = http.map_err(|error| CredentialError::new(error.cause().to_owned()))?;
        Ok(http.request(method, url.clone()))
    }

    /// A form for a token service.
    pub(super) fn form(&self, url: &Url, fields: &[(&str, &str)]) -> Result<RequestBuilder, CredentialError> {
        let form = form_urlencoded::Serializer::new(String::new()).extend_pairs(fields).finish();
        let request = self.request(Method::POST, url)?;
        Ok(request.header(CONTENT_TYPE, "application/x-www-form-urlencoded").body(form))
    }

    /// Sends a form to Google's token service: the token, and the refresh token to use from now on, if there is another.
    pub(super) async fn grant(
        &self,
        form: RequestBuilder,
    ) -> Result<(TokenGrant, Option<String>), CredentialError> {
        let who = "Google's token service";
        let answer = self.ask(form, who).await?;
        let answer: Answer = serde_json::from_slice(&answer)
            .map_err(|_| CredentialError::new(format!("{who} gave no token")))?;
        let expires = SystemTime::now() + Duration::from_secs(answer.expires_in.unwrap_or(LIFETIME));
        Ok((TokenGrant { token: answer.access_token, expires: Some(expires) }, answer.refresh_token))
    }

    /// Sends a request for a token, and returns the answer's body. `who` is asked, for errors.
    pub(super) async fn ask(&self, request: RequestBuilder, who: &str) -> Result<Vec<u8>, CredentialError> {
        let (http, request) = request.build_split();
        let unusable = "what the file of credentials says, or a token, cannot be sent in a header";
        let mut request = request.map_err(|_| CredentialError::new(unusable))?;
        request.headers_mut().entry(ACCEPT).or_insert(HeaderValue::from_static("*/*"));
        let host = request.url().host_str().unwrap_or_default().to_owned();
        let passes = |why: String| CredentialError { passes: true, ..CredentialError::new(why) };
        let lost = |what: &str| passes(format!("no answer of {who} ({host}): {what}"));
        let sent = send(&self.client, &http, request, &host).await;
        let (status, headers, body) = sent.map_err(|error| {
            lost(if error.is_connect() { "no connection" } else { "the connection was lost" })
        })?;
        let bytes = body.bytes().await.map_err(|_| lost("the connection was lost"))?;
        if status.is_success() {
            return Ok(bytes.to_vec());
        }
        let refusal = Refusal::of(status, &host, &headers, &bytes);
        let code = refusal.code.map(|code| format!(" {code}")).unwrap_or_default();
        let message = refusal.message.map(|message| format!(": {message}")).unwrap_or_default();
        let why = format!("{who} ({host}) answered HTTP {}{code}{message}", status.as_u16());
        let busy = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS].contains(&status);
        Err(if busy || status.is_server_error() { passes(why) } else { CredentialError::new(why) })
    }
}

/// The URL of a service that tokens are sent to, in this field.
///
/// # Errors
/// Where they must not be.
pub(super) fn service(field: &str, text: &str) -> Result<Url, String> {
    let url = Url::parse(text).ok().filter(is_safe);
    url.ok_or_else(|| format!("{field} is not an HTTPS URL"))
}

/// Whether a token may be sent there.
pub(super) fn is_safe(url: &Url) -> bool {
    let local = match url.host() {
        Some(url::Host::Ipv4(address)) => address.is_loopback(),
        Some(url::Host::Ipv6(address)) => address.is_loopback(),
        Some(url::Host::Domain(name)) => name == "localhost",
        None => return false,
    };
    url.scheme() == "https" || (url.scheme() == "http" && local)
}
