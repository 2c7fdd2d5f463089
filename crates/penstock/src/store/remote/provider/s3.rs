//! S3 and what speaks its language.
//!
//! Settings are those that boto3 and the AWS command line read: `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL` and the
//! profile's `endpoint_url`, region and credentials of variables and profiles, `AWS_CA_BUNDLE` and the profile's
//! `ca_bundle`. Requests are unsigned only where that is asked for, with `AWS_SKIP_SIGNATURE=true` or
//! `AWS_NO_SIGN_REQUEST=true`: a missing credential is an error that says so, not an anonymous request that is denied.
//!
//! Buckets of AWS are addressed by host name, others by path unless `AWS_VIRTUAL_HOSTED_STYLE_REQUEST` says otherwise.
//! Which hosts AWS has is told in `s3_hosts`.

use std::sync::Arc;

use aws_credential_types::Credentials;
use aws_credential_types::credential_feature::AwsCredentialFeature;
use aws_credential_types::provider::SharedCredentialsProvider;
use object_store::aws::AmazonS3Builder;

use super::aws::{Chain, DEFAULT_REGION};
use super::aws_profile::Profile;
use super::backend::{Made, check_endpoint, never_again, normal, refused};
use super::credential_cache::{CredentialCache, Renewable};
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::shown_setting;
use crate::store::remote::http::client_key::ClientKey;
use crate::store::remote::http::context::LoadContext;
use crate::store::remote::http::tls::CaBundle;
use crate::store::remote::http::transport::Connector;
use crate::store::remote::settings::address::{Address, NO_BUCKET};
use crate::store::remote::settings::environment::Environment;
use crate::store::remote::settings::s3_hosts;

/// What to do where there are no credentials.
pub(crate) const SIGN_IN: &str =
    "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run `aws sso login`";
/// What to do instead, where none are needed.
pub(crate) const PUBLIC: &str = "for a public bucket set AWS_SKIP_SIGNATURE=true";

const ANONYMOUS: [&str; 2] = ["AWS_SKIP_SIGNATURE", "AWS_NO_SIGN_REQUEST"];
const KEY_ID: &str = "AWS_ACCESS_KEY_ID";
const SECRET: &str = "AWS_SECRET_ACCESS_KEY";
/// What names another endpoint than AWS's; the first that is set counts.
pub(crate) const ENDPOINTS: [&str; 3] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];

pub(crate) fn make(
    address: &Address,
    environment: &Environment,
    mut client: ClientKey,
    region: Option<String>,
    context: &LoadContext,
) -> Result<Made> {
    let bucket = &address.bucket;
    let anonymous = environment.is_set(&ANONYMOUS);
    let own_keys = own_keys(environment);
    // Whoever reads a public bucket needs no profile, unless one is named.
    let profile = match anonymous && environment.get(&["AWS_PROFILE"]).is_none() {
        true => None,
        false => context.block_on(Profile::of(environment), |_| true)??,
    };
    if let Some(path) = certificates(environment, profile.as_ref()) {
        client.bundle = Some(CaBundle::of_profile(path));
        client.tls()?;
    }
    let region = region
        .or_else(|| environment.get(&["AWS_REGION", "AWS_DEFAULT_REGION"]).map(str::to_owned))
        .or_else(|| profile.as_ref()?.get("AWS_REGION", "region"))
        .unwrap_or_else(|| DEFAULT_REGION.to_owned());
    let endpoint = endpoint(environment, profile.as_ref());
    let by_host = endpoint.is_none() || environment.is_set(&["AWS_VIRTUAL_HOSTED_STYLE_REQUEST"]);
    check_names(address, &region, by_host)?;
    let mut builder = AmazonS3Builder::new()
        .with_bucket_name(bucket)
        .with_region(&region)
        .with_retry(never_again())
        .with_skip_signature(anonymous)
        .with_request_payer(requester_pays(environment))
        .with_http_connector(Connector(client.clone()));
    let express = bucket.ends_with("--x-s3");
    // Names of buckets are unique within a partition of AWS.
    let served_by = endpoint.as_deref().map_or_else(|| s3_hosts::partition(&region).to_owned(), normal);
    builder = match endpoint {
        Some(endpoint) => custom(builder, &endpoint, bucket, by_host, environment)?,
        None if express => builder.with_s3_express(true),
        None => {
            let (url, by_host) = s3_hosts::of_bucket(bucket, &region);
            builder.with_virtual_hosted_style_request(by_host).with_endpoint(url)
        }
    };
    let given = environment.origin(KEY_ID);
    let given = own_keys.is_some().then_some(if given == KEY_ID { "environment variables" } else { given });
    let keys = match (anonymous, own_keys, &profile) {
        (true, ..) => None,
        (false, Some(keys), _) => Some(SharedCredentialsProvider::new(keys)),
        (false, None, Some(profile)) => Some(profile.credentials(environment, &client, &region)),
        (false, None, None) => {
            let cause = half_set(environment).map_or_else(String::new, |half| format!(": {half}"));
            return Err(Error::new(ErrorKind::Access, format!("no AWS credentials were found{cause}"))
                .object(address.shown())
                .remedy("Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"));
        }
    };
    let half = half_set(environment);
    let keys = keys.map(|provider| Arc::new(CredentialCache::new(Chain { provider, profile, given, half })));
    if let Some(keys) = &keys {
        builder = builder.with_credentials(Arc::clone(keys) as _);
    }
    let set = ANONYMOUS.into_iter().find(|name| environment.is_set(&[name]));
    let credentials = match set.map(|name| environment.origin(name)) {
        Some(origin) => format!("none ({origin})"),
        None => "AWS's default chain".to_owned(),
    };
    let store = builder.build().map_err(|error| refused(address, environment, &error))?;
    let keys = keys.map(|keys| keys as Arc<dyn Renewable>);
    let anonymous = set.map(|name| environment.without(name));
    let (region, endpoint) = (Some(region), served_by);
    let store = Arc::new(store);
    let uploads = Some(Arc::clone(&store) as _);
    Ok(Made { store, uploads, credentials, anonymous, keys, region, endpoint })
}

/// Refuses names that no URL can be made of.
///
/// # Errors
/// `NotFound` for the bucket, `Config` for the region.
fn check_names(address: &Address, region: &str, by_host: bool) -> Result<()> {
    let all = |text: &str, marks: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || marks.contains(c));
    // Servers of one's own may have others, where they are part of the path.
    let marks = if by_host { "-._" } else { "-._~!$'()*+,;=" };
    if !all(&address.bucket, marks) {
        return Err(Error::new(ErrorKind::NotFound, NO_BUCKET)
            .object(address.shown())
            .remedy("Write s3://bucket/key, with the bucket's name as the console shows it"));
    }
    // It becomes part of a host's name, and of every signature.
    if region.is_empty() || !all(region, if by_host { "-" } else { "-._" }) {
        return Err(Error::new(ErrorKind::Config, format!("{region:?} is no name of an S3 region"))
            .object(address.shown())
            .remedy("Set AWS_REGION, or storage_options={\"region\": …}, to a name such as eu-central-1"));
    }
    Ok(())
}

/// Credentials in variables, which come first in AWS's chain too.
pub(crate) fn own_keys(environment: &Environment) -> Option<Credentials> {
    let key = environment.get(&[KEY_ID])?;
    let secret = environment.get(&[SECRET])?;
    let token = environment.get(&["AWS_SESSION_TOKEN"]).map(str::to_owned);
    let mut keys = Credentials::new(key, secret, token, None, "environment");
    keys.set_property(vec![AwsCredentialFeature::CredentialsEnvVars]);
    Some(keys)
}

/// Which half of a key is missing where the other is set.
fn half_set(environment: &Environment) -> Option<String> {
    let missing = |set: &str, missing| {
        Some(format!("{} is set, and {} is not", environment.setting(set), environment.setting(missing)))
    };
    match (environment.get(&[KEY_ID]).is_some(), environment.get(&[SECRET]).is_some()) {
        (true, false) => missing(KEY_ID, SECRET),
        (false, true) => missing(SECRET, KEY_ID),
        _ => None,
    }
}

/// The endpoint that variables or the profile set, in AWS's order.
fn endpoint(environment: &Environment, profile: Option<&Profile>) -> Option<String> {
    let set = environment.get(&ENDPOINTS);
    // The profile's own section for S3 comes before what it says of all services.
    set.map(str::to_owned).or_else(|| profile?.get("AWS_ENDPOINT_URL", "endpoint_url"))
}

/// The file of certificates that the profile names, unless a variable does.
fn certificates(environment: &Environment, profile: Option<&Profile>) -> Option<String> {
    const VARIABLE: &str = "AWS_CA_BUNDLE";
    environment.get(&[VARIABLE]).is_none().then(|| profile?.get(VARIABLE, "ca_bundle")).flatten()
}

fn custom(
    builder: AmazonS3Builder,
    endpoint: &str,
    bucket: &str,
    by_host: bool,
    environment: &Environment,
) -> Result<AmazonS3Builder> {
    let refuse = |cause: &str| {
        let shown = environment.scrub(&shown_setting(endpoint));
        Error::new(ErrorKind::Config, format!("the S3 endpoint {shown:?} {cause}"))
            .remedy("Set AWS_ENDPOINT_URL_S3, or the option endpoint_url, to a URL such as https://storage.example.com:9000")
    };
    let url = url::Url::parse(endpoint).map_err(|_| refuse("is not a URL"))?;
    check_endpoint("the S3 endpoint", endpoint)?;
    let Some(host) = url.host_str().filter(|_| ["http", "https"].contains(&url.scheme())) else {
        return Err(refuse("is not an HTTP URL"));
    };
    let builder = builder.with_allow_http(url.scheme() == "http");
    if !by_host {
        return Ok(builder
            .with_virtual_hosted_style_request(false)
            .with_endpoint(endpoint.trim_end_matches('/')));
    }
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    let path = url.path().trim_end_matches('/');
    let endpoint = format!("{}://{bucket}.{host}{port}{path}", url.scheme());
    Ok(builder.with_virtual_hosted_style_request(true).with_endpoint(endpoint))
}

fn requester_pays(environment: &Environment) -> bool {
    let payer = environment.get(&["AWS_REQUEST_PAYER"]);
    payer.is_some_and(|payer| payer.eq_ignore_ascii_case("requester") || payer.eq_ignore_ascii_case("true"))
}
