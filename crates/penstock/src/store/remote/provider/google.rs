//! Google's files of credentials: where they are, who reads which, and what is wrong with those that nobody can read.
//!
//! `object_store` reads service accounts' keys and people's logins, and asks the machine's metadata service. Every other
//! form is an [`Account`]: Google's own library `google-auth` makes its tokens. That library is Python's, so it runs in a
//! process of its own, one for each token (`python/penstock/google_tokens.py`):
//!
//! * It has the variables that the store was opened with, whatever the program sets meanwhile, and trusts whom the store
//!   trusts.
//! * It is killed with the load that waits for it, and whatever it runs with it.
//! * No reader waits for Python's locks, and a child after `fork` starts one like any other process.
//! * The program that this is part of keeps its `SIGCHLD`: tokio's processes, which install a handler of it, are not used.
//!
//! Errors name settings and fields, never what they hold.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use object_store::gcp::GcpCredential;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::pipe;

use super::credential_cache::{Fetched, Source};
use crate::error::{Error, ErrorKind};
use crate::store::remote::http::response_recorder::{CredentialError, CredentialFailure};
use crate::store::remote::http::tls;
use crate::store::remote::settings::address::Provider;
use crate::store::remote::settings::environment::Environment;

/// The variable that names a file of credentials.
pub(super) const VARIABLE: &str = "GOOGLE_APPLICATION_CREDENTIALS";

/// Types of files that `google-auth` reads, what errors call them, and what to do where they are refused.
const FORMS: [(&str, &str, &str); 3] = [
    (
        "external_account",
        "a federated identity",
        "Check the credential_source and the audience of the file of credentials, and that its provider takes tokens of \
         this issuer and subject; acting as a service account takes roles/iam.workloadIdentityUser",
    ),
    (
        "external_account_authorized_user",
        "a workforce login",
        "Sign in again: gcloud auth application-default login --login-config=FILE, with the login configuration of the \
         workforce pool",
    ),
    (
        "impersonated_service_account",
        "a service account that is acted as",
        "Sign in again: gcloud auth application-default login --impersonate-service-account=ACCOUNT; acting as it takes \
         roles/iam.serviceAccountTokenCreator",
    ),
];

/// How long a token may take: a program that a federated identity runs has two minutes at most.
const TIME_LIMIT: Duration = Duration::from_secs(150);

/// How often it is looked whether a program that has answered has ended.
const END: Duration = Duration::from_millis(1);

/// The program that makes tokens.
static COMMAND: OnceLock<Vec<OsString>> = OnceLock::new();

/// Names the program, with its arguments, that has `google-auth` make tokens. The first one that is named stays.
pub fn set_google_token_command(command: Vec<OsString>) {
    let _ = COMMAND.set(command);
}

/// Where `gcloud auth application-default login` puts credentials.
pub(super) fn well_known(environment: &Environment) -> Option<PathBuf> {
    let home = || Some(PathBuf::from(environment.get(&["HOME"])?).join(".config/gcloud"));
    let directory = environment.get(&["CLOUDSDK_CONFIG"]).map(PathBuf::from).or_else(home)?;
    Some(directory.join("application_default_credentials.json"))
}

/// What a setting holds, or the file that it names.
struct CredentialsFile {
    /// As errors name it.
    name: String,
    /// What names it: a variable, an option, or its own path.
    setting: String,
    text: io::Result<Vec<u8>>,
}

/// The file that `variable` names; where [`VARIABLE`] is not set, the one that `gcloud` writes. None where the variable
/// holds a key itself.
fn path(environment: &Environment, variable: &str) -> Option<PathBuf> {
    match environment.get(&[variable]) {
        None => well_known(environment),
        Some(value) if ["_KEY", "_TOKEN"].iter().any(|end| variable.ends_with(end)) || is_no_path(value) => {
            None
        }
        Some(value) => Some(value.into()),
    }
}

fn is_no_path(value: &str) -> bool {
    value.len() > 255 || value.contains(['{', '\n'])
}

/// What tells a file from the one that was there before: written anew, or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FileVersion {
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

impl FileVersion {
    /// Of a file of credentials, if `variable` leads to one.
    pub(super) fn of(environment: &Environment, variable: &str) -> Option<Self> {
        let is = std::fs::metadata(path(environment, variable)?).ok()?;
        Some(Self { inode: is.ino(), bytes: is.len(), modified: (is.mtime(), is.mtime_nsec()) })
    }
}

impl CredentialsFile {
    /// That of `variable`; where [`VARIABLE`] is not set, the one that `gcloud` writes.
    fn of(environment: &Environment, variable: &str) -> Option<Self> {
        let setting = environment.setting(variable);
        let Some(value) = environment.get(&[variable]) else {
            let path = well_known(environment)?;
            let setting = path.display().to_string();
            return Some(Self { name: setting.clone(), setting, text: std::fs::read(path) });
        };
        let (name, text) = match (variable.ends_with("_KEY"), is_no_path(value)) {
            (true, _) => (setting.clone(), Ok(value.into())),
            (false, true) => (
                setting.clone(),
                Err(io::Error::other("it holds a key itself, and not the path of its file")),
            ),
            (false, false) => (format!("{setting}={value}"), std::fs::read(value)),
        };
        Some(Self { name, setting, text })
    }
}

/// What is wrong with the credentials of `variable`, which `object_store` refused.
pub(super) fn unusable(environment: &Environment, variable: &str) -> Option<Error> {
    let CredentialsFile { name, setting, text } = CredentialsFile::of(environment, variable)?;
    let cause = match text {
        Ok(text) => fault(variable, &text)?,
        Err(error) => format!("cannot be read: {error}"),
    };
    let error = Error::new(ErrorKind::Config, format!("{name} {cause}")).detail("setting", setting);
    if variable.ends_with("_KEY") {
        return Some(error.remedy(
            "Give the whole of a service account's key, as `gcloud iam service-accounts keys create FILE` writes it: its \
             JSON, or as the storage option token a dict of it. For a file of any form, name its path with \
             application_credentials",
        ));
    }
    Some(error.remedy(
        "Check the path, and what is there: GOOGLE_APPLICATION_CREDENTIALS (the storage option application_credentials) \
         names any file of credentials, GOOGLE_SERVICE_ACCOUNT (service_account) the file of a key, and \
         GOOGLE_SERVICE_ACCOUNT_KEY (service_account_key) holds what is in such a file. `gcloud auth \
         application-default login` and `gcloud iam service-accounts keys create` make these files anew",
    ))
}

/// What is wrong with a file of credentials.
fn fault(variable: &str, text: &[u8]) -> Option<String> {
    const KEY: [&str; 3] = ["client_email", "private_key_id", "private_key"];
    const LOGIN: [&str; 3] = ["client_id", "client_secret", "refresh_token"];
    let file = match serde_json::from_slice(text) {
        Ok(Value::Object(file)) => file,
        _ if text.trim_ascii().is_empty() => return Some("is empty".into()),
        _ if variable.ends_with("_KEY") && !text.starts_with(b"{") => {
            return Some("is not the JSON of a service account's key".into());
        }
        Ok(_) => return Some("is not a JSON object".into()),
        Err(error) => return Some(format!("is not JSON (line {}, column {})", error.line(), error.column())),
    };
    let fields = match file.get("type").and_then(Value::as_str) {
        Some("service_account") => KEY,
        None if variable != VARIABLE => KEY,
        _ if variable != VARIABLE => {
            return Some("is no service account's key: its type is not service_account".into());
        }
        Some("authorized_user") => LOGIN,
        Some(_) => return Some("is of a type of credentials that is not known".into()),
        None => return Some("holds no credentials: it has no field `type`".into()),
    };
    match fields.into_iter().find(|field| !file.get(*field).is_some_and(Value::is_string)) {
        Some(field) if file.contains_key(field) => {
            Some(format!("cannot be used: its field `{field}` is not text"))
        }
        Some(field) => Some(format!("cannot be used: it lacks the field `{field}`")),
        None if fields == KEY => Some("cannot be used: its private_key is not an RSA key in PEM form".into()),
        None => None,
    }
}

/// Someone whose tokens `google-auth` makes. It has no `Debug` form.
pub(super) struct Account {
    /// For errors.
    pub(super) origin: String,
    remedy: &'static str,
    file: Mutex<Login>,
    environment: Arc<Environment>,
}

/// A file of credentials.
struct Login {
    /// A login of a workforce pool changes with each token: `gcloud`'s file stays as it is.
    file: Value,
    /// What it was read from.
    version: Option<FileVersion>,
}

impl Login {
    /// What `environment` leads to, and what errors call it.
    fn read(environment: &Environment) -> Option<(Self, String)> {
        // Before the file is read: one that is written meanwhile is read again.
        let version = FileVersion::of(environment, VARIABLE);
        let CredentialsFile { name, text, .. } = CredentialsFile::of(environment, VARIABLE)?;
        Some((Self { file: serde_json::from_slice(&text.ok()?).ok()?, version }, name))
    }

    fn form(&self) -> Option<(&'static str, &'static str, &'static str)> {
        FORMS.into_iter().find(|(kind, ..)| self.file["type"] == *kind)
    }
}

/// What the program writes: a token, or why there is none.
#[derive(Deserialize)]
struct Answer {
    token: Option<String>,
    /// Seconds since 1970.
    expires: Option<f64>,
    /// What to give it the next time.
    file: Option<Value>,
    #[serde(default)]
    error: String,
    remedy: Option<String>,
    #[serde(default)]
    class: CredentialFailure,
}

/// The processes of one program. They are killed where nobody waits for its end.
struct ProcessGroup {
    leader: Child,
    has_ended: bool,
}

impl ProcessGroup {
    /// Waits until the program ends.
    async fn end(&mut self) {
        // There is none to wait for where the program that this is part of reaps all children, or ignores `SIGCHLD`.
        while let Ok(None) = self.leader.try_wait() {
            tokio::time::sleep(END).await;
        }
        self.has_ended = true;
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if !self.has_ended {
            if let Some(leader) = Pid::from_raw(self.leader.id().cast_signed()) {
                let _ = kill_process_group(leader, Signal::KILL);
            }
            // What was killed ends at once, and is not left as a zombie.
            let _ = self.leader.wait();
        }
    }
}

impl Account {
    /// The account of the file that `environment` leads to, if it is of a form that `object_store` does not know.
    pub(super) fn of(environment: &Arc<Environment>) -> Option<Self> {
        let (login, name) = Login::read(environment)?;
        let (_, what, remedy) = login.form()?;
        let (origin, environment) = (format!("{what} ({name})"), Arc::clone(environment));
        Some(Self { origin, remedy, file: Mutex::new(login), environment })
    }

    fn login(&self) -> MutexGuard<'_, Login> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file as a line of JSON. Read anew if someone has signed in again since it was read.
    fn current(&self) -> String {
        let mut held = self.login();
        if FileVersion::of(&self.environment, VARIABLE) != held.version
            && let Some((login, _)) = Login::read(&self.environment)
            // Of another form, it is for who opens the next checkpoint.
            && login.file["type"] == held.file["type"]
        {
            *held = login;
        }
        format!("{}\n", held.file)
    }

    /// Has the program make a token.
    async fn ask(&self) -> Result<Answer, CredentialError> {
        let failed =
            |error: io::Error| CredentialError::new(format!("the program for Google's tokens: {error}"));
        let Some((program, arguments)) = COMMAND.get().and_then(|command| command.split_first()) else {
            return Err(failed(io::Error::other("no Python interpreter is known that could run it")));
        };
        // Whom the store trusts, with colons between several.
        let bundle = tls::bundle(&self.environment, Provider::Gcs);
        let trusted: Vec<_> = tls::trusted(bundle.as_ref()).into_iter().map(OsString::from).collect();
        let trusted = trusted.join(OsStr::new(":"));
        let leader = Command::new(program)
            .args(arguments)
            .args((!trusted.is_empty()).then_some(trusted))
            .env_clear()
            .envs(self.environment.starting_with(""))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let mut group = ProcessGroup { leader, has_ended: false };
        let asked = self.current();
        // A line each way, not until the end: a process that is forked meanwhile may hold copies of both pipes.
        let answered = tokio::time::timeout(TIME_LIMIT, async {
            let mut line = String::new();
            if let (Some(stdin), Some(stdout)) = (group.leader.stdin.take(), group.leader.stdout.take()) {
                let mut stdin = pipe::Sender::from_owned_fd(OwnedFd::from(stdin))?;
                stdin.write_all(asked.as_bytes()).await?;
                let mut lines = BufReader::new(pipe::Receiver::from_owned_fd(OwnedFd::from(stdout))?);
                // What an interpreter's own start prints is no answer.
                while !line.starts_with('{') {
                    line.clear();
                    if lines.read_line(&mut line).await? == 0 {
                        break;
                    }
                }
            }
            group.end().await;
            io::Result::Ok(line)
        });
        let line = answered.await.map_err(io::Error::from).and_then(|line| line).map_err(failed)?;
        serde_json::from_str(&line).map_err(|_| failed(io::Error::other("it ended without an answer")))
    }
}

#[async_trait]
impl Source for Account {
    type Credential = GcpCredential;

    async fn fetch(&self) -> Result<Fetched<GcpCredential>, CredentialError> {
        // What is wrong is told with whose it is.
        let told = |error: CredentialError| CredentialError {
            why: format!("{}: {}", self.origin, error.why),
            remedy: error.remedy.or_else(|| Some(self.remedy.into())),
            ..error
        };
        let Answer { token, expires, file, error, remedy, class } = self.ask().await.map_err(told)?;
        let bearer = token.ok_or_else(|| told(CredentialError { why: error, remedy, class }))?;
        if let Some(file) = file {
            self.login().file = file;
        }
        let expires = expires.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let expires = expires.map(|since| SystemTime::UNIX_EPOCH + since);
        Ok(Fetched { credential: GcpCredential { bearer }, expires, origin: self.origin.clone() })
    }
}
