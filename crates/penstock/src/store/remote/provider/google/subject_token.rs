//! Subject tokens: who we are elsewhere, as a file, a URL or a program says.
//!
//! They are read anew for every exchange, since whoever writes them (a kubelet, a sidecar) replaces them before they
//! expire. A program is run only where `GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES=1` says that it may be: the settings
//! are a file that others may have written. It ends with the load that asked for it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::header::{HeaderName, HeaderValue};
use serde::Deserialize;
use url::Url;

use super::aws;
use super::federated::Federated;
use super::token_client::{TokenContext, ask};
use crate::store::remote::http::response_recorder::CredentialError;

/// The variable that lets programs be run.
const ALLOW: &str = "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES";
/// The most that a token may be: they are some 2 KiB.
const MAX_TOKEN: u64 = 1 << 20;
const ID_TOKENS: [&str; 2] =
    ["urn:ietf:params:oauth:token-type:jwt", "urn:ietf:params:oauth:token-type:id_token"];
const SAML: &str = "urn:ietf:params:oauth:token-type:saml2";

/// Where subject tokens come from.
pub(super) enum Subject {
    File { path: PathBuf, format: Format },
    Url { url: Url, headers: BTreeMap<String, String>, format: Format },
    Executable { command: String, timeout: Duration, output_file: Option<PathBuf> },
    Aws { url: String },
}

/// How a token is written.
pub(super) enum Format {
    Text,
    /// In this field of a JSON object.
    Json(String),
}

impl Format {
    /// The token in what was read.
    fn token(&self, text: &[u8]) -> Result<String, CredentialError> {
        let token = match self {
            Self::Text => std::str::from_utf8(text).ok().map(|text| text.trim().to_owned()),
            Self::Json(field) => serde_json::from_slice::<serde_json::Value>(text)
                .ok()
                .and_then(|json| json.get(field)?.as_str().map(str::to_owned)),
        };
        token.filter(|token| !token.is_empty()).ok_or_else(|| match self {
            Self::Text => CredentialError::new("it holds no token"),
            Self::Json(field) => {
                CredentialError::new(format!("it is no JSON object with a token in {field:?}"))
            }
        })
    }
}

impl Subject {
    /// What it is, for errors: without anything that may be secret.
    pub(super) fn shown(&self) -> String {
        match self {
            Self::File { path, .. } => format!("token of file {}", path.display()),
            Self::Url { url, .. } => format!("token of http server {}", url.host_str().unwrap_or_default()),
            Self::Executable { command, .. } => {
                format!("token of program {}", command.split_whitespace().next().unwrap_or_default())
            }
            Self::Aws { .. } => "AWS credentials".into(),
        }
    }

    /// A token that is valid now.
    pub(super) async fn token(&self, of: &Federated, cx: &TokenContext) -> Result<String, CredentialError> {
        match self {
            Self::File { path, format } => format.token(&of_file(path)?).map_err(|error| CredentialError {
                remedy: Some("Check what writes the file, and the format of its credential_source".into()),
                ..error
            }),
            Self::Url { url, headers, format } => format.token(&of_url(cx, url, headers).await?),
            Self::Executable { command, timeout, output_file } => {
                of_program(of, cx, command, *timeout, output_file.as_deref()).await
            }
            Self::Aws { url } => aws::token(cx, url, &of.audience).await,
        }
    }
}

fn of_file(path: &Path) -> Result<Vec<u8>, CredentialError> {
    let told = |what: String, remedy: &str| CredentialError {
        remedy: Some(remedy.into()),
        ..CredentialError::new(what)
    };
    let remedy = "Mount the token where the file of credentials says that it is, readable by this process";
    let about = std::fs::metadata(path).map_err(|error| told(format!("{error}"), remedy))?;
    if about.len() > MAX_TOKEN {
        return Err(told("it is too large for a token".into(), remedy));
    }
    std::fs::read(path).map_err(|error| told(format!("{error}"), remedy))
}

async fn of_url(
    cx: &TokenContext,
    url: &Url,
    headers: &BTreeMap<String, String>,
) -> Result<Vec<u8>, CredentialError> {
    let mut request = reqwest::Request::new(http::Method::GET, url.clone());
    for (name, value) in headers {
        let name = HeaderName::try_from(name).ok();
        let header = name.zip(HeaderValue::try_from(value).ok());
        let Some((name, value)) = header else {
            return Err(CredentialError::new("a header of its credential_source is not one"));
        };
        request.headers_mut().insert(name, value);
    }
    ask(&cx.client, request, "the server of the token").await.map_err(|error| CredentialError {
        remedy: Some("Check the url and the headers of the credential_source, and the server there".into()),
        ..error
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

    fn token(self) -> Result<String, CredentialError> {
        if !self.success {
            let code = self.code.as_deref().unwrap_or("no code");
            let message = self.message.as_deref().unwrap_or("no message");
            return Err(CredentialError::new(format!(
                "the program says that it has no token: {message} ({code})"
            )));
        }
        if self.is_over() {
            return Err(CredentialError::new("the token that the program gave has expired"));
        }
        let token = match self.token_type.as_deref() {
            Some(kind) if ID_TOKENS.contains(&kind) => self.id_token,
            Some(SAML) => self.saml_response,
            _ => return Err(CredentialError::new("the program gave a token of a type that is not known")),
        };
        token
            .filter(|token| !token.is_empty())
            .ok_or_else(|| CredentialError::new("the program gave no token"))
    }
}

/// Has a program make a token, or takes what it left in its file the last time.
async fn of_program(
    of: &Federated,
    cx: &TokenContext,
    command: &str,
    timeout: Duration,
    output_file: Option<&Path>,
) -> Result<String, CredentialError> {
    if !cx.environment.is_set(&[ALLOW]) {
        return Err(CredentialError {
            remedy: Some(format!("Look at what the file of credentials would run, then set {ALLOW}=1")),
            ..CredentialError::new("programs may not be run for tokens unless that is allowed")
        });
    }
    let told = |error: CredentialError| CredentialError {
        remedy: Some("Run the program of the credential_source by hand, and see what it says".into()),
        ..error
    };
    let left = output_file.and_then(|path| std::fs::read(path).ok());
    let left = left.and_then(|text| serde_json::from_slice::<Response>(&text).ok());
    // Without an end, it may be of any age.
    if let Some(left) = left.filter(|left| left.success && left.expiration_time.is_some() && !left.is_over())
    {
        return left.token().map_err(told);
    }
    let mut words = command.split_whitespace();
    let Some(program) = words.next() else { return Err(told(CredentialError::new("no program is named"))) };
    let mut command = tokio::process::Command::new(program);
    command
        .args(words)
        .env("GOOGLE_EXTERNAL_ACCOUNT_AUDIENCE", &of.audience)
        .env("GOOGLE_EXTERNAL_ACCOUNT_TOKEN_TYPE", &of.token_type)
        .env("GOOGLE_EXTERNAL_ACCOUNT_INTERACTIVE", "0")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    if let Some(path) = output_file {
        command.env("GOOGLE_EXTERNAL_ACCOUNT_OUTPUT_FILE", path);
    }
    if let Some(account) = &of.account {
        command.env("GOOGLE_EXTERNAL_ACCOUNT_IMPERSONATED_EMAIL", account);
    }
    let output = match tokio::time::timeout(timeout, command.output()).await {
        Err(_) => {
            return Err(told(CredentialError::new(format!(
                "the program took longer than {} ms",
                timeout.as_millis()
            ))));
        }
        Ok(Err(error)) => {
            return Err(told(CredentialError::new(format!("the program could not be run: {error}"))));
        }
        Ok(Ok(output)) => output,
    };
    // A program that refuses says why, whatever it ends with.
    match serde_json::from_slice::<Response>(&output.stdout) {
        Ok(response) if output.status.success() || !response.success => response.token().map_err(told),
        _ if !output.status.success() => {
            Err(told(CredentialError::new(format!("the program failed with {}", output.status))))
        }
        _ => Err(told(CredentialError::new("the program answered something else than is agreed upon"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_found_in_text_and_in_json() {
        let field = || Format::Json("access_token".into());
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
            assert!(error.why.contains(why), "{}", error.why);
        }
    }
}
