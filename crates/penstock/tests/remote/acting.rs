//! Google's service accounts that others act as: people who signed in, someone of a workforce pool, a workload elsewhere, a
//! key. And workforce logins by themselves.

use std::process::Command;
use std::sync::{Arc, Mutex};

use penstock::ErrorKind;
use penstock::store::Store;
use serde_json::{Value, json};

use super::google::{Google, SECRET, bearer, form};
use super::servers::http::{Act, Request};
use super::{SIZE, content, read, refused, says, soon};

const REFRESH: &str = "SENTINEL-refresh-token";
const EMAIL: &str = "loader@project.iam.gserviceaccount.com";
const READ: &str = "https://www.googleapis.com/auth/devstorage.read_only";
const CLOUD: &str = "https://www.googleapis.com/auth/cloud-platform";
/// `me` and [`SECRET`], as clients of HTTP write them.
const CLIENT: &str = "Basic bWU6U0VOVElORUwtY2xpZW50LXNlY3JldA==";

fn path_of(account: &str) -> String {
    format!("/v1/projects/-/serviceAccounts/{account}:generateAccessToken")
}

/// A person's login, as `gcloud` writes it, with a token service of this machine.
fn person(google: &Google) -> Value {
    json!({
        "type": "authorized_user",
        "client_id": "me",
        "client_secret": SECRET,
        "refresh_token": REFRESH,
        "quota_project_id": "paying",
        "token_uri": google.tokens.url("/token"),
    })
}

/// A login of a workforce pool.
fn workforce(google: &Google) -> Value {
    json!({
        "type": "external_account_authorized_user",
        "audience": "//iam.googleapis.com/locations/global/workforcePools/pool/providers/idp",
        "client_id": "me",
        "client_secret": SECRET,
        "refresh_token": REFRESH,
        "token_url": google.tokens.url("/oauthtoken"),
        "token_info_url": "https://sts.googleapis.com/v1/introspect",
    })
}

/// What `gcloud auth application-default login --impersonate-service-account` writes.
fn acting(google: &Google, source: Value, delegates: &[&str]) -> Value {
    json!({
        "type": "impersonated_service_account",
        "delegates": delegates,
        "service_account_impersonation_url": google.tokens.url(&path_of(EMAIL)),
        "source_credentials": source,
    })
}

fn oauth(token: &str) -> Act {
    Act::Answer(json!({"access_token": token, "expires_in": 3599, "token_type": "Bearer"}).to_string())
}

/// What IAM answers, after what it is asked is compared.
fn iam(request: &Request, by: &str, delegates: &[&str], scope: &str, token: &str) -> Act {
    assert_eq!(bearer(request), by);
    let asked: Value = serde_json::from_slice(&request.body).unwrap();
    assert_eq!(asked, json!({"delegates": delegates, "lifetime": "3600s", "scope": [scope]}));
    Act::Answer(json!({"accessToken": token, "expireTime": "2099-01-01T00:00:00Z"}).to_string())
}

/// What the token service answers to a person, after what it is asked is compared.
fn to_person(request: &Request) -> Act {
    let pairs = [
        ("grant_type", "refresh_token"),
        ("refresh_token", REFRESH),
        ("client_id", "me"),
        ("client_secret", SECRET),
    ];
    assert_eq!(form(request), pairs.map(|(key, value)| (key.to_owned(), value.to_owned())));
    assert_eq!((request.method.as_str(), request.headers.get("authorization")), ("POST", None));
    oauth("SENTINEL-of-person")
}

#[test]
fn a_person_acts_as_a_service_account_by_way_of_delegates() {
    let Some(google) = Google::start() else { return };
    google.accept("account-token");
    let delegates = ["projects/-/serviceAccounts/between@project.iam.gserviceaccount.com"];
    google.tokens.script(move |request, _| match request.path.as_str() {
        "/token" => to_person(request),
        path => {
            assert_eq!((path, request.headers["x-goog-user-project"].as_str()), (&*path_of(EMAIL), "paying"));
            iam(request, "SENTINEL-of-person", &delegates, READ, "account-token")
        }
    });
    google.reads(&acting(&google, person(&google), &delegates), &[]);
    assert_eq!((google.tokens.requests(), google.storage.requests()), (2, 2));
}

#[test]
fn where_gcloud_wrote_it_it_is_found() {
    let Some(google) = Google::start() else { return };
    google.accept("account-token");
    google.tokens.script(|request, _| match request.path.as_str() {
        "/token" => to_person(request),
        _ => iam(request, "SENTINEL-of-person", &[], READ, "account-token"),
    });
    let file = acting(&google, person(&google), &[]).to_string();
    google.write("application_default_credentials.json", &file);
    let (base, directory) = (google.storage.url(""), google.directory.path().to_str().unwrap().to_owned());
    let variables = [("CLOUDSDK_CONFIG", &*directory), ("GOOGLE_BASE_URL", &*base)];
    let environment = penstock::store::Environment::of(variables);
    let store = penstock::store::RemoteStore::new(environment, super::servers::policy());
    let location = google.location;
    assert_eq!(soon(move || store.open(&location).unwrap().bytes()), SIZE as u64);
}

#[test]
fn a_login_that_is_over_says_how_to_sign_in_again() {
    let Some(google) = Google::start() else { return };
    google.tokens.script(|_, _| {
        let said = format!("Token has been expired or revoked: {REFRESH} of {SECRET}");
        let error = json!({"error": "invalid_grant", "error_description": said});
        Act::Refuse(400, Vec::new(), error.to_string())
    });
    let error = google.denied(&acting(&google, person(&google), &[]), &[]);
    says(&error, &["a Google login (", EMAIL, "Google's token service (127.0.0.1) answered HTTP 400"]);
    says(&error, &["invalid_grant: Token has been expired or revoked: *** of ***"]);
    says(&error, &["gcloud auth application-default login --impersonate-service-account=loader@project"]);
    let error = google.denied(&workforce(&google), &[]);
    says(
        &error,
        &["a workforce login (", "HTTP 400 invalid_grant", "application-default login --login-config"],
    );
}

#[test]
fn a_person_who_may_not_act_is_told_which_role_it_takes() {
    let Some(google) = Google::start() else { return };
    google.tokens.script(|request, _| match request.path.as_str() {
        "/token" => to_person(request),
        _ => {
            let said = "Permission 'iam.serviceAccounts.getAccessToken' denied for SENTINEL-of-person";
            let error = json!({"error": {"code": 403, "message": said, "status": "PERMISSION_DENIED"}});
            Act::Refuse(403, Vec::new(), error.to_string())
        }
    });
    let error = google.denied(&acting(&google, person(&google), &["projects/-/serviceAccounts/x"]), &[]);
    says(
        &error,
        &["a Google login (", "Google's IAM", "HTTP 403 PERMISSION_DENIED", "getAccessToken", EMAIL],
    );
    says(&error, &["denied for ***", "each delegate", "roles/iam.serviceAccountTokenCreator"]);
    // Nor what came with it is anyone's to see.
    google.tokens.script(|_, _| Act::Answer("{\"id_token\": \"SENTINEL\"}".into()));
    let error = google.denied(&acting(&google, person(&google), &[]), &[]);
    says(&error, &["Google's token service gave no token"]);
}

#[test]
fn someone_of_a_workforce_pool_is_known_by_the_refresh_token_given_last() {
    let Some(google) = Google::start() else { return };
    // Every answer brings another refresh token, and the one before it is of no use any longer.
    google.tokens.script(|request, number| {
        assert_eq!((request.path.as_str(), &*request.headers["authorization"]), ("/oauthtoken", CLIENT));
        let shown = if number == 0 { REFRESH.to_owned() } else { format!("SENTINEL-refresh-{number}") };
        let pairs = [("grant_type", "refresh_token"), ("refresh_token", &*shown)];
        assert_eq!(form(request), pairs.map(|(key, value)| (key.to_owned(), value.to_owned())));
        let (token, next) = (format!("token-{number}"), format!("SENTINEL-refresh-{}", number + 1));
        let answer = json!({"access_token": token, "refresh_token": next, "expires_in": 2});
        Act::Answer(answer.to_string())
    });
    google.renews(&workforce(&google));
}

#[test]
fn someone_of_a_workforce_pool_acts_as_a_service_account_too() {
    let Some(google) = Google::start() else { return };
    google.accept("account-token");
    google.tokens.script(|request, _| match request.path.as_str() {
        "/oauthtoken" => {
            assert_eq!(request.headers["authorization"], CLIENT);
            oauth("SENTINEL-of-pool")
        }
        _ => iam(request, "SENTINEL-of-pool", &[], READ, "account-token"),
    });
    google.reads(&acting(&google, workforce(&google), &[]), &[]);
}

#[test]
fn a_workload_elsewhere_acts_as_one_account_that_acts_as_another() {
    let Some(google) = Google::start() else { return };
    google.accept("account-token");
    let (first, last) = (path_of("first@project.iam.gserviceaccount.com"), path_of(EMAIL));
    let path = first.clone();
    google.tokens.script(move |request, _| match request.path.as_str() {
        "/token" => {
            assert!(form(request).contains(&("scope".into(), CLOUD.into())));
            oauth("SENTINEL-federated")
        }
        path if path == first => iam(request, "SENTINEL-federated", &[], CLOUD, "SENTINEL-first"),
        path => {
            assert_eq!(path, last);
            iam(request, "SENTINEL-first", &[], READ, "account-token")
        }
    });
    let more = json!({"service_account_impersonation_url": google.tokens.url(&path)});
    let source = google.settings(json!({"file": google.directory.path().join("subject")}), more);
    let file = acting(&google, source, &[]);
    google.reads(&file, &[]);
    assert_eq!(google.tokens.requests(), 3);
    // Whoever is in the way is named.
    google.tokens.script(|_, _| Act::Refuse(401, Vec::new(), String::new()));
    let error = google.denied(&file, &[]);
    says(&error, &["a federated identity", "as first@project.iam", &format!("as {EMAIL}")]);
}

#[test]
fn a_key_makes_out_a_token_for_itself_and_acts_with_it() {
    let Some(google) = Google::start() else { return };
    let made = Command::new("openssl").args(["genpkey", "-algorithm", "RSA", "-quiet"]).output();
    let Some(pem) = made.ok().filter(|made| made.status.success()) else {
        eprintln!("skipped: openssl, which makes the key, is not installed");
        return;
    };
    google.accept("account-token");
    let given = Arc::new(Mutex::new(String::new()));
    let giving = Arc::clone(&given);
    google.tokens.script(move |request, _| {
        assert_eq!(request.path, path_of(EMAIL));
        *giving.lock().unwrap() = bearer(request).to_owned();
        iam(request, bearer(request), &[], READ, "account-token")
    });
    let key = json!({
        "type": "service_account",
        "client_email": "key@project.iam.gserviceaccount.com",
        "private_key": String::from_utf8(pem.stdout).unwrap(),
        "private_key_id": "SENTINEL-id",
        // Not of a key: with it, `object_store` makes out empty tokens.
        "disable_oauth": true,
    });
    let file = acting(&google, key, &[]);
    google.reads(&file, &[]);
    assert_eq!(google.tokens.requests(), 1);
    let token = given.lock().unwrap().clone();
    let parts: Vec<_> = token.split('.').collect();
    assert_eq!(parts.len(), 3, "{token}");
    let claims = json_of(parts[1]);
    assert_eq!(claims["iss"], "key@project.iam.gserviceaccount.com");
    assert_eq!(claims["scope"], CLOUD);
    assert_eq!(json_of(parts[0])["alg"], "RS256");
    assert!(!parts[2].is_empty());
    // A key that was deleted.
    google.tokens.script(|_, _| {
        let error = json!({"error": {"code": 401, "message": "invalid", "status": "UNAUTHENTICATED"}});
        Act::Refuse(401, Vec::new(), error.to_string())
    });
    let error = google.denied(&file, &[]);
    says(&error, &["a service account's key (", "key@project.iam", "HTTP 401 UNAUTHENTICATED"]);
}

/// What a part of a token says.
fn json_of(part: &str) -> Value {
    let bits = part.bytes().flat_map(|byte| {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'-' => 62,
            _ => 63,
        };
        (0..6).rev().map(move |bit| value >> bit & 1)
    });
    let bits: Vec<_> = bits.collect();
    let bytes: Vec<_> =
        bits.chunks_exact(8).map(|eight| eight.iter().fold(0, |byte, bit| byte << 1 | bit)).collect();
    serde_json::from_slice(&bytes).unwrap()
}

#[test]
fn an_account_that_storage_takes_no_longer_is_asked_for_anew_once() {
    let Some(google) = Google::start() else { return };
    google.accept("account-token-1");
    google.tokens.script(|request, number| match request.path.as_str() {
        "/token" => to_person(request),
        _ => iam(request, "SENTINEL-of-person", &[], READ, &format!("account-token-{number}")),
    });
    let object = google.store(&acting(&google, person(&google), &[]), &[]).open(&google.location).unwrap();
    google.accept("account-token-3");
    let (bytes, cx) = read(object.as_ref(), 600_000, 2_000_000).unwrap();
    assert!(bytes == content(SIZE)[600_000..2_600_000]);
    assert_eq!((cx.calls, google.tokens.requests()), (2, 4));
    google.accept("none");
    let error = soon(move || read(object.as_ref(), 600_000, 2_000_000)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Access);
    says(&error, &["HTTP 401 AuthenticationRequired", "a Google login (", EMAIL]);
    assert_eq!(google.tokens.requests(), 6);
}

#[test]
fn a_busy_iam_is_asked_again() {
    let Some(google) = Google::start() else { return };
    google.accept("account-token");
    google.tokens.script(|request, number| match (request.path.as_str(), number) {
        ("/token", _) => to_person(request),
        (_, 1) => Act::Refuse(503, Vec::new(), String::new()),
        (_, 3) => Act::ResetAtOnce,
        _ => iam(request, "SENTINEL-of-person", &[], READ, "account-token"),
    });
    google.reads(&acting(&google, person(&google), &[]), &[]);
    assert_eq!((google.tokens.requests(), google.storage.requests()), (6, 2));
}

#[test]
fn a_file_that_sends_secrets_elsewhere_is_refused() {
    let Some(google) = Google::start() else { return };
    let mut file = acting(&google, person(&google), &[]);
    file["source_credentials"]["token_uri"] = "http://tokens.example.com/SENTINEL".into();
    let error = refused(&google.store(&file, &[]), &google.location);
    assert_eq!(error.kind(), ErrorKind::Config);
    says(&error, &["GOOGLE_APPLICATION_CREDENTIALS=", "source_credentials: token_uri is not an HTTPS URL"]);
    assert!(!error.to_string().contains("SENTINEL"), "{error}");
}
