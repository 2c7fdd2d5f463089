//! The environment variables that decide how a store is reached, taken once for every store that is set up.
//!
//! So that stores are a function of what they are given: two checkpoints opened under different variables get
//! different stores, one opened again under the same gets the same with its connections and credentials. It also knows
//! which of the values are secret, and keeps them out of sentences.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::store::location::without_user;

/// Variables of the cloud providers' own tools, by how their names begin.
const PREFIXES: [&str; 17] = [
    "AWS_",
    "AZURE_",
    "AZURITE_",
    "GOOGLE_",
    "CLOUDSDK_CONFIG",
    "STORAGE_EMULATOR_HOST",
    "IDENTITY_",
    "MSI_",
    "GCE_METADATA_",
    "HF_",
    "HUGGING",
    "TRANSFORMERS_OFFLINE",
    "XDG_CACHE_HOME",
    "HOME",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
];
/// What the names of secret variables hold.
const SECRET: [&str; 8] =
    ["SECRET", "TOKEN", "KEY", "SAS", "PASSWORD", "CONNECTION_STRING", "CREDENTIAL", "HEADER"];
/// It holds the path of a file, though its name says otherwise; unless someone put the file itself there.
const PATH_OF_CREDENTIALS: &str = "GOOGLE_APPLICATION_CREDENTIALS";
/// Shorter values are not looked for: they would be found everywhere.
const SHORTEST_SECRET: usize = 8;

/// A copy of the variables concerned. It has no `Debug` form.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Environment {
    variables: BTreeMap<String, String>,
    /// Whether this is the process's: libraries that read the process's variables themselves may then be asked.
    process: bool,
}

impl Environment {
    /// The variables of this process.
    pub fn of_process() -> Self {
        let ours = |name: &str| PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, value)| ours(name) && !value.is_empty())
            .collect();
        Self { variables, process: true }
    }

    /// These variables and no others: for tests, and for programs that keep settings elsewhere.
    pub fn of<N: Into<String>, V: Into<String>>(variables: impl IntoIterator<Item = (N, V)>) -> Self {
        let variables = variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        Self { variables, process: false }
    }

    /// The same with one variable set otherwise.
    pub(super) fn with(&self, name: &str, value: &str) -> Self {
        let mut variables = self.variables.clone();
        variables.insert(name.to_owned(), value.to_owned());
        Self { variables, process: self.process }
    }

    pub(super) fn is_of_process(&self) -> bool {
        self.process
    }

    /// The value of the first of `names` that is set.
    pub(super) fn get(&self, names: &[&str]) -> Option<&str> {
        names.iter().find_map(|name| self.variables.get(*name)).map(String::as_str)
    }

    /// Whether one of `names` is set to yes.
    pub(super) fn is_set(&self, names: &[&str]) -> bool {
        self.get(names).is_some_and(|value| {
            ["1", "true", "yes", "on"].iter().any(|yes| value.trim().eq_ignore_ascii_case(yes))
        })
    }

    /// All variables whose names begin with `prefix`.
    pub(super) fn starting_with<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        let these = self.variables.iter().filter(move |(name, _)| name.starts_with(prefix));
        these.map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// A number that stands for all of it.
    pub(super) fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.variables, self.process).hash(&mut hasher);
        hasher.finish()
    }

    /// `text` without anything secret that it may repeat: secret values of variables, and users, passwords and queries
    /// of URLs.
    pub(super) fn scrub(&self, text: &str) -> String {
        let is_secret = |name: &str, value: &str| {
            SECRET.iter().any(|part| name.contains(part))
                && !name.ends_with("_FILE")
                && !name.ends_with("_PATH")
                && (name != PATH_OF_CREDENTIALS || value.contains('{'))
        };
        let mut text = text.to_owned();
        for (name, value) in &self.variables {
            let value = value.trim();
            if value.len() >= SHORTEST_SECRET && is_secret(name, value) && text.contains(value) {
                text = text.replace(value, "***");
            }
        }
        without_queries(&text)
    }
}

/// A text in which no URL has a user, and every URL ends before its query.
fn without_queries(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for word in text.split_inclusive(char::is_whitespace) {
        let word = without_user(word, &['/', '?', '#', '"']);
        match (word.contains("://"), word.find('?')) {
            (true, Some(at)) => {
                out.push_str(&word[..at]);
                let rest = word[at..].trim_end_matches(|c: char| !c.is_whitespace());
                out.push_str(rest.trim_start_matches(|c: char| !c.is_whitespace()));
            }
            _ => out.push_str(&word),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_queries_are_taken_out_of_sentences() {
        let environment = Environment::of([
            ("AWS_SECRET_ACCESS_KEY", "SENTINEL-1"),
            ("AZURE_STORAGE_CONNECTION_STRING", "AccountKey=SENTINEL-2"),
            ("AWS_REGION", "us-east-1-long"),
        ]);
        let text = environment.scrub(
            "with SENTINEL-1 and AccountKey=SENTINEL-2 in us-east-1-long at https://h/x?sig=SENTINEL-3 end",
        );
        assert_eq!(text, "with *** and *** in us-east-1-long at https://h/x end");
        let text =
            environment.scrub("at \"ftp://me:SENTINEL@h\", abfss://c@acc.dfs.core.windows.net/a and a@b");
        assert_eq!(text, "at \"ftp://h\", abfss://c@acc.dfs.core.windows.net/a and a@b");
    }

    #[test]
    fn the_path_of_a_file_of_credentials_may_be_shown_but_not_what_it_holds() {
        let shown = |value: &'static str| {
            Environment::of([("GOOGLE_APPLICATION_CREDENTIALS", value)]).scrub(&format!("at {value}."))
        };
        assert_eq!(shown("/var/run/credentials.json"), "at /var/run/credentials.json.");
        assert_eq!(shown("{\"private_key\":1}"), "at ***.");
    }

    #[test]
    fn the_fingerprint_follows_the_values() {
        let one = |value| Environment::of([("AWS_REGION", value)]).fingerprint();
        assert_eq!(one("a"), one("a"));
        assert_ne!(one("a"), one("b"));
    }

    #[test]
    fn yes_is_written_in_several_ways() {
        let environment = Environment::of([("A", "True"), ("B", "0")]);
        assert!(environment.is_set(&["A"]) && !environment.is_set(&["B"]) && !environment.is_set(&["C"]));
        assert_eq!(environment.get(&["C", "A"]), Some("True"));
    }
}
