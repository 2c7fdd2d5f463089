//! What is got for a subject token: an access token of Google's token service (RFC 8693), and for that one, where the
//! settings say so, a token of a service account.
//!
//! Only reading of storage is asked for. A service that is busy or cannot be reached is a failure that passes; one that
//! refuses is told with its own code and message, in which no token survives.

use std::time::{Duration, SystemTime};

use aws_smithy_types::date_time::{DateTime, Format};
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Method, StatusCode};
use serde::Deserialize;
use serde_json::json;
use url::form_urlencoded;

use super::ExternalAccount;
use super::settings::{Impersonated, Settings};
use crate::store::remote::transport::{ClientKey, send};
use crate::store::remote::witness::{Lack, Refusal};

/// What tokens are for: reading objects and listing them.
const READ: &str = "https://www.googleapis.com/auth/devstorage.read_only";
/// What acting as a service account takes.
const ACT: &str = "https://www.googleapis.com/auth/cloud-platform";
const GRANT: &str = "urn:ietf:params:oauth:grant-type:token-exchange";
const ACCESS_TOKEN: &str = "urn:ietf:params:oauth:token-type:access_token";

#[derive(Deserialize)]
struct Exchanged {
    access_token: String,
    expires_in: Option<u64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Generated {
    access_token: String,
    expire_time: String,
}

/// An access token for storage, and when it ends.
pub(super) async fn access_token(
    account: &ExternalAccount,
    subject: &str,
) -> Result<(String, SystemTime), Lack> {
    let without = |lack: Lack| Lack { why: lack.why.replace(subject, "***"), ..lack };
    let exchanged = exchange(account, subject).await.map_err(without)?;
    match &account.settings.impersonated {
        None => Ok(exchanged),
        Some(impersonated) => act_as(account, impersonated, &exchanged.0).await,
    }
}

/// The request that shows a subject token.
fn shown(settings: &Settings, subject: &str) -> Result<reqwest::Request, Lack> {
    let mut form = form_urlencoded::Serializer::new(String::new());
    form.append_pair("grant_type", GRANT)
        .append_pair("audience", &settings.audience)
        .append_pair("scope", if settings.impersonated.is_some() { ACT } else { READ })
        .append_pair("requested_token_type", ACCESS_TOKEN)
        .append_pair("subject_token_type", &settings.token_type)
        .append_pair("subject_token", subject);
    let mut request = reqwest::Request::new(Method::POST, settings.token_url.clone());
    let headers = request.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded"));
    match (&settings.client, &settings.user_project) {
        (Some((id, secret)), _) => {
            let both = format!("{id}:{secret}");
            bear(headers, &format!("Basic {}", aws_smithy_types::base64::encode(both)))?;
        }
        // A client has a project of its own.
        (None, Some(project)) => {
            form.append_pair("options", &json!({"userProject": project}).to_string());
        }
        (None, None) => {}
    }
    *request.body_mut() = Some(form.finish().into());
    Ok(request)
}

async fn exchange(account: &ExternalAccount, subject: &str) -> Result<(String, SystemTime), Lack> {
    let request = shown(&account.settings, subject)?;
    let answer = ask(&account.client, request, "Google's token service").await.map_err(|lack| Lack {
        remedy: Some(
            "Check the audience of the file of credentials, and that its provider takes tokens of this issuer, \
             audience and subject"
                .into(),
        ),
        ..lack
    })?;
    let Exchanged { access_token, expires_in } =
        serde_json::from_slice(&answer).map_err(|_| Lack::new("Google's token service gave no token"))?;
    Ok((access_token, SystemTime::now() + Duration::from_secs(expires_in.unwrap_or(3600))))
}

async fn act_as(
    account: &ExternalAccount,
    impersonated: &Impersonated,
    token: &str,
) -> Result<(String, SystemTime), Lack> {
    let mut request = reqwest::Request::new(Method::POST, impersonated.url.clone());
    let headers = request.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    bear(headers, &format!("Bearer {token}"))?;
    let body = json!({"lifetime": format!("{}s", impersonated.lifetime.as_secs()), "scope": [READ]});
    *request.body_mut() = Some(body.to_string().into());
    let answer = ask(&account.client, request, "Google's IAM").await.map_err(|lack| Lack {
        why: lack.why.replace(token, "***"),
        remedy: Some(
            "Give the identity the role roles/iam.workloadIdentityUser of the service account, and enable the IAM \
             Service Account Credentials API"
                .into(),
        ),
        ..lack
    })?;
    let nothing = || Lack::new("Google's IAM gave no token");
    let Generated { access_token, expire_time } = serde_json::from_slice(&answer).map_err(|_| nothing())?;
    let end = DateTime::from_str(&expire_time, Format::DateTimeWithOffset).map_err(|_| nothing())?;
    Ok((access_token, SystemTime::try_from(end).map_err(|_| nothing())?))
}

/// Sets the header that proves who asks.
fn bear(headers: &mut HeaderMap, proof: &str) -> Result<(), Lack> {
    let mut value = HeaderValue::try_from(proof).map_err(|_| Lack::new("a token is not one"))?;
    value.set_sensitive(true);
    headers.insert(AUTHORIZATION, value);
    Ok(())
}

/// Sends a request for a token, and returns the answer's body. `who` is asked, for errors.
pub(super) async fn ask(
    client: &ClientKey,
    mut request: reqwest::Request,
    who: &str,
) -> Result<Vec<u8>, Lack> {
    request.headers_mut().entry(ACCEPT).or_insert(HeaderValue::from_static("*/*"));
    let host = request.url().host_str().unwrap_or_default().to_owned();
    let passes = |why: String| Lack { passes: true, ..Lack::new(why) };
    let http = client.for_host(&host).client().map_err(|error| Lack::new(error.cause().to_owned()))?;
    let lost = |what: &str| passes(format!("no answer of {who} ({host}): {what}"));
    let sent = send(&http, request, &host).await;
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
    Err(if busy || status.is_server_error() { passes(why) } else { Lack::new(why) })
}
