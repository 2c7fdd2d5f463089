//! Google's federated identities: a subject token from wherever it is, shown to an imitation of Google's token service
//! and of IAM, for a token that the storage is asked with.

use std::os::unix::fs::PermissionsExt;

use penstock::ErrorKind;
use penstock::store::{Environment, RemoteStore, Store};
use serde_json::{Value, json};

use super::google::{AUDIENCE, Google, JWT, SECRET, SUBJECT, bearer, form};
use super::servers::http::{Act, Request, Server, Source};
use super::servers::policy;
use super::{SIZE, content, read, refused, says, soon};

#[test]
fn a_token_of_a_file_is_exchanged_once_for_many_requests() {
    let Some(google) = Google::start() else { return };
    google.reads(&google.of_file(), &[]);
    assert_eq!((google.tokens.requests(), google.storage.requests()), (1, 2));
    // As JSON, and by the file that `gcloud` writes.
    google.write("subject", &json!({"id": SUBJECT}).to_string());
    let format = json!({"type": "json", "subject_token_field_name": "id"});
    let source = json!({"file": google.directory.path().join("subject"), "format": format});
    let settings = google.settings(source, json!({}));
    let home = google.directory.path().join(".config/gcloud");
    std::fs::create_dir_all(&home).unwrap();
    std::fs::write(home.join("application_default_credentials.json"), settings.to_string()).unwrap();
    let variables = [
        ("HOME", google.directory.path().to_str().unwrap().to_owned()),
        ("GOOGLE_BASE_URL", google.storage.url("")),
    ];
    google.give(|_| ("token-0".into(), 3600));
    let store = RemoteStore::new(Environment::of(variables), policy());
    assert_eq!(store.open(&google.location).unwrap().bytes(), SIZE as u64);
    assert_eq!(google.tokens.requests(), 1);
}

#[test]
fn gclouds_files_are_found_where_they_were_moved_to() {
    let Some(google) = Google::start() else { return };
    let (base, directory) = (google.storage.url(""), google.directory.path().to_str().unwrap().to_owned());
    let variables = [("CLOUDSDK_CONFIG", &*directory), ("HOME", "/nowhere"), ("GOOGLE_BASE_URL", &*base)];
    let store = RemoteStore::new(Environment::of(variables), policy());
    google.write("application_default_credentials.json", &google.of_file().to_string());
    let location = google.location.clone();
    assert_eq!(soon(move || store.open(&location).unwrap().bytes()), SIZE as u64);
    // Those of a person, which `object_store` reads, too.
    google.write("application_default_credentials.json", r#"{"type":"authorized_user"}"#);
    let variables = [("CLOUDSDK_CONFIG", &*directory), ("GOOGLE_BASE_URL", &*base)];
    let error = refused(&RemoteStore::new(Environment::of(variables), policy()), &google.location);
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    says(&error, &["client_id"]);
}

#[test]
fn a_token_of_a_url_is_asked_for_with_its_headers() {
    let Some(google) = Google::start() else { return };
    let service = Server::start(Source::default());
    service.script(|request, _| match request.headers.get("metadata").map(String::as_str) {
        Some("True") => Act::Answer(json!({"access_token": SUBJECT}).to_string()),
        _ => Act::Refuse(400, Vec::new(), String::new()),
    });
    let source = |header: &str| {
        let format = json!({"type": "json", "subject_token_field_name": "access_token"});
        json!({"url": service.url("/identity"), "headers": {"Metadata": header}, "format": format})
    };
    google.reads(&google.settings(source("True"), json!({})), &[]);
    let error = google.denied(&google.settings(source("SENTINEL"), json!({})), &[]);
    says(&error, &["token of http server 127.0.0.1", "the server of the token", "HTTP 400", "headers"]);
}

#[test]
fn a_program_makes_tokens_only_where_that_is_allowed() {
    let Some(google) = Google::start() else { return };
    let answer = json!({"version": 1, "success": true, "token_type": JWT, "id_token": SUBJECT});
    let answer = google.write("answer.json", &answer.to_string());
    let ran = google.directory.path().join("ran").to_str().unwrap().to_owned();
    let program = google.write(
        "program",
        &format!("#!/bin/sh\necho \"$1 $GOOGLE_EXTERNAL_ACCOUNT_AUDIENCE\" >> {ran}\ncat {answer}\n"),
    );
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let settings = google.settings(json!({"executable": {"command": format!("{program} --now")}}), json!({}));
    let error = google.denied(&settings, &[]);
    says(&error, &["token of program", "may not be run", "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES=1"]);
    assert!(!std::fs::exists(&ran).unwrap());
    let allowed = [("GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES", "1")];
    google.reads(&settings, &allowed);
    assert_eq!(std::fs::read_to_string(&ran).unwrap(), format!("--now {AUDIENCE}\n"));
    // One that refuses, one that hangs, one that is not there.
    let refusal = json!({"version": 1, "success": false, "code": "401", "message": "Caller not authorized"});
    google.write("answer.json", &refusal.to_string());
    says(&google.denied(&settings, &allowed), &["Caller not authorized (401)", "by hand"]);
    let hanging = json!({"executable": {"command": "sleep 3600", "timeout_millis": 200}});
    says(&google.denied(&google.settings(hanging, json!({})), &allowed), &["longer than 200 ms"]);
    let missing = json!({"executable": {"command": "/no/such/program"}});
    says(&google.denied(&google.settings(missing, json!({})), &allowed), &["could not be run"]);
}

#[test]
fn what_a_program_left_in_its_file_is_used_until_it_expires() {
    let Some(google) = Google::start() else { return };
    let answer = |end: u64| json!({"version": 1, "success": true, "token_type": JWT, "id_token": SUBJECT, "expiration_time": end});
    let left = google.write("left.json", &answer(4_000_000_000).to_string());
    let settings =
        google.settings(json!({"executable": {"command": "false", "output_file": left}}), json!({}));
    let allowed = [("GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES", "1")];
    google.reads(&settings, &allowed);
    google.write("left.json", &answer(1_000_000_000).to_string());
    says(&google.denied(&settings, &allowed), &["the program failed with exit status: 1"]);
}

#[test]
fn credentials_of_aws_sign_a_request_that_is_the_token() {
    let Some(google) = Google::start() else { return };
    let source = json!({
        "environment_id": "aws1",
        "regional_cred_verification_url":
            "https://sts.{region}.amazonaws.com?Action=GetCallerIdentity&Version=2011-06-15",
    });
    google.tokens.script(|request, _| {
        let form = form(request);
        let (_, token) = form.iter().find(|(name, _)| name == "subject_token").unwrap();
        let decoded =
            url::form_urlencoded::parse(format!("t={token}").as_bytes()).next().unwrap().1.into_owned();
        let signed: Value = serde_json::from_str(&decoded).unwrap();
        let url = "https://sts.eu-north-1.amazonaws.com?Action=GetCallerIdentity&Version=2011-06-15";
        assert_eq!((&signed["url"], &signed["method"]), (&json!(url), &json!("POST")));
        assert!(signed["headers"].as_array().unwrap().iter().any(|header| header["value"] == AUDIENCE));
        Act::Answer(json!({"access_token": "token-0", "expires_in": 3600}).to_string())
    });
    let settings = google.settings(source, json!({}));
    let keys =
        [("AWS_ACCESS_KEY_ID", "AKID"), ("AWS_SECRET_ACCESS_KEY", SECRET), ("AWS_REGION", "eu-north-1")];
    google.reads(&settings, &keys);
    says(
        &google.denied(&settings, &[]),
        &["AWS credentials", "no AWS credentials were found", "AWS_ACCESS_KEY_ID"],
    );
}

#[test]
fn a_service_account_is_acted_as() {
    let Some(google) = Google::start() else { return };
    google.accept("account-token");
    let email = "loader@project.iam.gserviceaccount.com";
    let path = format!("/v1/projects/-/serviceAccounts/{email}:generateAccessToken");
    let expected = path.clone();
    let answer = |request: &Request, expected: &str| {
        if request.path == "/token" {
            let cloud = "https://www.googleapis.com/auth/cloud-platform";
            assert!(form(request).contains(&("scope".into(), cloud.into())));
            // A client of a workforce pool.
            assert_eq!(
                request.headers["authorization"],
                format!("Basic {}", "bWU6U0VOVElORUwtY2xpZW50LXNlY3JldA==")
            );
            return Act::Answer(
                json!({"access_token": "SENTINEL-federated", "expires_in": 3600}).to_string(),
            );
        }
        assert_eq!((request.path.as_str(), bearer(request)), (expected, "SENTINEL-federated"));
        let asked: Value = serde_json::from_slice(&request.body).unwrap();
        assert_eq!(asked["lifetime"], "600s");
        assert_eq!(asked["scope"], json!(["https://www.googleapis.com/auth/devstorage.read_only"]));
        Act::Answer(json!({"accessToken": "account-token", "expireTime": "2099-01-01T00:00:00Z"}).to_string())
    };
    google.tokens.script(move |request, _| answer(request, &expected));
    let settings = google.settings(
        json!({"file": google.directory.path().join("subject")}),
        json!({
            "service_account_impersonation_url": google.tokens.url(&path),
            "service_account_impersonation": {"token_lifetime_seconds": 600},
            "client_id": "me",
            "client_secret": SECRET,
        }),
    );
    google.reads(&settings, &[]);
    assert_eq!(google.tokens.requests(), 2);
    // An identity that may not.
    google.tokens.script(move |request, _| match request.path.as_str() {
        "/token" => answer(request, ""),
        _ => {
            let said = "Permission 'iam.serviceAccounts.getAccessToken' denied for SENTINEL-federated";
            let error = json!({"error": {"code": 403, "message": said, "status": "PERMISSION_DENIED"}});
            Act::Refuse(403, Vec::new(), error.to_string())
        }
    });
    let error = google.denied(&settings, &[]);
    says(&error, &["Google's IAM", "HTTP 403 PERMISSION_DENIED", "getAccessToken", email]);
    says(&error, &["roles/iam.workloadIdentityUser"]);
}

#[test]
fn tokens_are_renewed_while_a_load_goes_on() {
    let Some(google) = Google::start() else { return };
    google.give(|number| (format!("token-{number}"), 2));
    google.renews(&google.of_file());
}

#[test]
fn a_token_that_storage_takes_no_longer_is_fetched_anew_once() {
    let Some(google) = Google::start() else { return };
    let object = google.store(&google.of_file(), &[]).open(&google.location).unwrap();
    google.accept("token-1");
    let (bytes, cx) = read(object.as_ref(), 600_000, 2_000_000).unwrap();
    assert!(bytes == content(SIZE)[600_000..2_600_000]);
    assert_eq!((cx.calls, google.tokens.requests()), (2, 2));
    google.accept("none");
    let error = soon(move || read(object.as_ref(), 600_000, 2_000_000)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Access);
    says(&error, &["HTTP 401 AuthenticationRequired", "a federated identity", "token of file"]);
    assert_eq!(google.tokens.requests(), 3);
}

#[test]
fn a_token_service_that_is_busy_is_asked_again() {
    let Some(google) = Google::start() else { return };
    google.tokens.script(|_, number| match number {
        0 => Act::Refuse(503, Vec::new(), String::new()),
        1 => Act::ResetAtOnce,
        2 => Act::Refuse(429, Vec::new(), String::new()),
        _ => Act::Answer(json!({"access_token": "token-0", "expires_in": 3600}).to_string()),
    });
    google.reads(&google.of_file(), &[]);
    assert_eq!((google.tokens.requests(), google.storage.requests()), (4, 2));
    google.tokens.script(|_, _| Act::Refuse(503, Vec::new(), String::new()));
    let (store, location) = (
        google.store(&google.settings(json!({"file": google.write("other", SUBJECT)}), json!({})), &[]),
        google.location,
    );
    let error = soon(move || refused(&store, &location));
    assert_eq!(error.kind(), ErrorKind::Storage);
    says(&error, &["10 failed requests", "Google's token service (127.0.0.1) answered HTTP 503"]);
}

#[test]
fn what_is_wrong_is_told_with_its_source_and_no_secret() {
    let Some(google) = Google::start() else { return };
    google.write("subject", "SENTINEL-of-another");
    let error = google.denied(&google.of_file(), &[]);
    says(
        &error,
        &["token of file", "Google's token service", "HTTP 400 invalid_grant: The token is not a JWT"],
    );
    says(&error, &["audience"]);
    // A service that repeats what it was shown.
    google.tokens.script(|_, _| {
        let said = json!({"error": "invalid_grant", "error_description": "bad token SENTINEL-of-another"});
        Act::Refuse(400, Vec::new(), said.to_string())
    });
    says(&google.denied(&google.of_file(), &[]), &["bad token ***"]);
    std::fs::remove_file(google.directory.path().join("subject")).unwrap();
    says(&google.denied(&google.of_file(), &[]), &["token of file", "No such file", "Mount the token"]);
    google.write("subject", "");
    says(&google.denied(&google.of_file(), &[]), &["it holds no token"]);
    // Settings that cannot be.
    let mut settings = google.of_file();
    settings["token_url"] = "http://sts.example.com/token".into();
    let error = refused(&google.store(&settings, &[]), &google.location);
    assert_eq!(error.kind(), ErrorKind::Config);
    says(&error, &["GOOGLE_APPLICATION_CREDENTIALS=", "token_url is not an HTTPS URL", "create-cred-config"]);
}
