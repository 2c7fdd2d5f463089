//! Storage options: credentials, endpoints and settings that a call gives, under the names that people know.
//!
//! The names are those of fsspec (s3fs, gcsfs, adlfs, `HfFileSystem`) and of `object_store` and obstore. An option becomes
//! the environment variable that means the same, laid over the environment: so a store made of options is told from
//! others like any other environment, and its secrets are kept out of errors like any others.
//!
//! Options come before the environment. Where one of them says who asks, nothing of the environment that says so too
//! counts any more: a key must not be used with another one's session token. An empty key or token is refused: whoever
//! gives one may mean nobody or whoever the environment names.

use super::address::{Address, Provider};
use super::environment::{Environment, is_secret};
use super::option_names::{
    ACCOUNT, DEFAULT_ENDPOINT, GOOGLE_ANONYMOUS, GOOGLE_ENDPOINT, GOOGLE_FILE, GOOGLE_KEY, GOOGLE_TOKEN,
    HUB_ANONYMOUS, HUB_ENDPOINT, HUB_TOKEN, KEY, OF_ACCOUNT, Options, PROFILES, SECRET, SESSION, SWITCHES,
};
use crate::closest::closest;
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::is_hub;

/// A variable, its value, and the name of the option that said it.
type Set = (String, String, String);

/// The option that names another hub than the environment's, without a token for it: a token is of one hub.
fn another_hub(environment: &Environment, of: &Options, set: &[Set]) -> Option<String> {
    let hub = |endpoint: &str| endpoint.trim().trim_end_matches('/').to_owned();
    let ours = hub(environment.get(&[HUB_ENDPOINT]).unwrap_or(DEFAULT_ENDPOINT));
    let (.., option) =
        set.iter().find(|(name, endpoint, _)| name == HUB_ENDPOINT && hub(endpoint) != ours)?;
    // Also `True`, which means the one of this machine.
    let is_token = |option: &str| of.variable(option) == Some(Some(HUB_TOKEN));
    (!set.iter().any(|(.., option)| is_token(option))).then(|| option.clone())
}

/// Variables of the environment that what was set replaces.
fn replaced(of: &Options, set: &[Set]) -> Vec<&'static str> {
    let has = |names: &[&str]| set.iter().any(|(name, ..)| names.contains(&name.as_str()));
    let mut hidden: Vec<&'static str> = Vec::new();
    if has(of.identity) {
        hidden.extend(of.identity);
    }
    if of.provider == Provider::Hub
        && !has(&[HUB_TOKEN])
        && set.iter().any(|(name, value, _)| name == HUB_ANONYMOUS && is_off(value))
    {
        // `token=True` of huggingface_hub: whatever token there is, and a variable's before the one that is saved.
        hidden.retain(|name| *name == HUB_ANONYMOUS);
    }
    if of.provider == Provider::S3 && has(&[KEY]) {
        // The profile goes on to say where things are; who asks is said by the key.
        hidden.retain(|name| !PROFILES.contains(name));
    }
    if has(&[GOOGLE_ENDPOINT]) {
        hidden.push("STORAGE_EMULATOR_HOST");
    }
    if has(&[ACCOUNT]) {
        hidden.extend(OF_ACCOUNT);
    }
    hidden
}

impl Environment {
    /// The same with storage options laid over it, for whoever opens `locations`.
    ///
    /// An option may be meant for any of the stores that the locations are on. Paths take none, so that one call can
    /// serve both.
    ///
    /// # Errors
    /// `Config` for a name that no such store has, which says what it may have meant; for options that need each other.
    pub fn with_options(&self, options: &[(String, String)], locations: &[String]) -> Result<Self> {
        let mut providers: Vec<_> = locations.iter().filter_map(|location| provider(location)).collect();
        providers.dedup();
        if options.is_empty() || providers.is_empty() {
            return Ok(self.clone());
        }
        if providers == [Provider::Web] {
            return Err(Error::new(ErrorKind::Config, "HTTP locations take no storage options")
                .remedy("Write a user and a password in the URL (https://user:password@host/path), or a URL that is signed"));
        }
        let meant: Vec<_> = providers.iter().filter_map(|provider| Options::of(*provider)).collect();
        for (name, value) in options {
            let mut variables = meant.iter().filter_map(|of| of.variable(name)).peekable();
            if variables.peek().is_none() {
                return Err(unknown(name, &meant));
            }
            if let Some(allowed) = variables.find_map(|variable| words(name, variable))
                && !value.is_empty()
                && !allowed.iter().any(|word| value.trim().eq_ignore_ascii_case(word))
            {
                // Not the value: it may be a secret in the wrong place.
                let cause = format!("the value of the storage option {name:?} is not one of its words");
                return Err(Error::new(ErrorKind::Config, cause)
                    .remedy(format!("Give one of {}", allowed.join(", "))));
            }
        }
        meant.iter().try_fold(self.clone(), |environment, of| laid_over(&environment, of, options))
    }
}

/// The words that an option's value is one of; none where it may be any text.
fn words(name: &str, variable: Option<&str>) -> Option<&'static [&'static str]> {
    // What reading does not need is checked all the same.
    const UNUSED: [&str; 4] = ["allow_http", "aws_allow_http", "azure_allow_http", "use_ssl"];
    match variable {
        Some("AWS_REQUEST_PAYER") => {
            Some(&["true", "false", "requester", "bucketowner", "1", "0", "yes", "no", "on", "off"])
        }
        Some(variable) if SWITCHES.contains(&variable) => Some(&SWITCH),
        None if UNUSED.contains(&&*name.to_ascii_lowercase()) => Some(&SWITCH),
        _ => None,
    }
}

/// What says yes or no.
const SWITCH: [&str; 8] = ["true", "false", "1", "0", "yes", "no", "on", "off"];

/// Whether a switch is said to be off.
fn is_off(value: &str) -> bool {
    SWITCH.iter().skip(1).step_by(2).any(|word| value.trim().eq_ignore_ascii_case(word))
}

/// The store of a location; none for a path, and for what will be refused.
fn provider(location: &str) -> Option<Provider> {
    match is_hub(location) {
        true => Some(Provider::Hub),
        false => Address::parse(location).ok().map(|address| address.provider),
    }
}

fn laid_over(environment: &Environment, of: &Options, options: &[(String, String)]) -> Result<Environment> {
    let mut set: Vec<Set> = Vec::new();
    for (name, value) in options {
        let Some(Some(variable)) = of.variable(name) else { continue };
        if value.is_empty() && is_secret(variable) && !SWITCHES.contains(&variable) {
            return Err(Error::new(ErrorKind::Config, format!("the storage option {name:?} is empty"))
                .remedy(
                    "Leave it out or give None for whoever the environment names, or anon=True for nobody",
                ));
        }
        if value.is_empty() {
            continue;
        }
        let (variable, value) = meaning(variable, value);
        if set.iter().any(|(known, other, _)| known == variable && *other != value) {
            let cause = format!(
                "the storage option {name:?} is given twice, by different names and with different values"
            );
            return Err(Error::new(ErrorKind::Config, cause));
        }
        set.push((variable.to_owned(), value, name.clone()));
    }
    let has = |name: &str| set.iter().any(|(known, ..)| known == name);
    if of.provider == Provider::S3 && (has(KEY) != has(SECRET) || (has(SESSION) && !has(KEY))) {
        let lacks = if has(KEY) { "secret" } else { "key" };
        return Err(Error::new(ErrorKind::Config, format!("storage options for S3 lack {lacks:?}")).remedy(
            "Give key and secret together (and token, where the key is a temporary one), or profile, or anon",
        ));
    }
    if of.provider == Provider::Azure && has("AZURE_CLIENT_SECRET") {
        // Without them, the machine's identity would be asked instead.
        let lacks = [("tenant_id", "AZURE_TENANT_ID"), ("client_id", "AZURE_CLIENT_ID")];
        if let Some((option, _)) = lacks.iter().find(|(_, variable)| !has(variable)) {
            let cause = format!("storage options for {} lack {option:?}", of.provider.name());
            return Err(Error::new(ErrorKind::Config, cause).remedy(
                "Give client_secret, client_id and tenant_id together: an application's page shows them",
            ));
        }
    }
    if let Some(option) = another_hub(environment, of, &set) {
        set.retain(|(name, ..)| name != of.anonymous);
        set.push((of.anonymous.to_owned(), "true".to_owned(), option));
    }
    let hidden = replaced(of, &set);
    Ok(environment.overlaid(&hidden, set))
}

/// What a value stands for that has a meaning of its own.
fn meaning<'a>(variable: &'static str, value: &'a str) -> (&'static str, String) {
    let owned = |value: &'a str| value.to_owned();
    match (variable, value) {
        // As gcsfs has them. Its other words name ways to sign in that the default chain tries.
        (GOOGLE_TOKEN, "anon") => (GOOGLE_ANONYMOUS, "true".into()),
        (GOOGLE_TOKEN, "google_default" | "cloud") => (GOOGLE_ANONYMOUS, "false".into()),
        (GOOGLE_TOKEN, value) if value.trim_start().starts_with('{') => (GOOGLE_KEY, owned(value)),
        (GOOGLE_TOKEN, value) if value.contains('/') && std::path::Path::new(value).is_file() => {
            (GOOGLE_FILE, owned(value))
        }
        (GOOGLE_TOKEN, value) if value.ends_with(".json") => (GOOGLE_FILE, owned(value)),
        // `token=False` of huggingface_hub.
        (HUB_TOKEN, "false") => (HUB_ANONYMOUS, "true".into()),
        (HUB_TOKEN, "true") => (HUB_ANONYMOUS, "false".into()),
        (variable, value) => (variable, owned(value)),
    }
}

fn unknown(name: &str, meant: &[&Options]) -> Error {
    let known: Vec<_> = meant.iter().flat_map(|of| of.names()).map(|(_, name)| name).collect();
    let stores: Vec<_> = meant.iter().map(|of| of.provider.name()).collect();
    let remedy = match closest(&name.to_ascii_lowercase(), known.iter().map(String::as_str)).first() {
        Some(like) => format!("Did you mean {like:?}?"),
        None => "Names are those of s3fs, gcsfs, adlfs and object_store: docs/remote.md lists them".into(),
    };
    Error::new(ErrorKind::Config, format!("{} has no storage option {name:?}", stores.join(", ")))
        .remedy(remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::remote::settings::option_names::{AWS_ANONYMOUS, AWS_ENDPOINT, AZURE_ANONYMOUS};

    fn with(variables: &[(&str, &str)], options: &[(&str, &str)], location: &str) -> Result<Environment> {
        let options: Vec<_> = options.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        Environment::of(variables.iter().copied()).with_options(&options, &[location.to_owned()])
    }

    fn got(environment: &Environment, name: &str) -> Option<String> {
        environment.get(&[name]).map(str::to_owned)
    }

    #[test]
    fn the_names_of_fsspec_and_of_object_store_mean_the_same() {
        for (location, options, variable) in [
            ("s3://b/k", &["key", "aws_access_key_id", "ACCESS_KEY_ID"][..], KEY),
            ("s3://b/k", &["endpoint_url", "endpoint", "aws_endpoint"], AWS_ENDPOINT),
            ("s3://b/k", &["region_name", "region", "aws_region"], "AWS_REGION"),
            ("gs://b/k", &["token", "google_bearer_token"], GOOGLE_TOKEN),
            ("az://c/k", &["account_key", "azure_storage_account_key"], "AZURE_STORAGE_ACCOUNT_KEY"),
            ("az://c/k", &["sas_token", "sas_key"], "AZURE_STORAGE_SAS_TOKEN"),
            ("hf://o/n", &["token", "hf_token"], HUB_TOKEN),
        ] {
            for option in options {
                let given = with(
                    &[],
                    &[(*option, "value"), ("secret", "s")][..1 + usize::from(variable == KEY)],
                    location,
                );
                assert_eq!(got(&given.unwrap(), variable).as_deref(), Some("value"), "{option}");
            }
        }
    }

    #[test]
    fn who_asks_is_said_by_one_side_only() {
        let environment = [
            (KEY, "old"),
            (SECRET, "old"),
            (SESSION, "old"),
            ("AWS_NO_SIGN_REQUEST", "1"),
            ("AWS_REGION", "r"),
        ];
        let given = with(&environment, &[("key", "k"), ("secret", "s")], "s3://b/k").unwrap();
        assert_eq!((got(&given, KEY).as_deref(), got(&given, SESSION)), (Some("k"), None));
        assert_eq!(
            (got(&given, "AWS_NO_SIGN_REQUEST"), got(&given, "AWS_REGION").as_deref()),
            (None, Some("r"))
        );
        let given = with(&environment, &[("profile", "p")], "s3://b/k").unwrap();
        assert_eq!((got(&given, KEY), got(&given, "AWS_PROFILE").as_deref()), (None, Some("p")));
        // An endpoint alone says nothing of that.
        let given = with(&environment, &[("endpoint_url", "http://h")], "s3://b/k").unwrap();
        assert_eq!(got(&given, SESSION).as_deref(), Some("old"));
        let azure = [("AZURE_STORAGE_CONNECTION_STRING", "of another"), ("AZURE_STORAGE_KEY", "old")];
        let given = with(&azure, &[("account_name", "a"), ("sas_token", "t")], "az://c/k").unwrap();
        assert_eq!((got(&given, azure[0].0), got(&given, azure[1].0)), (None, None));
        // A hub's token is not shown to another hub, wherever it is from.
        let given = with(&[(HUB_TOKEN, "old")], &[("endpoint", "https://mirror")], "hf://o/n").unwrap();
        assert_eq!((got(&given, HUB_TOKEN), given.is_set(&[HUB_ANONYMOUS])), (None, true));
        // The same hub may be named.
        for (of_environment, endpoint) in [
            (&[(HUB_TOKEN, "old")][..], "https://huggingface.co/"),
            (&[(HUB_TOKEN, "old"), (HUB_ENDPOINT, "https://mirror/")], "https://mirror"),
        ] {
            let given = with(of_environment, &[("endpoint", endpoint)], "hf://o/n").unwrap();
            assert_eq!(
                (got(&given, HUB_TOKEN).as_deref(), given.is_set(&[HUB_ANONYMOUS])),
                (Some("old"), false)
            );
        }
        // Another hub gets no token for the asking: it has to be named.
        for (option, sent) in [(("anon", "false"), None), (("token", "true"), Some("old"))] {
            let options = [("endpoint", "https://mirror"), option];
            let given = with(&[(HUB_TOKEN, "old")], &options, "hf://o/n").unwrap();
            assert_eq!(
                (got(&given, HUB_TOKEN).as_deref(), given.is_set(&[HUB_ANONYMOUS])),
                (sent, sent.is_none())
            );
        }
        // Whoever says that somebody asks means the token that there is.
        for option in [("token", "true"), ("anon", "False")] {
            let environment = [(HUB_TOKEN, "old"), (HUB_ANONYMOUS, "1")];
            let given = with(&environment, &[option], "hf://o/n").unwrap();
            assert_eq!(
                (got(&given, HUB_TOKEN).as_deref(), given.is_set(&[HUB_ANONYMOUS])),
                (Some("old"), false)
            );
        }
        // A name proves nothing, and an empty one says nothing.
        for option in ["tenant_id", "client_id"] {
            let given = with(&[("AZURE_STORAGE_KEY", "old")], &[(option, "")], "az://c/k").unwrap();
            let key = got(&given, "AZURE_STORAGE_KEY");
            assert_eq!((key.as_deref(), given.is_set(&[AZURE_ANONYMOUS])), (Some("old"), false));
        }
        let given = with(&[], &[("endpoint", "https://mirror"), ("token", "new")], "hf://o/n").unwrap();
        assert_eq!((got(&given, HUB_TOKEN).as_deref(), given.is_set(&[HUB_ANONYMOUS])), (Some("new"), false));
    }

    #[test]
    fn an_empty_credential_is_refused() {
        for (location, option) in [
            ("s3://b/k", &["key", "secret", "token"][..]),
            ("gs://b/k", &["token", "service_account_key"]),
            ("az://c/k", &["account_key", "sas_token", "connection_string", "token", "client_secret"]),
            ("hf://o/n", &["token", "hf_token"]),
        ] {
            for option in option {
                let error = with(&[], &[(option, "")], location).map(drop).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Config, "{location} {option}: {error}");
                assert!(
                    error.to_string().contains("is empty") && error.to_string().contains("anon=True"),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn no_empty_option_undoes_what_the_environment_switched_off() {
        for (location, option, variable) in [
            ("s3://b/k", "profile", AWS_ANONYMOUS),
            ("s3://b/k", "profile", "AWS_NO_SIGN_REQUEST"),
            ("s3://b/k", "anon", AWS_ANONYMOUS),
            ("s3://b/k", "region", AWS_ANONYMOUS),
            ("gs://b/k", "anon", GOOGLE_ANONYMOUS),
            ("gs://b/k", "endpoint_url", "STORAGE_EMULATOR_HOST"),
            ("az://c/k", "anon", AZURE_ANONYMOUS),
            ("az://c/k", "use_azure_cli", AZURE_ANONYMOUS),
            ("az://c/k", "account_name", "AZURE_STORAGE_ACCOUNT"),
            ("hf://o/n", "anon", HUB_ANONYMOUS),
            ("hf://o/n", "endpoint", HUB_ANONYMOUS),
        ] {
            let given = with(&[(variable, "true")], &[(option, "")], location).unwrap();
            assert!(given.is_set(&[variable]), "{location} {option}");
        }
    }

    #[test]
    fn words_with_a_meaning_have_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        for (value, variable, means) in [
            ("anon", GOOGLE_ANONYMOUS, "true"),
            ("google_default", GOOGLE_ANONYMOUS, "false"),
            ("ya29.abc/def", GOOGLE_TOKEN, "ya29.abc/def"),
            (path, GOOGLE_FILE, path),
            ("nope.json", GOOGLE_FILE, "nope.json"),
            ("{\"type\": 1}", GOOGLE_KEY, "{\"type\": 1}"),
        ] {
            let given = with(&[], &[("token", value)], "gs://b/k").unwrap();
            assert_eq!(got(&given, variable).as_deref(), Some(means), "{value}");
        }
        let given = with(&[(HUB_TOKEN, "old")], &[("token", "false")], "hf://o/n").unwrap();
        assert_eq!((got(&given, HUB_TOKEN), got(&given, HUB_ANONYMOUS).as_deref()), (None, Some("true")));
    }

    #[test]
    fn a_word_that_says_neither_yes_nor_no_is_refused() {
        for (location, option) in [
            ("s3://b/k", "anon"),
            ("s3://b/k", "virtual_hosted_style_request"),
            ("s3://b/k", "requester_pays"),
            ("s3://b/k", "use_ssl"),
            ("gs://b/k", "skip_signature"),
            ("az://c/k", "Use_Azure_Cli"),
            ("hf://o/n", "anonymous"),
        ] {
            let error = with(&[], &[(option, "SENTINEL")], location).map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(
                error.to_string().contains("Give one of true, false")
                    && !error.to_string().contains("SENTINEL"),
                "{error}"
            );
            for word in ["True", "0", ""] {
                assert!(with(&[], &[(option, word)], location).is_ok(), "{option}={word}");
            }
        }
        assert!(with(&[], &[("request_payer", "requester")], "s3://b/k").is_ok());
    }

    #[test]
    fn what_is_no_option_is_refused_with_what_it_may_have_meant() {
        for (location, options, says) in [
            ("s3://b/k", &[("secrte", "SENTINEL")][..], "Did you mean \"secret\"?"),
            ("s3://b/k", &[("frobnicate", "SENTINEL")], "docs/remote.md"),
            ("s3://b/k", &[("key", "SENTINEL")], "lack \"secret\""),
            ("s3://b/k", &[("token", "SENTINEL")], "lack \"key\""),
            (
                "s3://b/k",
                &[("key", "SENTINEL"), ("aws_access_key_id", "other"), ("secret", "s")],
                "given twice",
            ),
            ("https://h/m.safetensors", &[("token", "SENTINEL")], "take no storage options"),
        ] {
            let error = with(&[], options, location).map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            let text = error.to_string();
            assert!(text.contains(says) && !text.contains("SENTINEL"), "{says:?} is not in: {text}");
        }
        // For paths, they mean nothing.
        let given = with(&[("HOME", "/h")], &[("key", "SENTINEL")], "/a/path").unwrap();
        assert!(given == Environment::of([("HOME", "/h")]));
    }
}
