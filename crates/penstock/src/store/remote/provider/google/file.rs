//! The file of credentials, taken apart and checked before any request.
//!
//! What it says is where tokens are sent, so it is not believed: token services must be HTTPS, or of this machine. What
//! is wrong with it is told by field, never by content.

use serde::Deserialize;
use serde_json::{Error as JsonError, Value};

use super::Identity;
use super::federated::{self, Federated};
use super::impersonation::Impersonated;
use super::key::Key;
use super::login::{self, Login};
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::http::client_key::ClientKey;

const FEDERATED: &str = "external_account";
const WORKFORCE: &str = "external_account_authorized_user";
const PERSON: &str = "authorized_user";
const KEY: &str = "service_account";
const IMPERSONATED: &str = "impersonated_service_account";

/// An identity, and the service accounts that it acts as, one after the other.
type Parsed = (Identity, Vec<Impersonated>);

#[derive(Deserialize)]
struct Kind {
    #[serde(rename = "type")]
    kind: String,
}

/// A file of type `impersonated_service_account`.
#[derive(Deserialize)]
struct Acting {
    service_account_impersonation_url: String,
    source_credentials: Value,
    delegates: Option<Vec<String>>,
}

/// Who is described in a file of credentials; none where it holds credentials that `object_store` reads, or nothing that
/// can be read. `name` is what errors call it.
///
/// # Errors
/// `Config`, naming what is wrong.
pub(super) fn parse(name: &str, text: &[u8], client: &ClientKey) -> Result<Option<Parsed>> {
    let Ok(Kind { kind }) = serde_json::from_slice(text) else { return Ok(None) };
    let parsed = match kind.as_str() {
        FEDERATED => decode(serde_json::from_slice(text)).and_then(federated),
        WORKFORCE => decode(serde_json::from_slice(text)).and_then(|file| login(file, true)),
        IMPERSONATED => decode(serde_json::from_slice(text)).and_then(|file| acting(file, client)),
        _ => return Ok(None),
    };
    parsed.map(Some).map_err(|cause| {
        let command = match kind.as_str() {
            FEDERATED => "gcloud iam workload-identity-pools create-cred-config",
            _ => "gcloud auth application-default login",
        };
        Error::new(ErrorKind::Config, format!("{name}: {cause}"))
            .remedy(format!("Make the file anew with `{command}`"))
    })
}

fn federated(file: federated::File) -> Result<Parsed, String> {
    let (federated, impersonated) = Federated::of(file)?;
    Ok((Identity::Federated(federated), impersonated.into_iter().collect()))
}

fn login(file: login::File, workforce: bool) -> Result<Parsed, String> {
    Ok((Identity::Login(Login::of(file, workforce)?), Vec::new()))
}

fn acting(file: Acting, client: &ClientKey) -> Result<Parsed, String> {
    let source = file.source_credentials;
    let kind = source.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let who = match kind.as_str() {
        PERSON | WORKFORCE => {
            decode(serde_json::from_value(source)).and_then(|file| login(file, kind == WORKFORCE))
        }
        FEDERATED => decode(serde_json::from_value(source)).and_then(federated),
        KEY => decode(serde_json::from_value(source))
            .and_then(|file| Ok((Identity::Key(Key::of(file, client)?), Vec::new()))),
        _ => Err(format!("their type is none of {PERSON}, {KEY}, {FEDERATED} and {WORKFORCE}")),
    };
    let (identity, mut accounts) = who.map_err(|cause| format!("its source_credentials: {cause}"))?;
    let delegates = file.delegates.unwrap_or_default();
    accounts.push(Impersonated::new(&file.service_account_impersonation_url, delegates, None)?);
    Ok((identity, accounts))
}

/// What was decoded, or what is wrong with it.
fn decode<T>(decoded: Result<T, JsonError>) -> Result<T, String> {
    decoded.map_err(|error| {
        let said = error.to_string();
        // Anything else that the parser says may repeat what the file holds.
        match said.split(" at line").next().filter(|said| said.starts_with("missing field")) {
            Some(missing) => missing.to_owned(),
            None if error.line() == 0 => "a field is not what it should be".into(),
            None => format!("a field at line {} is not what it should be", error.line()),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;
    use crate::store::remote::provider::google::token_client::is_safe;
    use crate::store::remote::request::retry::RetryPolicy;
    use crate::store::remote::settings::address::Provider;
    use crate::store::remote::settings::environment::Environment;
    use url::Url;

    const URL: &str =
        "https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts/a@p.iam:generateAccessToken";

    fn file() -> Value {
        json!({
            "type": "external_account",
            "audience": "//iam.googleapis.com/p",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "credential_source": {"file": "/var/run/token"},
        })
    }

    fn parsed(text: &str) -> Result<Option<Parsed>> {
        let environment = Environment::default();
        let client = ClientKey::of(&environment, Provider::Gcs, RetryPolicy::default(), false).unwrap();
        parse("the file", text.as_bytes(), &client)
    }

    #[test]
    fn other_credentials_are_left_to_others() {
        for text in
            ["{\"type\": \"service_account\"}", "{\"type\": \"authorized_user\"}", "{\"type\": 1}", "{", ""]
        {
            assert!(parsed(text).unwrap().is_none(), "{text}");
        }
    }

    #[test]
    fn the_usual_file_is_taken_apart() {
        let mut file = file();
        file["service_account_impersonation_url"] = URL.into();
        file["service_account_impersonation"] = json!({"token_lifetime_seconds": 600});
        let (identity, accounts) = parsed(&file.to_string()).unwrap().unwrap();
        assert!(matches!(identity, Identity::Federated(_)));
        assert_eq!(accounts.len(), 1);
        assert_eq!(accounts[0].account(), "a@p.iam");
        assert_eq!(accounts[0].lifetime(), Duration::from_secs(600));
        // As what acts as yet another account.
        let file = json!({
            "type": "impersonated_service_account",
            "service_account_impersonation_url": URL.replace("a@p", "b@p"),
            "source_credentials": file,
        });
        let (_, accounts) = parsed(&file.to_string()).unwrap().unwrap();
        let names: Vec<_> = accounts.iter().map(Impersonated::account).collect();
        assert_eq!(names, ["a@p.iam", "b@p.iam"]);
    }

    #[test]
    fn what_cannot_be_used_is_refused_by_field_and_never_shown() {
        let with = |name: &str, value: Value| {
            let mut file = file();
            file[name] = value;
            file
        };
        let source = |source: Value| with("credential_source", source);
        for (file, cause) in [
            (with("token_url", "http://evil.example/SENTINEL".into()), "token_url is not an HTTPS URL"),
            (with("service_account_impersonation_url", "SENTINEL".into()), "impersonation_url is not"),
            (with("client_secret", json!({"SENTINEL": 1})), "a field at line 1 is not"),
            (with("client_secret", json!(["SENTINEL"])), "a field at line 1 is not"),
            (source(json!({})), "none of those that are supported"),
            (source(json!({"certificate": {"x": "SENTINEL"}})), "none of those that are supported"),
            (source(json!({"file": "/a", "url": "https://b"})), "none of those that are supported"),
            (source(json!({"url": "ftp://SENTINEL"})), "not an HTTP URL"),
            (source(json!({"environment_id": "aws2"})), "an AWS that is not known"),
            (source(json!({"file": "/a", "format": {"type": "json"}})), "subject_token_field_name"),
            (source(json!({"file": "/a", "format": {"type": "SENTINEL"}})), "neither text nor json"),
            (json!({"type": "external_account"}), "missing field `audience`"),
        ] {
            let error = parsed(&file.to_string()).map(drop).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(cause) && text.contains("the file"), "{cause:?} is not in: {text}");
            assert!(!text.contains("SENTINEL"), "{text}");
            assert!(error.remedy_text().is_some_and(|remedy| remedy.contains("create-cred-config")));
        }
    }

    #[test]
    fn nor_are_logins_and_what_acts_as_an_account() {
        let login = json!({"client_id": "c", "client_secret": "SENTINEL", "refresh_token": "SENTINEL"});
        let with = |kind: &str, more: Value| {
            let mut file = login.clone();
            file["type"] = kind.into();
            file.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            file
        };
        let acting = |source: Value| {
            json!({
                "type": "impersonated_service_account",
                "service_account_impersonation_url": URL,
                "source_credentials": source,
            })
        };
        let elsewhere = json!({"token_uri": "http://evil.example/SENTINEL"});
        let key = json!({"client_email": "e", "private_key": "SENTINEL", "private_key_id": "SENTINEL"});
        let mut nowhere = acting(with("authorized_user", json!({})));
        nowhere["service_account_impersonation_url"] = "https://iam.example/SENTINEL".into();
        for (file, cause) in [
            (json!({"type": "external_account_authorized_user"}), "missing field `client_id`"),
            (
                with("external_account_authorized_user", json!({"token_url": "ftp://SENTINEL"})),
                "token_url is not",
            ),
            (
                json!({"type": "impersonated_service_account"}),
                "missing field `service_account_impersonation_url`",
            ),
            (acting(json!({})), "source_credentials: their type is none of authorized_user, "),
            (acting(acting(json!({}))), "source_credentials: their type is none of"),
            (acting(json!({"type": "authorized_user"})), "source_credentials: missing field `client_id`"),
            (acting(with("authorized_user", json!({"client_id": {"SENTINEL": 1}}))), "a field is not what"),
            (acting(with("authorized_user", elsewhere)), "source_credentials: token_uri is not an HTTPS URL"),
            (acting(with("service_account", key)), "private_key is not an RSA key"),
            (nowhere, "service_account_impersonation_url names no service account"),
        ] {
            let error = parsed(&file.to_string()).map(drop).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(cause) && text.contains("the file"), "{cause:?} is not in: {text}");
            assert!(!text.contains("SENTINEL"), "{text}");
            assert!(error.remedy_text().is_some_and(|remedy| remedy.contains("application-default login")));
        }
        // Where Google's services are is not said by every file.
        for file in [
            with("external_account_authorized_user", json!({})),
            acting(with("authorized_user", json!({"delegates": null}))),
            acting(with("external_account_authorized_user", json!({}))),
        ] {
            assert!(matches!(parsed(&file.to_string()), Ok(Some((Identity::Login(_), _)))), "{file}");
        }
    }

    #[test]
    fn a_token_service_of_this_machine_needs_no_tls() {
        for (url, safe) in [
            ("http://127.0.0.1:8080/token", true),
            ("http://[::1]/token", true),
            ("http://localhost/token", true),
            ("https://sts.googleapis.com/v1/token", true),
            ("http://localhost.evil.example/token", false),
            ("http://10.0.0.1/token", false),
            ("file:///token", false),
        ] {
            assert_eq!(is_safe(&Url::parse(url).unwrap()), safe, "{url}");
        }
    }
}
