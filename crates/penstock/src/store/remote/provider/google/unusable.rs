//! What is wrong with a service account's key, or a login, that `object_store` refuses.
//!
//! It reads both itself, and its words are those of its parsers. Here the same text is looked at once more, after it was
//! refused: errors name the setting and the field, never what they hold.

use serde_json::{Map, Value};

use super::CredentialsFile;
use crate::error::{Error, ErrorKind};
use crate::store::remote::settings::environment::Environment;

const KEY_FIELDS: [&str; 3] = ["client_email", "private_key_id", "private_key"];
const LOGIN_FIELDS: [&str; 3] = ["client_id", "client_secret", "refresh_token"];

const NEW_KEY: &str = "Download the key's JSON file anew from the service account's page (Keys), or run `gcloud iam \
                       service-accounts keys create`";
const NEW_LOGIN: &str = "Make the file anew with `gcloud auth application-default login`";

/// What is wrong with the service account's key in `variable`, or in the file that it names.
pub(in super::super) fn unusable_key(environment: &Environment, variable: &str) -> Option<Error> {
    let given = environment.get(&[variable])?;
    let setting = environment.setting(variable);
    if variable.ends_with("_KEY") {
        if !given.starts_with('{') {
            let cause = "is not the JSON of a service account's key";
            let remedy = "Give what the key's file holds; the file's path goes to GOOGLE_SERVICE_ACCOUNT or the storage \
                          option service_account";
            return Some(wrong(&setting, &setting, cause, remedy));
        }
        return key(&setting, &setting, given.as_bytes());
    }
    if given.starts_with('{') {
        let cause = "holds a key itself, and not the path of its file";
        let remedy = "Give the key as GOOGLE_SERVICE_ACCOUNT_KEY or the storage option service_account_key";
        return Some(wrong(&setting, &setting, cause, remedy));
    }
    let CredentialsFile { name, setting, path } = CredentialsFile::named(setting, given);
    match std::fs::read(path) {
        Ok(text) => key(&name, &setting, &text),
        Err(error) => {
            let cause = format!("cannot be read: {error}");
            Some(wrong(&name, &setting, &cause, "Check the path of the service account's key file"))
        }
    }
}

/// What is wrong with the file of [`super::VARIABLE`], or with the one that `gcloud` wrote.
pub(in super::super) fn unusable_file(environment: &Environment) -> Option<Error> {
    let CredentialsFile { name, setting, path } = CredentialsFile::of(environment)?;
    let text = std::fs::read(path).ok()?;
    let file = match object(&text) {
        Ok(file) => file,
        Err(cause) => return Some(wrong(&name, &setting, &cause, NEW_LOGIN)),
    };
    match file.get("type").and_then(Value::as_str) {
        Some("service_account") => key(&name, &setting, &text),
        Some("authorized_user") => Some(wrong(&name, &setting, &lacking(&file, &LOGIN_FIELDS)?, NEW_LOGIN)),
        Some(_) => Some(wrong(&name, &setting, "is of a type of credentials that is not known", NEW_LOGIN)),
        None => Some(wrong(&name, &setting, "holds no credentials: it has no field `type`", NEW_KEY)),
    }
}

/// What is wrong with a service account's key; something is.
fn key(name: &str, setting: &str, text: &[u8]) -> Option<Error> {
    let file = match object(text) {
        Ok(file) => file,
        Err(cause) => return Some(wrong(name, setting, &cause, NEW_KEY)),
    };
    let kind = file.get("type").and_then(Value::as_str);
    if kind.is_some_and(|kind| kind != "service_account") {
        let cause = "holds other credentials than a service account's key: its type is not service_account";
        let remedy = "Give the file's path as GOOGLE_APPLICATION_CREDENTIALS or the storage option application_credentials";
        return Some(wrong(name, setting, cause, remedy));
    }
    let cause = lacking(&file, &KEY_FIELDS)
        .unwrap_or_else(|| "cannot be used: its private_key is not an RSA key in PEM form".into());
    Some(wrong(name, setting, &cause, NEW_KEY))
}

/// The JSON object of a file.
fn object(text: &[u8]) -> Result<Map<String, Value>, String> {
    if text.trim_ascii().is_empty() {
        return Err("is empty".into());
    }
    match serde_json::from_slice(text) {
        Ok(Value::Object(file)) => Ok(file),
        Ok(_) => Err("is not a JSON object".into()),
        Err(error) => Err(format!("is not JSON (line {}, column {})", error.line(), error.column())),
    }
}

/// The first of these fields that is not there, or is no text.
fn lacking(file: &Map<String, Value>, fields: &[&str]) -> Option<String> {
    fields.iter().find_map(|field| match file.get(*field) {
        Some(Value::String(_)) => None,
        Some(_) => Some(format!("cannot be used: its field `{field}` is not text")),
        None => Some(format!("cannot be used: it lacks the field `{field}`")),
    })
}

fn wrong(name: &str, setting: &str, what: &str, remedy: &'static str) -> Error {
    Error::new(ErrorKind::Config, format!("{name} {what}")).detail("setting", setting).remedy(remedy)
}
