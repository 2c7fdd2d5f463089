//! Subject tokens: who we are elsewhere, as a file, a URL or a program says.
//!
//! They are read anew for every exchange, since whoever writes them (a kubelet, a sidecar) replaces them before they
//! expire. A program is run only where `GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES=1` says that it may be: the settings
//! are a file that others may have written. It ends with the load that asked for it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{HeaderMap, Method};
use serde::Deserialize;
use url::Url;

use super::aws;
use super::federated::Federated;
use super::token_client::TokenContext;
use crate::store::remote::http::response_recorder::CredentialError;

/// The variable that lets programs be run.
const ALLOW: &str = "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES";
/// How long a program may take for a token, if the file does not say.
const TIMEOUT_MILLIS: u64 = 30_000;
/// The most that a token may be: they are some 2 KiB.
const MAX_TOKEN: u64 = 1 << 20;
const ID_TOKENS: [&str; 2] =
    ["urn:ietf:params:oauth:token-type:jwt", "urn:ietf:params:oauth:token-type:id_token"];
const SAML: &str = "urn:ietf:params:oauth:token-type:saml2";

/// Where subject tokens come from.
pub(super) enum Subject {
    File { path: PathBuf, format: Format },
    Url { url: Url, headers: HashMap<String, String>, format: Format },
    Executable(Executable),
    Aws { url: String },
}

/// The same, as the file of credentials has it.
#[derive(Deserialize)]
pub(super) struct CredentialSource {
    file: Option<PathBuf>,
    url: Option<String>,
    #[serde(default)]
    headers: HashMap<String, String>,
    format: Option<Format>,
    executable: Option<Executable>,
    environment_id: Option<String>,
    regional_cred_verification_url: Option<String>,
}

/// A program that makes tokens.
#[derive(Deserialize)]
pub(super) struct Executable {
    command: String,
    timeout_millis: Option<u64>,
    output_file: Option<PathBuf>,
}

/// How a token is written.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(super) enum Format {
    Text,
    /// In this field of a JSON object.
    Json {
        subject_token_field_name: String,
    },
    #[serde(other)]
    Unknown,
}

impl CredentialSource {
    /// The one that it means.
    ///
    /// # Errors
    /// What is wrong, by field.
    pub(super) fn subject(self) -> Result<Subject, String> {
        let format = self.format.unwrap_or(Format::Text);
        if matches!(format, Format::Unknown) {
            return Err("the format of its credential_source is neither text nor json".into());
        }
        if let Some(environment) = self.environment_id {
            let url = self.regional_cred_verification_url.filter(|_| environment == "aws1");
            let url = url.ok_or("its credential_source is of an AWS that is not known (aws1 is)")?;
            return Ok(Subject::Aws { url });
        }
        match (self.file, self.url, self.executable) {
            (Some(path), None, None) => Ok(Subject::File { path, format }),
            (None, Some(url), None) => {
                let url = Url::parse(&url).map_err(|_| "the url of its credential_source is not a URL")?;
                if !["http", "https"].contains(&url.scheme()) {
                    return Err("the url of its credential_source is not an HTTP URL".into());
                }
                Ok(Subject::Url { url, headers: self.headers, format })
            }
            (None, None, Some(executable)) => Ok(Subject::Executable(executable)),
            _ => Err(
                "its credential_source is none of those that are supported (one of file, url, executable, or AWS)"
                    .into(),
            ),
        }
    }
}

impl Format {
    /// The token in what was read.
    fn token(&self, text: &[u8]) -> Result<String, CredentialError> {
        let token = match self {
            Self::Json { subject_token_field_name: field } => {
                serde_json::from_slice::<serde_json::Value>(text)
                    .ok()
                    .and_then(|json| json.get(field)?.as_str().map(str::to_owned))
            }
            Self::Text | Self::Unknown => std::str::from_utf8(text).ok().map(|text| text.trim().to_owned()),
        };
        token.filter(|token| !token.is_empty()).ok_or_else(|| {
            CredentialError::new(match self {
                Self::Json { subject_token_field_name: field } => {
                    format!("it is no JSON object with a token in {field:?}")
                }
                Self::Text | Self::Unknown => "it holds no token".into(),
            })
        })
    }
}

impl Subject {
    /// What it is, for errors: without anything that may be secret.
    pub(super) fn shown(&self) -> String {
        match self {
            Self::File { path, .. } => format!("token of file {}", path.display()),
            Self::Url { url, .. } => format!("token of http server {}", url.host_str().unwrap_or_default()),
            Self::Executable(Executable { command, .. }) => {
                format!("token of program {}", command.split_whitespace().next().unwrap_or_default())
            }
            Self::Aws { .. } => "AWS credentials".into(),
        }
    }

    /// A token that is valid now.
    pub(super) async fn token(&self, of: &Federated, cx: &TokenContext) -> Result<String, CredentialError> {
        match self {
            Self::File { path, format } => format.token(&of_file(path)?).map_err(|error| {
                error.with_remedy("Check what writes the file, and the format of its credential_source")
            }),
            Self::Url { url, headers, format } => format.token(&of_url(cx, url, headers).await?),
            Self::Executable(executable) => of_program(of, cx, executable).await,
            Self::Aws { url } => aws::token(cx, url, &of.audience).await,
        }
    }
}

fn of_file(path: &Path) -> Result<Vec<u8>, CredentialError> {
    let told = |why: String| {
        let remedy =
            "Mount the token where the file of credentials says that it is, readable by this process";
        CredentialError::new(why).with_remedy(remedy)
    };
    let about = std::fs::metadata(path).map_err(|error| told(error.to_string()))?;
    if about.len() > MAX_TOKEN {
        return Err(told("it is too large for a token".into()));
    }
    std::fs::read(path).map_err(|error| told(error.to_string()))
}

async fn of_url(
    cx: &TokenContext,
    url: &Url,
    headers: &HashMap<String, String>,
) -> Result<Vec<u8>, CredentialError> {
    let headers = HeaderMap::try_from(headers)
        .map_err(|_| CredentialError::new("a header of its credential_source is not one"))?;
    let request = cx.request(Method::GET, url)?.headers(headers);
    cx.ask(request, "the server of the token").await.map_err(|error| {
        error.with_remedy("Check the url and the headers of the credential_source, and the server there")
    })
}

/// What a program answers.
#[derive(Deserialize)]
struct Response {
    success: bool,
    token_type: Option<String>,
    id_token: Option<String>,
    saml_response: Option<String>,
    /// Seconds since 1970.
    expiration_time: Option<u64>,
    code: Option<String>,
    message: Option<String>,
}

impl Response {
    fn is_over(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        self.expiration_time.is_some_and(|end| end <= now)
    }

    fn token(self) -> Result<String, String> {
        if !self.success {
            let code = self.code.as_deref().unwrap_or("no code");
            let message = self.message.as_deref().unwrap_or("no message");
            return Err(format!("the program says that it has no token: {message} ({code})"));
        }
        if self.is_over() {
            return Err("the token that the program gave has expired".into());
        }
        let token = match self.token_type.as_deref() {
            Some(kind) if ID_TOKENS.contains(&kind) => self.id_token,
            Some(SAML) => self.saml_response,
            _ => return Err("the program gave a token of a type that is not known".into()),
        };
        token.filter(|token| !token.is_empty()).ok_or_else(|| "the program gave no token".into())
    }
}

/// Has a program make a token, where that is allowed.
async fn of_program(
    of: &Federated,
    cx: &TokenContext,
    executable: &Executable,
) -> Result<String, CredentialError> {
    if !cx.environment.is_set(&[ALLOW]) {
        let remedy = format!("Look at what the file of credentials would run, then set {ALLOW}=1");
        let why = "programs may not be run for tokens unless that is allowed";
        return Err(CredentialError::new(why).with_remedy(remedy));
    }
    executable.token(of).await.map_err(|why| {
        let remedy = "Run the program of the credential_source by hand, and see what it says";
        CredentialError::new(why).with_remedy(remedy)
    })
}

impl Executable {
    /// Has it make a token, or takes what it left in its file the last time.
    ///
    /// # Errors
    /// What went wrong.
    async fn token(&self, of: &Federated) -> Result<String, String> {
        let left = self.output_file.as_ref().and_then(|path| std::fs::read(path).ok());
        let left = left.and_then(|text| serde_json::from_slice::<Response>(&text).ok());
        // Without an end, it may be of any age.
        let usable = |left: &Response| left.success && left.expiration_time.is_some() && !left.is_over();
        if let Some(left) = left.filter(usable) {
            return left.token();
        }
        let mut words = self.command.split_whitespace();
        let mut command = tokio::process::Command::new(words.next().ok_or("no program is named")?);
        command
            .args(words)
            .env("GOOGLE_EXTERNAL_ACCOUNT_AUDIENCE", &of.audience)
            .env("GOOGLE_EXTERNAL_ACCOUNT_TOKEN_TYPE", &of.token_type)
            .env("GOOGLE_EXTERNAL_ACCOUNT_INTERACTIVE", "0")
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        if let Some(path) = &self.output_file {
            command.env("GOOGLE_EXTERNAL_ACCOUNT_OUTPUT_FILE", path);
        }
        if let Some(account) = &of.account {
            command.env("GOOGLE_EXTERNAL_ACCOUNT_IMPERSONATED_EMAIL", account);
        }
        let millis = self.timeout_millis.unwrap_or(TIMEOUT_MILLIS);
        let output = tokio::time::timeout(Duration::from_millis(millis), command.output())
            .await
            .map_err(|_| format!("the program took longer than {millis} ms"))?
            .map_err(|error| format!("the program could not be run: {error}"))?;
        // A program that refuses says why, whatever it ends with.
        match serde_json::from_slice::<Response>(&output.stdout) {
            Ok(response) if output.status.success() || !response.success => response.token(),
            _ if !output.status.success() => Err(format!("the program failed with {}", output.status)),
            _ => Err("the program answered something else than is agreed upon".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_found_in_text_and_in_json() {
        let field = || Format::Json { subject_token_field_name: "access_token".into() };
        assert_eq!(Format::Text.token(b" abc\n").unwrap(), "abc");
        assert_eq!(field().token(br#"{"access_token": "abc"}"#).unwrap(), "abc");
        for (format, text) in [
            (Format::Text, &b" \n"[..]),
            (Format::Text, &b"\xff"[..]),
            (field(), &b"abc"[..]),
            (field(), &br#"{"other": "SENTINEL"}"#[..]),
            (field(), &br#"{"access_token": {"SENTINEL": 1}}"#[..]),
        ] {
            assert!(!format.token(text).unwrap_err().why.contains("SENTINEL"));
        }
    }

    #[test]
    fn a_programs_answer_is_checked() {
        let token = |text: &str| serde_json::from_str::<Response>(text).unwrap().token();
        let jwt = r#""success": true, "token_type": "urn:ietf:params:oauth:token-type:jwt""#;
        assert_eq!(token(&format!(r#"{{{jwt}, "id_token": "abc"}}"#)).unwrap(), "abc");
        let saml = r#"{"success": true, "token_type": "urn:ietf:params:oauth:token-type:saml2", "saml_response": "s"}"#;
        assert_eq!(token(saml).unwrap(), "s");
        for (text, why) in [
            (format!(r#"{{{jwt}, "id_token": "abc", "expiration_time": 1}}"#), "has expired"),
            (format!(r#"{{{jwt}}}"#), "gave no token"),
            (r#"{"success": true, "token_type": "x"}"#.to_owned(), "a type that is not known"),
            (r#"{"success": false, "code": "401", "message": "log in"}"#.to_owned(), "log in (401)"),
        ] {
            let error = token(&text).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
