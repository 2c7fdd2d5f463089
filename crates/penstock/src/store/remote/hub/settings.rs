//! What decides how the hub is reached: the variables and files of huggingface_hub, in its order.

use crate::store::remote::settings::option_names::DEFAULT_ENDPOINT;
use std::path::{Path, PathBuf};

use crate::store::location::shown_setting;
use crate::store::remote::settings::environment::Environment;
use crate::store::remote::settings::option_names::HUB_ANONYMOUS;

/// How the hub is reached. It has no `Debug` form: it holds the token.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Settings {
    /// `https://huggingface.co`, without a slash at its end, and as it may be shown.
    pub(super) endpoint: String,
    pub(super) token: Option<String>,
    /// Where the token is from, for errors.
    pub(super) token_from: String,
    /// Whether only the cache may be asked.
    pub(super) offline: bool,
    /// Where the cache is: `hub` in the home directory of Hugging Face.
    pub(super) cache: Option<PathBuf>,
}

impl Settings {
    pub(super) fn of(environment: &Environment) -> Self {
        let user = environment.get(&["HOME"]);
        let path = |text: &str| match (text.strip_prefix("~/"), user) {
            (Some(rest), Some(user)) => Path::new(user).join(rest),
            _ => PathBuf::from(text),
        };
        let home = environment.get(&["HF_HOME"]).map(path).or_else(|| {
            let caches = environment.get(&["XDG_CACHE_HOME"]).map(path);
            Some(caches.or_else(|| Some(Path::new(user?).join(".cache")))?.join("huggingface"))
        });
        let cache = environment.get(&["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"]).map(path);
        let endpoint = environment.get(&["HF_ENDPOINT"]).unwrap_or(DEFAULT_ENDPOINT);
        let (token, token_from) = token(environment, home.as_deref(), path);
        Self {
            endpoint: shown_setting(endpoint).trim_end_matches('/').to_owned(),
            token,
            token_from,
            offline: environment.is_set(&["HF_HUB_OFFLINE"]) || environment.is_set(&["TRANSFORMERS_OFFLINE"]),
            cache: cache.or_else(|| Some(home?.join("hub"))),
        }
    }

    /// `environment` with the token in it, wherever it came from: so it is known as a secret.
    pub(super) fn with_token(&self, environment: &Environment) -> Environment {
        match &self.token {
            Some(token) => environment.with("HF_TOKEN", token),
            None => environment.clone(),
        }
    }
}

/// The token, and where it is from.
fn token(
    environment: &Environment,
    home: Option<&Path>,
    path: impl Fn(&str) -> PathBuf,
) -> (Option<String>, String) {
    for name in ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"] {
        if let Some(token) = environment.get(&[name]).and_then(cleaned) {
            return (Some(token), environment.origin(name).to_owned());
        }
    }
    if environment.is_set(&[HUB_ANONYMOUS]) {
        return (None, "none".to_owned());
    }
    let file = environment.get(&["HF_TOKEN_PATH"]).map(path).or_else(|| Some(home?.join("token")));
    let read = file.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
    match (read.as_deref().and_then(cleaned), file) {
        (Some(token), Some(file)) => (Some(token), format!("the token in {}", file.display())),
        _ => (None, "none".to_owned()),
    }
}

/// A token without what an editor or a shell left around it; none where nothing is left, or what cannot be sent.
fn cleaned(token: &str) -> Option<String> {
    let token: String = token.chars().filter(|c| !matches!(c, '\r' | '\n')).collect();
    let token = token.trim();
    (!token.is_empty() && token.bytes().all(|b| (0x21..0x7f).contains(&b))).then(|| token.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Settings {
        Settings::of(&Environment::of(variables.iter().copied()))
    }

    #[test]
    fn the_cache_is_where_hugging_face_puts_it() {
        for (variables, expected) in [
            (&[("HOME", "/u")][..], "/u/.cache/huggingface/hub"),
            (&[("HOME", "/u"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("HOME", "/u"), ("XDG_CACHE_HOME", "/x"), ("HF_HOME", "~/h")], "/u/h/hub"),
            (&[("HF_HOME", "/h"), ("HUGGINGFACE_HUB_CACHE", "/old")], "/old"),
            (&[("HF_HUB_CACHE", "/c"), ("HUGGINGFACE_HUB_CACHE", "/old")], "/c"),
        ] {
            assert_eq!(settings(variables).cache.as_deref(), Some(Path::new(expected)));
        }
        assert_eq!(settings(&[]).cache, None);
    }

    #[test]
    fn the_token_comes_from_a_variable_else_from_a_file() {
        let home = tempfile::tempdir().unwrap();
        let at = home.path().to_str().unwrap();
        assert_eq!(settings(&[("HF_HOME", at)]).token, None);
        std::fs::write(home.path().join("token"), "hf_file\n").unwrap();
        std::fs::write(home.path().join("other"), "hf_other").unwrap();
        let found = settings(&[("HF_HOME", at)]);
        assert_eq!(found.token.as_deref(), Some("hf_file"));
        assert!(found.token_from.contains("token"), "{}", found.token_from);
        let other = format!("{at}/other");
        assert_eq!(
            settings(&[("HF_HOME", at), ("HF_TOKEN_PATH", &other)]).token.as_deref(),
            Some("hf_other")
        );
        let found =
            settings(&[("HF_HOME", at), ("HUGGING_FACE_HUB_TOKEN", "hf_old"), ("HF_TOKEN", " hf_new\n")]);
        assert_eq!((found.token.as_deref(), &*found.token_from), (Some("hf_new"), "HF_TOKEN"));
        // What cannot be in a header is no token.
        assert_eq!(settings(&[("HF_TOKEN", "a\u{7}b")]).token, None);
    }

    #[test]
    fn offline_is_said_in_two_ways_and_the_endpoint_has_no_slash() {
        assert!(settings(&[("TRANSFORMERS_OFFLINE", "1")]).offline);
        assert!(settings(&[("HF_HUB_OFFLINE", "ON")]).offline);
        assert!(!settings(&[("HF_HUB_OFFLINE", "0")]).offline);
        assert_eq!(settings(&[("HF_ENDPOINT", "http://m/")]).endpoint, "http://m");
        assert_eq!(settings(&[]).endpoint, "https://huggingface.co");
    }

    #[test]
    fn an_endpoint_is_shown_without_its_password() {
        let found = settings(&[("HF_ENDPOINT", "https://u:SENTINEL@m/hf/")]);
        assert_eq!(&*found.endpoint, "https://m/hf");
        let nonsense = settings(&[("HF_ENDPOINT", "u:SENTINEL@m"), ("HF_TOKEN", "hf_token")]);
        assert_eq!((&*nonsense.endpoint, nonsense.token.as_deref()), ("***@m", Some("hf_token")));
        for unescaped in ["https://u:SENT/INEL@m", "https://u:SENT#INEL@m", "https://u/SENTINEL@m"] {
            let found = settings(&[("HF_ENDPOINT", unescaped)]);
            assert!(found.endpoint.starts_with("https://***"), "{}", found.endpoint);
        }
    }

    #[test]
    fn a_token_from_a_file_is_a_secret_too() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), "hf_SENTINEL").unwrap();
        let environment = Environment::of([("HF_HOME", home.path().to_str().unwrap())]);
        let environment = Settings::of(&environment).with_token(&environment);
        assert_eq!(environment.scrub("with hf_SENTINEL"), "with ***");
    }
}
