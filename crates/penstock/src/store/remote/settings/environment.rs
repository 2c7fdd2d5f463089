//! The environment variables that decide how a store is reached: a copy, made once when a checkpoint is opened.
//!
//! A store is a function of this copy. Two checkpoints opened under different variables get different stores; one opened
//! again under the same variables gets the same store with its connections and credentials. Storage options are laid
//! over the copy as variables (see `options`). It also knows which of the values are secret, and removes them from text.
//!
//! Nothing in `store/remote` reads the process's environment otherwise: reader threads run while Python may call
//! `setenv`, which frees what `getenv` returns.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::address::Provider;
use crate::error::{Error, ErrorKind, Result};
use crate::store::location::shown;

/// Variables of the cloud providers' own tools, by how their names begin.
const PREFIXES: [&str; 27] = [
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
    "SSL_CERT_DIR",
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
    "NO_PROXY",
    "no_proxy",
    "REQUEST_METHOD",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
];
/// Those of the programs that are run for tokens of Google.
const OF_PROGRAMS: [&str; 4] = ["PATH", "PYTHON", "LD_LIBRARY_PATH", "TMPDIR"];
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
    /// The variables that storage options set, and the names of these options as they were given.
    options: BTreeMap<String, String>,
    /// Whether it is of a process: files of its user and metadata services of its machine may then be asked too.
    process: bool,
    fingerprint: u64,
}

impl Hash for Environment {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.fingerprint.hash(state);
    }
}

impl Environment {
    /// The variables of this process, as they are now.
    ///
    /// Whoever shares a process with code that calls `setenv` (Python does, under the GIL) calls this where that code
    /// cannot run.
    pub fn of_process() -> Self {
        let ours = |name: &str| PREFIXES.iter().chain(&OF_PROGRAMS).any(|prefix| name.starts_with(prefix));
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| ours(name))
            .collect();
        Self::made(variables, BTreeMap::new(), true)
    }

    /// These variables and no others: for tests, and for programs that keep settings elsewhere.
    pub fn of<N: Into<String>, V: Into<String>>(variables: impl IntoIterator<Item = (N, V)>) -> Self {
        let variables = variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        Self::made(variables, BTreeMap::new(), false)
    }

    fn made(
        mut variables: BTreeMap<String, String>,
        options: BTreeMap<String, String>,
        process: bool,
    ) -> Self {
        // What is read from a file, as by a Kubernetes secret, often ends with a line break. No setting means one.
        for value in variables.values_mut().filter(|value| value.trim().len() < value.len()) {
            *value = value.trim().to_owned();
        }
        // A file or a template that is empty sets nothing.
        variables.retain(|_, value| !value.is_empty());
        let mut hasher = DefaultHasher::new();
        (&variables, &options, process).hash(&mut hasher);
        Self { fingerprint: hasher.finish(), variables, options, process }
    }

    /// The same with one variable set otherwise.
    pub(crate) fn with(&self, name: &str, value: &str) -> Self {
        let mut variables = self.variables.clone();
        variables.insert(name.to_owned(), value.to_owned());
        Self::made(variables, self.options.clone(), self.process)
    }

    /// The same without the variables that only programs need.
    pub(crate) fn without_programs(&self) -> Self {
        let mut variables = self.variables.clone();
        variables.retain(|name, _| !OF_PROGRAMS.iter().any(|prefix| name.starts_with(prefix)));
        Self::made(variables, self.options.clone(), self.process)
    }

    /// The same without the variables `hidden`, and with those of `options` set by storage options: each the variable,
    /// its value, and the option's name.
    pub(crate) fn overlaid(&self, hidden: &[&str], options: Vec<(String, String, String)>) -> Self {
        let (mut variables, mut set) = (self.variables.clone(), self.options.clone());
        variables.retain(|name, _| !hidden.contains(&name.as_str()));
        for (name, value, option) in options {
            if value.trim().is_empty() {
                continue;
            }
            set.insert(name.clone(), option);
            variables.insert(name, value);
        }
        Self::made(variables, set, self.process)
    }

    /// Where the value of this variable is from, as errors say it.
    pub(crate) fn origin<'a>(&self, name: &'a str) -> &'a str {
        if self.options.contains_key(name) { "storage_options" } else { name }
    }

    /// What to look at and to change where the value of this variable is wrong: its name, or the option that set it.
    pub(crate) fn setting(&self, name: &str) -> String {
        match self.options.get(name) {
            Some(option) => format!("storage_options[{option:?}]"),
            None => name.to_owned(),
        }
    }

    /// How to do without the value of this variable.
    pub(crate) fn without(&self, name: &str) -> String {
        let verb = if self.options.contains_key(name) { "leave out" } else { "unset" };
        format!("{verb} {}", self.setting(name))
    }

    pub(crate) fn is_of_process(&self) -> bool {
        self.process
    }

    /// Looks at the settings of one provider only: those of others are sent nowhere.
    ///
    /// # Errors
    /// `Config` for the first setting that goes into a request's header, and cannot.
    pub(crate) fn check_headers(&self, provider: Provider) -> Result<()> {
        let prefix = match provider {
            Provider::S3 => "AWS_",
            Provider::Gcs => "GOOGLE_",
            Provider::Azure => "AZURE_",
            // Plain servers get what the URL says. The hub's settings drop what cannot be sent by themselves.
            Provider::Web | Provider::Hub => return Ok(()),
        };
        let in_header = |name: &str| {
            name.starts_with(prefix) && ["_TOKEN", "_KEY_ID"].iter().any(|end| name.ends_with(end))
        };
        let mut wrong = self.variables.iter().filter(|(name, value)| in_header(name) && !fits_header(value));
        let Some((name, _)) = wrong.next() else { return Ok(()) };
        let cause = format!(
            "{} holds characters that no request can carry, such as a line break",
            self.setting(name)
        );
        Err(Error::new(ErrorKind::Config, cause)
            .remedy("Check what it was copied from")
            .detail("setting", name))
    }

    /// The value of the first of `names` that is set.
    pub(crate) fn get(&self, names: &[&str]) -> Option<&str> {
        names.iter().find_map(|name| self.variables.get(*name)).map(String::as_str)
    }

    /// Whether one of `names` is set to yes.
    pub(crate) fn is_set(&self, names: &[&str]) -> bool {
        self.get(names).is_some_and(|value| {
            ["1", "true", "yes", "on"].iter().any(|yes| value.trim().eq_ignore_ascii_case(yes))
        })
    }

    /// All variables whose names begin with `prefix`.
    pub(crate) fn starting_with<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        let these = self.variables.iter().filter(move |(name, _)| name.starts_with(prefix));
        these.map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// `text` without anything secret that it may repeat: secret values of variables, and users, passwords and queries
    /// of URLs.
    pub(crate) fn scrub(&self, text: &str) -> String {
        let is_secret = |name: &str, value: &str| {
            is_secret(name)
                && !name.ends_with("_FILE")
                && !name.ends_with("_PATH")
                && (name != PATH_OF_CREDENTIALS || value.contains('{'))
        };
        let variables = self.variables.iter().map(|(name, value)| (name, value.trim()));
        let mut secrets: Vec<_> = variables
            .filter(|(name, value)| value.len() >= SHORTEST_SECRET && is_secret(name, value))
            .map(|(_, value)| value)
            .collect();
        // One may be part of another, of which the rest must not stay.
        secrets.sort_unstable_by_key(|value| Reverse(value.len()));
        let text = secrets.iter().fold(text.to_owned(), |text, secret| text.replace(secret, "***"));
        without_secrets(&text)
    }
}

/// Whether the value of a variable of that name is secret, unless it is the path of a file.
pub(crate) fn is_secret(name: &str) -> bool {
    SECRET.iter().any(|part| name.contains(part))
}

/// Whether a key or a token can be part of a request's header.
pub(crate) fn fits_header(value: &str) -> bool {
    value.bytes().all(|byte| (b' '..=b'~').contains(&byte))
}

/// A text in which every URL is as it may be shown.
fn without_secrets(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for word in text.split_inclusive(char::is_whitespace) {
        let url = word.find("://").map(|at| {
            // Marks may stand around it.
            let begin = word[..at].rfind(|c: char| !c.is_ascii_alphanumeric() && !"+-.".contains(c));
            let begin = begin.map_or(0, |at| at + word[at..].chars().next().map_or(1, char::len_utf8));
            let end = word.trim_end_matches(|c: char| c.is_whitespace() || "\"'`,;:)>".contains(c)).len();
            begin..end.max(begin)
        });
        match url {
            Some(url) => {
                out.push_str(&word[..url.start]);
                // What would be part of a key is a query where someone else wrote it.
                let shown = shown(&word[url.clone()]);
                out.push_str(shown.split('?').next().unwrap_or_default());
                out.push_str(&word[url.end..]);
            }
            None => out.push_str(word),
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
        let text = environment.scrub("(url=https://me:SENT/INEL@h/x), s3://b/k?X-Amz-Signature=SENTINEL");
        assert_eq!(text, "(url=https://***@h/x), s3://b/k");
    }

    #[test]
    fn a_secret_that_is_part_of_another_leaves_none_of_it() {
        for (short, long) in [("AWS_A_TOKEN", "AWS_B_TOKEN"), ("AWS_B_TOKEN", "AWS_A_TOKEN")] {
            let environment = Environment::of([(short, "SENTINEL"), (long, "before-SENTINEL-after")]);
            assert_eq!(environment.scrub("before-SENTINEL-after, SENTINEL"), "***, ***", "{short}");
        }
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
    fn what_options_set_is_another_environment_and_is_known_as_theirs() {
        let one = |value| Environment::of([("AWS_REGION", value)]);
        assert!(one("a") == one("a") && one("a") != one("b"));
        assert_ne!(one("a").fingerprint, one("b").fingerprint);
        let given =
            one("a").overlaid(&["AWS_REGION"], vec![("AWS_PROFILE".into(), "p".into(), "profile".into())]);
        assert_eq!((given.get(&["AWS_REGION"]), given.get(&["AWS_PROFILE"])), (None, Some("p")));
        assert_eq!((given.origin("AWS_PROFILE"), given.origin("HOME")), ("storage_options", "HOME"));
        assert_eq!(given.setting("AWS_PROFILE"), "storage_options[\"profile\"]");
        assert_eq!(given.setting("HOME"), "HOME");
        assert_eq!(given.without("AWS_PROFILE"), "leave out storage_options[\"profile\"]");
        assert_eq!(given.without("HOME"), "unset HOME");
    }

    #[test]
    fn what_is_blank_is_not_set() {
        let environment = Environment::of([("AWS_REGION", " "), ("AWS_PROFILE", "\n"), ("HOME", "/u\n")]);
        assert_eq!(environment.get(&["AWS_REGION", "AWS_PROFILE", "HOME"]), Some("/u"));
        assert_eq!(environment.starting_with("AWS_").count(), 0);
        let set = Environment::of([("AWS_REGION", "here")]);
        let given = set.overlaid(&[], vec![("AWS_REGION".into(), " \t".into(), "region".into())]);
        assert_eq!(given.get(&["AWS_REGION"]), Some("here"));
        assert_eq!(given.origin("AWS_REGION"), "AWS_REGION");
    }

    #[test]
    fn only_the_settings_of_a_provider_are_in_its_headers() {
        let names = ["AWS_SESSION_TOKEN", "GOOGLE_BEARER_TOKEN", "AZURE_STORAGE_TOKEN", "HF_TOKEN"];
        let providers = [Provider::S3, Provider::Gcs, Provider::Azure, Provider::Hub, Provider::Web];
        for (at, name) in names.into_iter().enumerate() {
            let environment = Environment::of([(name, "a\nb")]);
            for (of, provider) in providers.into_iter().enumerate() {
                let checked = environment.check_headers(provider);
                assert_eq!(checked.is_err(), at == of && at < 3, "{name} for {}", provider.name());
            }
        }
    }

    #[test]
    fn yes_is_written_in_several_ways() {
        let environment = Environment::of([("A", "True"), ("B", "0")]);
        assert!(environment.is_set(&["A"]) && !environment.is_set(&["B"]) && !environment.is_set(&["C"]));
        assert_eq!(environment.get(&["C", "A"]), Some("True"));
    }
}
