//! Where keys and tokens come from, against imitations of the services that give them: Azure's identities and its
//! command line's variables, and what S3 is told besides a signature.

use std::sync::{Arc, Mutex};

use penstock::ErrorKind;
use penstock::store::{Environment, RemoteStore, Store};

use super::servers::http::{Act, Request, Server, Source};
use super::servers::{self, AZURE_ACCOUNT, AZURE_KEY, policy};
use super::{content, refused, says};

const TOKEN: &str = "SENTINEL-token";

/// A blob of Azure, and of S3, as far as opening it wants.
fn blob() -> Act {
    let headers = [
        ("content-range", "bytes 0-10/11"),
        ("etag", "\"1\""),
        ("last-modified", "Sat, 21 Nov 2026 00:00:00 GMT"),
    ];
    Act::Refuse(206, headers.map(|(name, value)| (name, value.to_owned())).into(), "hello world".into())
}

/// A storage that wants `TOKEN`, and the service that gives it: one server.
fn azure(token: impl Fn(&Request) -> Act + Send + Sync + 'static) -> (Server, Arc<Mutex<Vec<String>>>) {
    let server = Server::start(Source::default());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&asked);
    server.script(move |request, _| {
        if request.path.starts_with("/storage/") {
            let shown = request.headers.get("authorization").map_or("", String::as_str);
            return if shown == format!("Bearer {TOKEN}") {
                blob()
            } else {
                Act::Refuse(403, vec![("x-ms-error-code", "AuthenticationFailed".into())], String::new())
            };
        }
        let body = String::from_utf8_lossy(&request.body).into_owned();
        log.lock().unwrap().push(format!("{} {} {body}", request.method, request.path));
        token(request)
    });
    (server, asked)
}

fn granted() -> Act {
    Act::Answer(format!(
        "{{\"access_token\":\"{TOKEN}\",\"expires_in\":3600,\"expires_on\":\"4102444800\",\"token_type\":\"Bearer\"}}"
    ))
}

fn azure_store(server: &Server, variables: &[(&str, &str)]) -> RemoteStore {
    let connection = format!("AccountName=acc;BlobEndpoint={}", server.url("/storage"));
    let own = [("AZURE_STORAGE_CONNECTION_STRING", &*connection)];
    RemoteStore::new(Environment::of(own.iter().chain(variables).copied()), policy())
}

/// A store that signs in as a client, by what `proof` says.
fn client(server: &Server, proof: (&str, &str)) -> RemoteStore {
    let authority = server.url("");
    let settings = [
        ("AZURE_AUTHORITY_HOST", &*authority),
        ("AZURE_TENANT_ID", "tenant"),
        ("AZURE_CLIENT_ID", "client"),
        proof,
    ];
    azure_store(server, &settings)
}

#[test]
fn a_managed_identity_is_asked_once() {
    let (server, asked) = azure(|_| granted());
    let endpoint = server.url("/msi/token");
    let store = azure_store(
        &server,
        &[("IDENTITY_ENDPOINT", &endpoint), ("IDENTITY_HEADER", "h"), ("AZURE_CLIENT_ID", "id")],
    );
    store.open("az://c/k").unwrap();
    store.open("az://c/l").unwrap();
    let asked = asked.lock().unwrap();
    assert_eq!(asked.len(), 1, "{asked:?}");
    assert!(asked[0].contains("/msi/token?") && asked[0].contains("client_id=id"), "{asked:?}");
}

#[test]
fn a_client_signs_in_with_a_secret_or_with_what_its_pod_was_given() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    std::fs::write(&file, "SENTINEL-of-the-pod").unwrap();
    let pod = file.to_str().unwrap();
    for (name, value, shown) in [
        ("AZURE_CLIENT_SECRET", "SENTINEL-secret", "client_secret=SENTINEL-secret"),
        ("AZURE_FEDERATED_TOKEN_FILE", pod, "client_assertion=SENTINEL-of-the-pod"),
    ] {
        let (server, asked) = azure(|_| granted());
        client(&server, (name, value)).open("az://c/k").unwrap_or_else(|error| panic!("{name}: {error}"));
        let log = asked.lock().unwrap().clone();
        assert_eq!(log.len(), 1, "{log:?}");
        assert!(log[0].starts_with("POST /tenant/oauth2/v2.0/token ") && log[0].contains(shown), "{log:?}");
        // A refusal says whose it is, and nothing secret.
        let said = r#"{"error":"invalid_client","error_description":"AADSTS7000215: Invalid client secret"}"#;
        let (server, _) = azure(move |_| Act::Refuse(401, vec![], said.into()));
        let error = refused(&client(&server, (name, value)), "az://c/k");
        assert_eq!(error.kind(), ErrorKind::Access, "{error}");
        says(&error, &["AADSTS7000215", &format!("credentials: {name}")]);
        assert!(!format!("{error} {error:?}").contains("SENTINEL"), "{error}");
    }
}

#[test]
fn a_token_that_is_not_there_is_told_at_once() {
    let (server, asked) = azure(|_| granted());
    let error = refused(&client(&server, ("AZURE_FEDERATED_TOKEN_FILE", "/nowhere/token")), "az://c/k");
    assert_eq!(error.kind(), ErrorKind::Access, "{error}");
    says(&error, &["AZURE_FEDERATED_TOKEN_FILE names cannot be read", "Set AZURE_STORAGE_CONNECTION_STRING"]);
    assert_eq!(asked.lock().unwrap().len(), 0);
}

#[test]
fn a_machine_without_an_identity_says_what_to_set() {
    let (server, _) = azure(|_| {
        Act::Refuse(
            400,
            vec![],
            r#"{"error":"invalid_request","error_description":"Identity not found"}"#.into(),
        )
    });
    let endpoint = server.url("/msi/token");
    let store = azure_store(&server, &[("IDENTITY_ENDPOINT", &endpoint)]);
    let error = refused(&store, "az://c/k");
    assert_eq!(error.kind(), ErrorKind::Access, "{error}");
    says(
        &error,
        &[
            "Identity not found",
            "credentials: the machine's managed identity",
            "Set AZURE_STORAGE_CONNECTION_STRING",
        ],
    );
}

#[test]
fn the_command_lines_variables_count() {
    let Some(azure) = servers::azure() else { return };
    let location = azure.put("cli.bin", &content(10));
    let endpoint = format!("BlobEndpoint=http://{}/{AZURE_ACCOUNT}", azure.server);
    // The key alone in its own variable; Azurite wants the endpoint, which is no secret.
    for name in ["AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY"] {
        let environment = Environment::of([
            ("AZURE_STORAGE_CONNECTION_STRING", &*format!("AccountName={AZURE_ACCOUNT};{endpoint}")),
            (name, AZURE_KEY),
        ]);
        let store = RemoteStore::new(environment, policy());
        assert_eq!(store.open(&location).unwrap_or_else(|error| panic!("{name}: {error}")).bytes(), 10);
    }
}

/// A signature of Azurite's account for reading, for good.
const READING: &str = "sv=2019-12-12&ss=b&srt=co&sp=rl&se=2099-01-01T00%3A00%3A00Z&sig=";

#[test]
fn a_signature_may_begin_with_the_question_mark_it_was_copied_with() {
    let server = Server::start(Source::default());
    server
        .script(|request, _| if request.path.ends_with("sig=a%2Bb%3D") { blob() } else { Act::ResetAtOnce });
    let endpoint = format!("AccountName=acc;BlobEndpoint={}", server.url(""));
    for mark in ["", "?"] {
        let signature = format!("{mark}{READING}a%2Bb%3D");
        let in_string = format!("{endpoint};SharedAccessSignature={signature}");
        for environment in [
            Environment::of([("AZURE_STORAGE_CONNECTION_STRING", &*in_string)]),
            Environment::of([
                ("AZURE_STORAGE_CONNECTION_STRING", &*endpoint),
                ("AZURE_STORAGE_SAS_TOKEN", &*signature),
            ]),
        ] {
            let store = RemoteStore::new(environment, policy());
            assert_eq!(
                store.open("az://c/k").unwrap_or_else(|error| panic!("{error}")).bytes(),
                11,
                "{mark:?}"
            );
        }
    }
}

#[test]
fn whoever_asks_pays_where_that_is_said() {
    let server = Server::start(Source::default());
    for (payer, expected) in [(None, None), (Some("requester"), Some("requester".to_owned()))] {
        let seen = Arc::new(Mutex::new(None));
        let log = Arc::clone(&seen);
        server.script(move |request, _| {
            *log.lock().unwrap() = request.headers.get("x-amz-request-payer").cloned();
            blob()
        });
        let url = server.url("");
        let keys = [("AWS_ENDPOINT_URL", &*url), ("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")];
        let payer = payer.map(|payer| ("AWS_REQUEST_PAYER", payer));
        let environment = Environment::of(keys.into_iter().chain(payer));
        RemoteStore::new(environment, policy()).open("s3://b/k").unwrap();
        assert_eq!(*seen.lock().unwrap(), expected);
    }
}
