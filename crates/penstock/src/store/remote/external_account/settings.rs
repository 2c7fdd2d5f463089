//! The file of an external account, taken apart and checked before any request.
//!
//! What it says is where tokens are sent, so it is not believed: token services must be HTTPS, or of this machine. What
//! is wrong with it is told by field, never by content.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use url::Url;

use super::subject::{Format, Subject};
use crate::error::{Error, ErrorKind, Result};

const TOKEN_URL: &str = "https://sts.googleapis.com/v1/token";
const REMEDY: &str = "Make the file anew with `gcloud iam workload-identity-pools create-cred-config`";
/// How long tokens of service accounts are asked for, if the file does not say.
const LIFETIME: u64 = 3600;
/// How long a program may take for a token, if the file does not say.
const TIMEOUT_MILLIS: u64 = 30_000;

/// What the file says. It has no `Debug` form.
pub(super) struct Settings {
    /// The file, as errors name it.
    pub(super) name: String,
    pub(super) audience: String,
    pub(super) token_type: String,
    pub(super) token_url: Url,
    pub(super) subject: Subject,
    /// The client that a token service may want to know: its name and its secret.
    pub(super) client: Option<(String, String)>,
    /// The project that is charged, of identities of people.
    pub(super) user_project: Option<String>,
    pub(super) impersonated: Option<Impersonated>,
}

/// The service account that is acted as.
pub(super) struct Impersonated {
    pub(super) url: Url,
    pub(super) lifetime: Duration,
}

impl Impersonated {
    /// Its name, out of `…/serviceAccounts/NAME:generateAccessToken`.
    pub(super) fn account(&self) -> Option<&str> {
        let (_, last) = self.url.path().rsplit_once('/')?;
        last.split_once(':').map(|(account, _)| account)
    }
}

#[derive(Deserialize)]
struct Kind {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
struct File {
    audience: String,
    subject_token_type: String,
    token_url: Option<String>,
    credential_source: CredentialSource,
    service_account_impersonation_url: Option<String>,
    service_account_impersonation: Option<Impersonation>,
    client_id: Option<String>,
    client_secret: Option<String>,
    workforce_pool_user_project: Option<String>,
}

#[derive(Deserialize)]
struct Impersonation {
    token_lifetime_seconds: Option<u64>,
}

#[derive(Deserialize)]
struct CredentialSource {
    file: Option<PathBuf>,
    url: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    format: Option<FileFormat>,
    executable: Option<Executable>,
    environment_id: Option<String>,
    regional_cred_verification_url: Option<String>,
}

#[derive(Deserialize)]
struct FileFormat {
    #[serde(rename = "type")]
    kind: String,
    subject_token_field_name: Option<String>,
}

#[derive(Deserialize)]
struct Executable {
    command: String,
    timeout_millis: Option<u64>,
    output_file: Option<PathBuf>,
}

impl Settings {
    /// The settings in a file of credentials; none where it holds credentials of another kind, or nothing that can be
    /// read. `name` is what errors call it.
    ///
    /// # Errors
    /// `Config`, naming what is wrong.
    pub(super) fn parse(name: &str, text: &[u8]) -> Result<Option<Self>> {
        let kind = serde_json::from_slice::<Kind>(text);
        if !kind.is_ok_and(|kind| kind.kind == "external_account") {
            return Ok(None);
        }
        let refuse = |cause: &str| Error::new(ErrorKind::Config, format!("{name}: {cause}")).remedy(REMEDY);
        let file: File = serde_json::from_slice(text).map_err(|error| {
            let said = error.to_string();
            // Anything else that the parser says may repeat what the file holds.
            match said.split(" at line").next().filter(|said| said.starts_with("missing field")) {
                Some(missing) => refuse(missing),
                None => refuse(&format!("a field at line {} is not what it should be", error.line().max(1))),
            }
        })?;
        let url = |field: &str, text: &str| {
            let url = Url::parse(text).ok().filter(is_safe);
            url.ok_or_else(|| refuse(&format!("{field} is not an HTTPS URL")))
        };
        let impersonated = match &file.service_account_impersonation_url {
            None => None,
            Some(text) => {
                let asked = file.service_account_impersonation.as_ref();
                let seconds = asked.and_then(|asked| asked.token_lifetime_seconds).unwrap_or(LIFETIME);
                let lifetime = Duration::from_secs(seconds.clamp(60, 12 * 3600));
                Some(Impersonated { url: url("service_account_impersonation_url", text)?, lifetime })
            }
        };
        Ok(Some(Self {
            name: name.to_owned(),
            token_url: url("token_url", file.token_url.as_deref().unwrap_or(TOKEN_URL))?,
            subject: subject(file.credential_source).map_err(|cause| refuse(&cause))?,
            audience: file.audience,
            token_type: file.subject_token_type,
            client: file.client_id.map(|id| (id, file.client_secret.unwrap_or_default())),
            user_project: file.workforce_pool_user_project,
            impersonated,
        }))
    }
}

/// Whether a token may be sent there.
fn is_safe(url: &Url) -> bool {
    let local = match url.host() {
        Some(url::Host::Ipv4(address)) => address.is_loopback(),
        Some(url::Host::Ipv6(address)) => address.is_loopback(),
        Some(url::Host::Domain(name)) => name == "localhost",
        None => return false,
    };
    url.scheme() == "https" || (url.scheme() == "http" && local)
}

fn subject(source: CredentialSource) -> Result<Subject, String> {
    let format = match source.format {
        None => Format::Text,
        Some(FileFormat { kind, .. }) if kind == "text" => Format::Text,
        Some(FileFormat { kind, subject_token_field_name: Some(field) }) if kind == "json" => {
            Format::Json(field)
        }
        Some(FileFormat { kind, .. }) if kind == "json" => {
            return Err("missing field `subject_token_field_name`".into());
        }
        Some(_) => return Err("the format of its credential_source is neither text nor json".into()),
    };
    if let Some(environment) = source.environment_id {
        let url = source.regional_cred_verification_url.filter(|_| environment == "aws1");
        let url = url.ok_or("its credential_source is of an AWS that is not known (aws1 is)")?;
        return Ok(Subject::Aws { url });
    }
    match (source.file, source.url, source.executable) {
        (Some(path), None, None) => Ok(Subject::File { path, format }),
        (None, Some(url), None) => {
            let url = Url::parse(&url).map_err(|_| "the url of its credential_source is not a URL")?;
            if !["http", "https"].contains(&url.scheme()) {
                return Err("the url of its credential_source is not an HTTP URL".into());
            }
            Ok(Subject::Url { url, headers: source.headers, format })
        }
        (None, None, Some(Executable { command, timeout_millis, output_file })) => {
            let timeout = Duration::from_millis(timeout_millis.unwrap_or(TIMEOUT_MILLIS));
            Ok(Subject::Executable { command, timeout, output_file })
        }
        _ => Err(
            "its credential_source is none of those that are supported (one of file, url, executable, or AWS)"
                .into(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn file() -> Value {
        json!({
            "type": "external_account",
            "audience": "//iam.googleapis.com/p",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "credential_source": {"file": "/var/run/token"},
        })
    }

    fn parse(file: &Value) -> Result<Option<Settings>> {
        Settings::parse("the file", file.to_string().as_bytes())
    }

    #[test]
    fn other_credentials_are_left_to_others() {
        for text in ["{\"type\": \"service_account\"}", "{\"type\": 1}", "{", ""] {
            assert!(Settings::parse("x", text.as_bytes()).unwrap().is_none(), "{text}");
        }
    }

    #[test]
    fn the_usual_file_is_taken_apart() {
        let mut file = file();
        file["service_account_impersonation_url"] =
            "https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts/a@p.iam:generateAccessToken"
                .into();
        file["service_account_impersonation"] = json!({"token_lifetime_seconds": 600});
        let settings = parse(&file).unwrap().unwrap();
        assert_eq!(settings.token_url.as_str(), TOKEN_URL);
        let impersonated = settings.impersonated.unwrap();
        assert_eq!(impersonated.account(), Some("a@p.iam"));
        assert_eq!(impersonated.lifetime, Duration::from_secs(600));
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
            let error = parse(&file).map(drop).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(cause) && text.contains("the file"), "{cause:?} is not in: {text}");
            assert!(!text.contains("SENTINEL"), "{text}");
            assert!(error.remedy_text().is_some_and(|remedy| remedy.contains("create-cred-config")));
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
