//! What refusals of the real servers become, and that no secret is in them.

use std::time::Duration;

use penstock::ErrorKind;
use penstock::store::{Environment, RemoteStore, Store};

use super::servers::http::{Act, Server, Source};
use super::servers::{self, AZURE_ACCOUNT, BUCKET, S3_KEY, azure_environment, policy, s3_environment};
use super::{content, refused, says};

const SENTINEL: &str = "SENTINEL-do-not-show";

#[test]
fn missing_buckets_and_keys_are_told_apart() {
    for remote in servers::all() {
        let error = refused(&remote.store, &format!("{}/none/m.safetensors", remote.root));
        assert_eq!(error.kind(), ErrorKind::NotFound, "{}: {error}", remote.name);
        says(&error, &["HTTP 404", "/none/m.safetensors"]);
        let (scheme, _) = remote.root.split_once("://").unwrap();
        if remote.name != "HTTP" {
            let error = refused(&remote.store, &format!("{scheme}://no-such-bucket-here/m.safetensors"));
            assert_eq!(error.kind(), ErrorKind::NotFound, "{}: {error}", remote.name);
        }
    }
}

#[test]
fn wrong_keys_are_denied_and_not_shown() {
    let Some(s3) = servers::s3() else { return };
    let location = s3.put("denied.safetensors", &content(100));
    let endpoint = format!("http://{}", s3.server);
    let tried = [
        (S3_KEY, SENTINEL, "SignatureDoesNotMatch", "Check the access key and its secret"),
        // versitygw's word for it, with a status of 404.
        ("UNKNOWNACCESSKEY", SENTINEL, "UserNotFound", "Check the access key and its secret"),
    ];
    for (key, secret, code, remedy) in tried {
        let environment = Environment::of([
            ("AWS_ENDPOINT_URL_S3", &*endpoint),
            ("AWS_ACCESS_KEY_ID", key),
            ("AWS_SECRET_ACCESS_KEY", secret),
        ]);
        let store = RemoteStore::new(environment, policy());
        let error = refused(&store, &location);
        assert_eq!(error.kind(), ErrorKind::Access, "{error}");
        says(&error, &["S3 answered HTTP 40", code, "credentials: environment variables", remedy, &location]);
        let shown = format!("{error} {error:?} {store:?}");
        assert!(!shown.contains(SENTINEL) && !shown.contains("SENTINEL"), "{shown}");
    }
    // Unsigned only where that is asked for.
    let anonymous = Environment::of([("AWS_ENDPOINT_URL_S3", &*endpoint), ("AWS_SKIP_SIGNATURE", "true")]);
    let error = refused(&RemoteStore::new(anonymous, policy()), &location);
    assert_eq!(error.kind(), ErrorKind::Access, "{error}");
    says(&error, &["credentials: none", "AWS_SKIP_SIGNATURE"]);
    let none = Environment::of([("AWS_ENDPOINT_URL_S3", &*endpoint)]);
    let error = refused(&RemoteStore::new(none, policy()), &location);
    assert_eq!(error.kind(), ErrorKind::Access, "{error}");
    says(&error, &["no AWS credentials were found"]);
}

#[test]
fn azure_denies_without_showing_keys_or_signatures() {
    let Some(azure) = servers::azure() else { return };
    let location = azure.put("denied.safetensors", &content(100));
    let endpoint = format!("http://{}/{AZURE_ACCOUNT}", azure.server);
    // "U0VO…" is base64, as keys are.
    let wrong_key = "U0VOVElORUwtZG8tbm90LXNob3c=";
    let with_key = format!("AccountName={AZURE_ACCOUNT};AccountKey={wrong_key};BlobEndpoint={endpoint}");
    let with_sas = format!(
        "AccountName={AZURE_ACCOUNT};BlobEndpoint={endpoint};SharedAccessSignature=sv=2021-08-06&ss=b&srt=sco&sp=rl&\
         se=2020-01-01T00:00:00Z&sig={SENTINEL}"
    );
    for connection in [with_key, with_sas] {
        let environment = Environment::of([("AZURE_STORAGE_CONNECTION_STRING", connection)]);
        let store = RemoteStore::new(environment, policy());
        let error = refused(&store, &location);
        assert_eq!(error.kind(), ErrorKind::Access, "{error}");
        says(&error, &["Azure Blob Storage answered HTTP 403", "AZURE_STORAGE_CONNECTION_STRING", &location]);
        let shown = format!("{error} {error:?} {store:?}");
        assert!(!shown.contains(SENTINEL) && !shown.contains(wrong_key), "{shown}");
    }
}

#[test]
fn a_signature_in_a_url_is_not_shown() {
    let server = Server::start(Source::default());
    server.script(|_, _| Act::Refuse(403, Vec::new(), String::new()));
    let store = RemoteStore::new(Environment::default(), policy());
    let address = server.address();
    for location in [
        format!("http://{address}/m.safetensors?X-Amz-Signature={SENTINEL}"),
        format!("http://user:{SENTINEL}@{address}/m.safetensors"),
        format!("http://{address}/?token={SENTINEL}"),
    ] {
        for error in [refused(&store, &location), store.list(&location).unwrap_err()] {
            let shown = format!("{error} {error:?}");
            assert!(!shown.contains(SENTINEL), "{shown}");
            assert_eq!(error.kind(), ErrorKind::Access, "{shown}");
        }
    }
    server.script(|_, _| Act::ResetAtOnce);
    let error = refused(&store, &format!("http://{address}/m.safetensors?X-Amz-Signature={SENTINEL}"));
    assert!(!format!("{error} {error:?}").contains(SENTINEL), "{error}");
}

#[test]
fn what_permissions_would_not_mend_has_a_remedy_of_its_own() {
    let server = Server::start(Source::default());
    let environment =
        Environment::of([("AWS_ENDPOINT_URL", server.url("")), ("AWS_SKIP_SIGNATURE", "true".into())]);
    let store = RemoteStore::new(environment, policy());
    for (code, message, remedy) in [
        (
            "InvalidObjectState",
            "The operation is not valid for the object's storage class",
            "Restore the object",
        ),
        (
            "AccessDenied",
            "User: arn:aws:iam::1:user/u is not authorized to perform: kms:Decrypt",
            "kms:Decrypt in",
        ),
    ] {
        let body = format!("<Error><Code>{code}</Code><Message>{message}</Message></Error>");
        server.script(move |_, _| Act::Refuse(403, Vec::new(), body.clone()));
        let error = refused(&store, "s3://bucket/m.safetensors");
        assert_eq!(error.kind(), ErrorKind::Access, "{error}");
        says(&error, &[code, remedy, &format!("host http://{}", server.address())]);
    }
}

/// S3 behind a proxy that says of requests signed for another region than `home` where the bucket is, with `status` and
/// `code`, as AWS does; and a store that signs for another one.
fn elsewhere(s3: &str, home: &'static str, status: u16, code: &'static str) -> (Server, RemoteStore) {
    let proxy = Server::start(Source::Behind(s3.to_owned()));
    proxy.script(move |request, _| {
        let signed = request.headers.get("authorization").cloned().unwrap_or_default();
        if signed.contains("/us-east-1/") && home == "us-east-1" {
            return Act::Serve;
        }
        let body = format!("<Error><Code>{code}</Code><Message>the region is wrong</Message></Error>");
        Act::Refuse(status, vec![("x-amz-bucket-region", home.into())], body)
    });
    let environment = Environment::of([
        ("AWS_ENDPOINT_URL", proxy.url("")),
        ("AWS_ACCESS_KEY_ID", S3_KEY.into()),
        ("AWS_SECRET_ACCESS_KEY", servers::S3_SECRET.into()),
        ("AWS_REGION", "eu-central-1".into()),
    ]);
    (proxy, RemoteStore::new(environment, policy()))
}

#[test]
fn a_bucket_elsewhere_is_followed_to_its_region() {
    let Some(s3) = servers::s3() else { return };
    let location = s3.put("elsewhere.safetensors", &content(1000));
    for (status, code) in [
        (400, "AuthorizationHeaderMalformed"),
        (301, "PermanentRedirect"),
        (307, "TemporaryRedirect"),
        (403, "InvalidRegion"),
    ] {
        let (proxy, store) = elsewhere(&s3.server, "us-east-1", status, code);
        assert_eq!(store.open(&location).unwrap().bytes(), 1000, "{code}");
        assert_eq!(proxy.requests(), 2, "{code}");
        // And remembered.
        store.open(&location).unwrap();
        store.list(&format!("s3://{BUCKET}/")).unwrap();
        assert_eq!(proxy.requests(), 4, "{code}");
        // A listing that comes first is followed too.
        let (proxy, store) = elsewhere(&s3.server, "us-east-1", status, code);
        store.list(&format!("s3://{BUCKET}/")).unwrap();
        assert_eq!(proxy.requests(), 2, "{code}");
    }
}

#[test]
fn a_bucket_that_is_never_where_it_is_said_to_be_is_not_looked_for_for_ever() {
    let Some(s3) = servers::s3() else { return };
    let location = s3.put("nowhere.safetensors", &content(1000));
    let (proxy, store) = elsewhere(&s3.server, "ap-south-2", 301, "PermanentRedirect");
    let error = super::soon(move || refused(&store, &location));
    assert_eq!((error.kind(), proxy.requests()), (ErrorKind::Storage, 2), "{error}");
    says(&error, &["HTTP 301 PermanentRedirect", "region ap-south-2", "AWS_REGION"]);
}

#[test]
fn credentials_that_have_expired_are_fetched_anew_once() {
    let Some(s3) = servers::s3() else { return };
    let location = s3.put("expired.safetensors", &content(1000));
    let proxy = Server::start(Source::Behind(s3.server.clone()));
    let expired = || Act::Refuse(400, Vec::new(), "<Error><Code>ExpiredToken</Code></Error>".into());
    proxy.script(move |_, n| if n == 0 { expired() } else { Act::Serve });
    let store = RemoteStore::new(s3_environment(&proxy.url("")), policy());
    store.open(&location).unwrap();
    assert_eq!(proxy.requests(), 2);
    proxy.script(move |_, _| expired());
    let error = refused(&store, &location);
    assert_eq!((error.kind(), proxy.requests()), (ErrorKind::Access, 2), "{error}");
    says(&error, &["ExpiredToken", "have expired"]);
}

#[test]
fn settings_that_cannot_be_are_refused_at_once() {
    let tried = [
        ("s3://bucket/m.safetensors", "AWS_ENDPOINT_URL", "not a url", "is not a URL"),
        ("s3://bucket/m.safetensors", "AWS_CA_BUNDLE", "/no/such/file.pem", "AWS_CA_BUNDLE"),
        ("az://container/m.safetensors", "AZURE_NOTHING", "x", "no storage account is named"),
        ("az://container/m.safetensors", "AZURE_STORAGE_CONNECTION_STRING", "x", "no NAME=VALUE"),
        ("az://container/m.safetensors", "AZURE_STORAGE_CONNECTION_STRING", "AccountKey=b", "names neither"),
    ];
    for (location, name, value, says_so) in tried {
        let environment =
            Environment::of([(name, value), ("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", SENTINEL)]);
        let error = refused(&RemoteStore::new(environment, policy()), location);
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        says(&error, &[says_so]);
        assert!(!error.to_string().contains(SENTINEL));
    }
}

#[test]
fn an_idle_limit_ends_a_silent_connection() {
    let server = Server::start(Source::default());
    let location = server.put("/m.safetensors", &content(1000));
    server.script(|_, _| Act::StallAfter(0));
    let mut policy = policy();
    policy.idle = Duration::from_millis(200);
    let store = RemoteStore::new(Environment::default(), policy);
    let error = super::soon(move || refused(&store, &location));
    assert_eq!(error.kind(), ErrorKind::Storage);
    says(&error, &["10 failed requests, the last: nothing came from http://127.0.0.1"]);
}

#[test]
fn a_connection_string_leads_to_the_emulator() {
    let Some(azure) = servers::azure() else { return };
    let location = azure.put("emulated.safetensors", &content(10));
    let url = format!("http://{}", azure.server);
    let store = RemoteStore::new(azure_environment(&url), policy());
    assert_eq!(store.open(&location).unwrap().bytes(), 10);
}
