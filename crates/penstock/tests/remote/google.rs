//! An imitation of what Google has: an emulator of its storage, behind a proxy that looks at tokens, and a service that
//! gives them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use penstock::ErrorKind;
use penstock::store::{Environment, RemoteStore, Store};
use serde_json::{Value, json};

use super::servers::http::{Act, Request, Server, Source};
use super::servers::{self, policy};
use super::{SIZE, content, read, refused, says, soon};

pub(super) const SUBJECT: &str = "SENTINEL-subject-token";
pub(super) const SECRET: &str = "SENTINEL-client-secret";
pub(super) const AUDIENCE: &str =
    "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/k";
pub(super) const JWT: &str = "urn:ietf:params:oauth:token-type:jwt";

/// Everything that Google has here: storage that takes some tokens and no others, and services that give them.
pub(super) struct Google {
    pub(super) location: String,
    pub(super) storage: Server,
    pub(super) tokens: Server,
    pub(super) directory: tempfile::TempDir,
}

impl Google {
    pub(super) fn start() -> Option<Self> {
        let gcs = servers::gcs()?;
        // Each test's own: another's would be replaced under its hands.
        let location = gcs.put(&format!("federated/{}.safetensors", next()), &content(SIZE));
        let google = Self {
            location,
            storage: Server::start(Source::Named(gcs.server.clone())),
            tokens: Server::start(Source::default()),
            directory: tempfile::tempdir().unwrap(),
        };
        google.accept("token-0");
        google.give(|number| (format!("token-{number}"), 3600));
        google.write("subject", SUBJECT);
        Some(google)
    }

    pub(super) fn write(&self, name: &str, text: &str) -> String {
        let path = self.directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Has storage answer to these bearers only, as it does: 401 to others.
    pub(super) fn accept(&self, tokens: &'static str) {
        self.storage.script(move |request, _| {
            let bearer = bearer(request);
            if tokens.split(' ').any(|token| token == bearer) {
                return Act::Serve;
            }
            let body = "<Error><Code>AuthenticationRequired</Code><Message>Authentication required.</Message></Error>";
            Act::Refuse(401, Vec::new(), body.into())
        });
    }

    /// Has the token service give the token and the lifetime that `which` says, and checks what it is asked.
    pub(super) fn give(&self, which: impl Fn(usize) -> (String, u64) + Send + Sync + 'static) {
        self.tokens.script(move |request, number| {
            let form = form(request);
            let field =
                |name: &str| form.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
            assert_eq!((request.method.as_str(), request.path.as_str()), ("POST", "/token"));
            assert_eq!(field("grant_type"), Some("urn:ietf:params:oauth:grant-type:token-exchange"));
            assert_eq!((field("audience"), field("subject_token_type")), (Some(AUDIENCE), Some(JWT)));
            assert_eq!(field("scope"), Some("https://www.googleapis.com/auth/devstorage.read_only"));
            if field("subject_token") != Some(SUBJECT) {
                let said = json!({"error": "invalid_grant", "error_description": "The token is not a JWT"});
                return Act::Refuse(400, Vec::new(), said.to_string());
            }
            let (token, seconds) = which(number);
            Act::Answer(
                json!({"access_token": token, "expires_in": seconds, "token_type": "Bearer"}).to_string(),
            )
        });
    }

    /// The settings of an identity whose token comes from `source`, with `more` of them.
    pub(super) fn settings(&self, source: Value, more: Value) -> Value {
        let mut settings = json!({
            "type": "external_account",
            "audience": AUDIENCE,
            "subject_token_type": JWT,
            "token_url": self.tokens.url("/token"),
            "credential_source": source,
        });
        let fields = more.as_object().cloned().unwrap_or_default();
        settings.as_object_mut().unwrap().extend(fields);
        settings
    }

    pub(super) fn of_file(&self) -> Value {
        self.settings(json!({"file": self.directory.path().join("subject")}), json!({}))
    }

    pub(super) fn store(&self, settings: &Value, variables: &[(&str, &str)]) -> RemoteStore {
        // Under a new name: what is reached with the same variables is set up once.
        let file = self.write(&format!("credentials-{}.json", next()), &settings.to_string());
        let base = self.storage.url("");
        let all = [("GOOGLE_APPLICATION_CREDENTIALS", &*file), ("GOOGLE_BASE_URL", &*base)];
        RemoteStore::new(Environment::of(all.iter().chain(variables).copied()), policy())
    }

    /// Reads through an identity, and checks the bytes.
    pub(super) fn reads(&self, settings: &Value, variables: &[(&str, &str)]) {
        let (store, location) = (self.store(settings, variables), self.location.clone());
        let (bytes, _) =
            soon(move || read(store.open(&location).unwrap().as_ref(), 600_000, 2_000_000)).unwrap();
        assert!(bytes == content(SIZE)[600_000..2_600_000]);
    }

    /// Reads for some seconds through an identity whose tokens, `token-0` and so on, are good for two each, and checks
    /// that they are renewed, and not for every request.
    pub(super) fn renews(&self, settings: &Value) {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let seeing = Arc::clone(&seen);
        // Which one comes with each request is what storage sees.
        self.storage.script(move |request, _| {
            seeing.lock().unwrap().push(bearer(request).to_owned());
            Act::Serve
        });
        let object = self.store(settings, &[]).open(&self.location).unwrap();
        for _ in 0..5 {
            read(object.as_ref(), 1_000_000, 1000).unwrap();
            std::thread::sleep(Duration::from_millis(600));
        }
        let seen = seen.lock().unwrap();
        assert_eq!(seen.first().map(String::as_str), Some("token-0"));
        assert!(seen.contains(&"token-1".to_owned()) && seen.contains(&"token-2".to_owned()), "{seen:?}");
        assert!(self.tokens.requests() < seen.len(), "{seen:?}");
    }

    /// What opening fails with: denied, and without a secret.
    pub(super) fn denied(&self, settings: &Value, variables: &[(&str, &str)]) -> penstock::Error {
        let (store, location) = (self.store(settings, variables), self.location.clone());
        let error = soon(move || refused(&store, &location));
        assert_eq!(error.kind(), ErrorKind::Access, "{error}");
        assert!(!format!("{error} {error:?}").contains("SENTINEL"), "{error:?}");
        let kind = |of: &Value| match of["type"].as_str() {
            Some("external_account") => "a federated identity",
            Some("external_account_authorized_user") => "a workforce login",
            Some("service_account") => "a service account's key",
            _ => "a Google login",
        };
        let acts = settings["type"] == "impersonated_service_account";
        let whose = kind(if acts { &settings["source_credentials"] } else { settings });
        says(&error, &[&self.location, whose, "credentials-"]);
        error
    }
}

fn next() -> usize {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    NUMBER.fetch_add(1, Ordering::SeqCst)
}

pub(super) fn bearer(request: &Request) -> &str {
    request.headers.get("authorization").and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default()
}

pub(super) fn form(request: &Request) -> Vec<(String, String)> {
    url::form_urlencoded::parse(&request.body).into_owned().collect()
}
