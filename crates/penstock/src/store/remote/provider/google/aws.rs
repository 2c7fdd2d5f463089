//! Subject tokens of AWS: a request to its token service, signed but not sent. Google sends it, and learns from AWS's
//! answer who signed it.
//!
//! Credentials come from AWS's own chain, as they do for buckets of S3, so there is nothing here of where instances and
//! containers keep them. The region is only where the question goes, and any of them knows the answer.

use std::time::SystemTime;

use aws_credential_types::Credentials;
use aws_credential_types::provider::ProvideCredentials;
use aws_sigv4::http_request::{SignableBody, SignableRequest, SigningSettings, sign};
use aws_sigv4::sign::v4;
use serde_json::json;
use url::Url;
use url::form_urlencoded::byte_serialize;

use super::token_client::TokenContext;
use crate::store::remote::http::response_recorder::CredentialError;
use crate::store::remote::provider::aws::{DEFAULT_REGION, explain};
use crate::store::remote::provider::aws_profile::Profile;
use crate::store::remote::provider::s3::own_keys;

/// The header that says whom the signed request is for.
const TARGET: &str = "x-goog-cloud-target-resource";

/// A signed `GetCallerIdentity`, written as Google wants it. `url` may hold `{region}`.
pub(super) async fn token(cx: &TokenContext, url: &str, audience: &str) -> Result<String, CredentialError> {
    let environment = &cx.environment;
    let keys = own_keys(environment);
    let profile = match keys {
        Some(_) => None,
        None => Profile::of(environment).await.map_err(|error| lacking(error.to_string()))?,
    };
    let set = environment.get(&["AWS_REGION", "AWS_DEFAULT_REGION"]).map(str::to_owned);
    let region = set.or_else(|| profile.as_ref()?.get("AWS_REGION", "region"));
    let region = region.unwrap_or_else(|| DEFAULT_REGION.to_owned());
    let credentials = match keys {
        Some(credentials) => credentials,
        None => {
            let profile = profile.as_ref().ok_or_else(|| lacking("no AWS credentials were found"))?;
            let found = profile.credentials(environment, &cx.client, &region).provide_credentials().await;
            found.map_err(|error| {
                let error = explain(&error, Some(profile), None);
                CredentialError { remedy: error.remedy.or(Some(REMEDY.into())), ..error }
            })?
        }
    };
    signed(credentials, &region, &url.replace("{region}", &region), audience)
}

const REMEDY: &str =
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run where the machine has a role of AWS";

fn lacking(why: impl Into<String>) -> CredentialError {
    CredentialError::new(why).with_remedy(REMEDY)
}

fn signed(
    credentials: Credentials,
    region: &str,
    url: &str,
    audience: &str,
) -> Result<String, CredentialError> {
    let unusable =
        || CredentialError::new("the regional_cred_verification_url of its credential_source cannot be used");
    let host = Url::parse(url).ok().filter(|url| url.scheme() == "https");
    let host = host.and_then(|url| url.host_str().map(str::to_owned)).ok_or_else(unusable)?;
    let identity = credentials.into();
    let parameters = v4::SigningParams::builder()
        .identity(&identity)
        .region(region)
        .name("sts")
        .time(SystemTime::now())
        .settings(SigningSettings::default())
        .build()
        .map_err(|_| unusable())?
        .into();
    let headers = [("host", host.as_str()), (TARGET, audience)];
    let request = SignableRequest::new("POST", url, headers.into_iter(), SignableBody::Bytes(&[]));
    let (instructions, _) =
        request.and_then(|request| sign(request, &parameters)).map_err(|_| unusable())?.into_parts();
    let all = headers.into_iter().chain(instructions.headers());
    let all: Vec<_> = all.map(|(key, value)| json!({"key": key, "value": value})).collect();
    let text = json!({"url": url, "method": "POST", "headers": all}).to_string();
    // As in a path rather than in a form: what is a plus by itself was escaped.
    Ok(byte_serialize(text.as_bytes()).collect::<String>().replace('+', "%20"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_is_a_signed_request_that_names_whom_it_is_for_and_no_secret() {
        let credentials =
            Credentials::new("AKID", "SENTINEL-secret", Some("session/+=".into()), None, "test");
        let url = "https://sts.eu-west-1.amazonaws.com?Action=GetCallerIdentity&Version=2011-06-15";
        let token = signed(credentials, "eu-west-1", url, "//iam.googleapis.com/x").unwrap();
        assert!(!token.contains('+') && !token.contains(' '));
        let decoded =
            url::form_urlencoded::parse(format!("t={token}").as_bytes()).next().unwrap().1.into_owned();
        assert!(!decoded.contains("SENTINEL"));
        let request: serde_json::Value = serde_json::from_str(&decoded).unwrap();
        assert_eq!((&request["url"], &request["method"]), (&url.into(), &"POST".into()));
        let header = |name: &str| {
            let all = request["headers"].as_array().unwrap();
            let found = all.iter().find(|header| header["key"].as_str().unwrap().eq_ignore_ascii_case(name));
            found.map(|header| header["value"].as_str().unwrap().to_owned()).unwrap_or_default()
        };
        assert_eq!(header("host"), "sts.eu-west-1.amazonaws.com");
        assert_eq!(header(TARGET), "//iam.googleapis.com/x");
        assert_eq!(header("x-amz-security-token"), "session/+=");
        let signature = header("authorization");
        assert!(signature.contains("AKID/") && signature.contains("/eu-west-1/sts/aws4_request"));
        assert!(
            signature
                .contains("SignedHeaders=host;x-amz-date;x-amz-security-token;x-goog-cloud-target-resource"),
            "{signature}"
        );
    }

    #[test]
    fn only_https_is_signed_for() {
        let credentials = || Credentials::new("AKID", "secret", None, None, "test");
        for url in ["http://sts.amazonaws.com", "sts", ""] {
            assert!(signed(credentials(), "r", url, "a").is_err(), "{url}");
        }
    }
}
