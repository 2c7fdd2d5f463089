//! What can be said of a location without asking anyone.

use std::borrow::Cow;

#[cfg(feature = "remote")]
use sha2::{Digest, Sha256};

/// Whether a location is a URL, which the file system knows nothing of.
pub(crate) fn is_url(location: &str) -> bool {
    scheme(location).is_some()
}

/// The scheme of a URL; none for a path.
pub(crate) fn scheme(location: &str) -> Option<&str> {
    let (scheme, _) = location.split_once("://")?;
    let valid =
        !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
    valid.then_some(scheme)
}

/// The kinds of store that URLs lead to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Provider {
    S3,
    Gcs,
    Azure,
    /// A plain HTTP server.
    Web,
    /// The Hugging Face hub.
    Hub,
}

/// Schemes of URLs that lead to a store.
const SCHEMES: [(&str, Provider); 14] = [
    ("s3", Provider::S3),
    ("s3a", Provider::S3),
    ("gs", Provider::Gcs),
    ("gcs", Provider::Gcs),
    ("az", Provider::Azure),
    ("azure", Provider::Azure),
    ("abfs", Provider::Azure),
    ("abfss", Provider::Azure),
    ("adl", Provider::Azure),
    ("wasb", Provider::Azure),
    ("wasbs", Provider::Azure),
    ("hf", Provider::Hub),
    ("http", Provider::Web),
    ("https", Provider::Web),
];

/// The kind of store that the scheme of a URL names; none for a path, and for a scheme that is not known.
pub(crate) fn provider(location: &str) -> Option<Provider> {
    of_scheme(scheme(location)?)
}

/// Whether a scheme is one that leads to a store.
pub(crate) fn is_known_scheme(scheme: &str) -> bool {
    of_scheme(scheme).is_some()
}

fn of_scheme(scheme: &str) -> Option<Provider> {
    SCHEMES.iter().find(|(known, _)| scheme.eq_ignore_ascii_case(known)).map(|(_, provider)| *provider)
}

/// Whether a location is an HTTP URL, in which a question mark begins a query. Keys of object stores may hold one.
pub(crate) fn is_http(location: &str) -> bool {
    provider(location) == Some(Provider::Web)
}

/// Whether a location names a key of an object store, which is taken to the letter, question marks and hashes included.
pub(crate) fn is_key(location: &str) -> bool {
    matches!(provider(location), Some(Provider::S3 | Provider::Gcs | Provider::Azure))
}

/// Whether a location names a file of the Hugging Face hub.
pub(crate) fn is_hub(location: &str) -> bool {
    provider(location) == Some(Provider::Hub)
}

/// What stands for what is not shown.
pub(crate) const HIDDEN: &str = "***";

/// Where the host of a URL ends, for whoever takes URLs apart by their rules.
const ENDS: [char; 4] = ['/', '?', '#', '\\'];

/// A location as errors may show it: without what may be secret, its user and its query.
///
/// Whoever writes a password into a URL may forget to escape what is special in it. So what comes before the last `@` is
/// not shown if a colon is in it, wherever the URL's rules have it end. Part of a key that looks like a query is not shown
/// either: someone may have copied a signature with it.
pub fn shown(location: &str) -> Cow<'_, str> {
    match scheme(location) {
        Some(scheme) => shown_url(location, scheme),
        None if is_plainly_path(location) => Cow::Borrowed(location),
        // A mistyped URL, or a path with a strange name.
        None => match split_user(location) {
            Some((before, at)) if before.contains(':') || holds_token(before) => without_user(before, at),
            _ => Cow::Borrowed(&location[..query(location).unwrap_or(location.len())]),
        },
    }
}

fn shown_url<'a>(location: &'a str, scheme: &str) -> Cow<'a, str> {
    let begin = scheme.len() + "://".len();
    let (rest, is_key, is_hub) = (&location[begin..], is_key(location), is_hub(location));
    let without_query = |text: &'a str| match is_key {
        true => &text[..query(text).unwrap_or(text.len())],
        false => up_to(text, &['?', '#']),
    };
    // Containers of Azure and revisions of the hub are told by an `@` too.
    let has_at = is_hub || provider(location) == Some(Provider::Azure);
    let authority = up_to(rest, if is_key { &ENDS[..1] } else { &ENDS });
    let all = || Cow::Borrowed(&location[..begin + without_query(rest).len()]);
    let nothing = || Cow::Owned(format!("{scheme}://{HIDDEN}"));
    let Some((before, after)) = rest.rsplit_once('@') else {
        let is_plain = match is_key || is_hub {
            true => !(authority.contains(':') || (is_hub && holds_token(authority))),
            false => authority.is_empty() || is_host_and_port(authority),
        };
        return if is_plain { all() } else { nothing() };
    };
    let may_be_secret = before.contains(':') || (is_hub && holds_token(before));
    if before == HIDDEN || (!may_be_secret && (has_at || !authority.contains('@'))) {
        return all();
    }
    let after = without_query(after);
    match before.len() < authority.len() && !has_at {
        // It may be a signature's query as well.
        _ if before.contains(['?', '#']) => nothing(),
        true if is_host_and_port(up_to(after, &ENDS)) => Cow::Owned(format!("{scheme}://{after}")),
        true => nothing(),
        false => Cow::Owned(format!("{scheme}://{HIDDEN}@{after}")),
    }
}

/// A setting that should be the URL of a server, as errors may show it: an `@` in it ends a user and a password.
pub fn shown_setting(value: &str) -> Cow<'_, str> {
    match (scheme(value), split_user(value)) {
        (Some(scheme), Some((before, at))) if is_doubtful_setting(value) => {
            Cow::Owned(format!("{scheme}://{}", without_user(before, at)))
        }
        (Some(_), _) => shown(value),
        (None, Some((before, at))) => without_user(before, at),
        (None, None) => Cow::Borrowed(up_to(value, &['?', '#'])),
    }
}

/// What is shown of a text in which a user and a password come `before` something that begins `at` an `@`.
fn without_user<'a>(before: &str, at: &'a str) -> Cow<'a, str> {
    match before.contains(['?', '#']) {
        true => Cow::Borrowed(HIDDEN),
        false => Cow::Owned(format!("{HIDDEN}{}", up_to(at, &['?', '#']))),
    }
}

/// Whether a setting that should be the URL of a server, with a user and a password or without, can be read in more than
/// one way, or in none: where something special in a password is not escaped.
pub(crate) fn is_doubtful_setting(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = up_to(rest, &ENDS);
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    rest[authority.len()..].contains('@') || !is_host_and_port(host)
}

/// Whether a path may be a URL that lacks its scheme, or a part of that, with a password or a signature in it.
pub fn is_doubtful_path(location: &str) -> bool {
    !is_url(location) && shown(location) != location
}

fn is_plainly_path(location: &str) -> bool {
    location.starts_with(['/', '.', '~'])
}

/// What comes before the last `@`, which may end a user and a password, and what begins there. The `@` may be escaped, as
/// people do who are careful with half of it.
fn split_user(text: &str) -> Option<(&str, &str)> {
    text.rfind('@').max(text.rfind("%40")).map(|at| text.split_at(at))
}

/// Where something begins that looks like a query or a fragment with parameters: a signature may be among them.
fn query(text: &str) -> Option<usize> {
    let mut marks = text.match_indices(['?', '#']).map(|(at, _)| at);
    // Of the pattern `run?/lr=0.1/*`, nothing is a parameter.
    let has_parameter = |after: &str| after.split_once('=').is_some_and(|(name, _)| !name.contains('/'));
    marks.find(|at| has_parameter(up_to(&text[at + 1..], &['?', '#'])))
}

/// Whether a word of it begins as tokens of the Hugging Face hub do.
fn holds_token(text: &str) -> bool {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|word| word.starts_with("hf_"))
}

fn is_host_and_port(text: &str) -> bool {
    let (host, port) = match text.rsplit_once(':').filter(|(_, port)| !port.contains(']')) {
        Some((host, port)) => (host, port),
        None => (text, ""),
    };
    let is_host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(host) => up_to(host, &['%']).parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && !host.contains([':', '[', ']', '%', ' ', ';', '&', '"', '\'']),
    };
    is_host && (port.is_empty() || port.parse::<u16>().is_ok())
}

fn up_to<'a>(text: &'a str, ends: &[char]) -> &'a str {
    &text[..text.find(ends).unwrap_or(text.len())]
}

/// What tells one text from others, and does not tell what it says: its SHA-256. For what is kept on disk.
#[cfg(feature = "remote")]
pub(super) fn fingerprint(text: &str) -> String {
    let digest = Sha256::digest(text.as_bytes());
    digest.iter().fold(String::new(), |all, byte| all + &format!("{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_do_not_show_secrets() {
        assert_eq!(shown("https://user:pass@host/a?sig=1#x"), "https://host/a");
        assert_eq!(shown("https://user:pass@example.com/a@b?sig=1#x"), "https://***@b");
        assert_eq!(shown("s3://bucket/a"), "s3://bucket/a");
        assert_eq!(shown("abfss://c@acc.dfs.core.windows.net/a"), "abfss://c@acc.dfs.core.windows.net/a");
        assert_eq!(shown("/a?b@c#d"), "/a?b@c#d");
        assert_eq!(shown("hf://o/n/a?b#c"), "hf://o/n/a");
        // Of keys all is shown but what may be a signature.
        assert_eq!(shown("s3://bucket/what?#1"), "s3://bucket/what?#1");
        assert_eq!(shown("S3://me:secret@bucket/a#b"), "S3://bucket/a#b");
        assert_eq!(
            shown("abfss://c@acc.dfs.core.windows.net/a#1?sv=1&sig=2"),
            "abfss://c@acc.dfs.core.windows.net/a#1"
        );
    }

    #[test]
    fn an_at_after_the_host_is_shown_where_it_ends_no_password() {
        for location in [
            "https://cdn.example.com/npm/model@1.2/model.safetensors",
            "https://example.com/@user/model.safetensors",
            "https://example.com/a/b@c.safetensors",
            "http://127.0.0.1:9000/models%40v1/m.safetensors",
            "http://[::1]:9000/a/m.safetensors",
            "http://localhost/a@b/m.safetensors",
            "http://minio:9000/models/m.safetensors",
            "s3://bucket/a@b/m.safetensors",
            "s3://bucket/a/12:30/m.safetensors",
            "az://container/a@b",
            "hf://org/name@refs/pr/1/a b@c",
            "hf://gpt2@main",
            "https://",
            "/a:b://c@d",
            "a@c",
            "./a:b@c",
            "./a?b=c",
            "run?/lr=0.1/*.safetensors",
            "models/hf_model",
            "s3:a.safetensors",
        ] {
            assert_eq!(shown(location), location);
        }
        for (location, expected) in [
            ("https://me:pa/ss@host/m.safetensors", "https://***@host/m.safetensors"),
            ("https://me:12/34@host/m.safetensors?sig=1", "https://***@host/m.safetensors"),
            ("https://my.name/x:y@host/m", "https://***@host/m"),
            ("https://my.name:12/x@minio/m", "https://***@minio/m"),
            ("http://me:pa?ss@host/m", "http://***"),
            ("http://minio:9000/m?sig=a@b", "http://***"),
            ("http://host:port/m", "http://***"),
            ("s3://key:sec/ret@bucket/x", "s3://***@bucket/x"),
            ("s3://arn:sec/ret@bucket/x", "s3://***@bucket/x"),
            ("s3://key:secret", "s3://***"),
            ("abfss://me:x@c@acc.dfs.core.windows.net/a", "abfss://***@acc.dfs.core.windows.net/a"),
            (" https://me:x@host/m", "***@host/m"),
            ("https:/me:x/y@host/m", "***@host/m"),
            ("s3:me:x@bucket/m", "***@bucket/m"),
            ("https//me:x/y@host/m", "***@host/m"),
            ("me:x@host/m", "***@host/m"),
            ("me:x%40host/m", "***%40host/m"),
            (" https://me:x%40h/m", "***%40h/m"),
            ("hf://hf_x%40org/name", "hf://***"),
            ("me:x?y=z@host/m", "***"),
            ("acc.blob.core.windows.net/c/m?sv=1&sig=x", "acc.blob.core.windows.net/c/m"),
            ("https//h/c?sig=x", "https//h/c"),
            ("\thttps://h/m?sig=x", "\thttps://h/m"),
            ("'https://h/m?sig=x'", "'https://h/m"),
            ("s3://b/k#X-Amz-Signature=x", "s3://b/k"),
            ("hf_x@org/name", "***@org/name"),
            ("hf://hf_x@org/name", "hf://***@org/name"),
        ] {
            assert_eq!(shown(location), expected, "{location}");
            assert_eq!(shown(expected), expected);
        }
    }

    #[test]
    fn settings_are_shown_and_judged_as_urls_of_servers() {
        for (value, expected, doubtful) in [
            ("http://me:x@host:9000/", "http://host:9000/", false),
            ("me:x@host:9000", "***@host:9000", false),
            ("host:9000", "host:9000", false),
            ("http://me:se#cret@host:9000", "http://***", true),
            ("http://me:se/cret@host:9000", "http://***@host:9000", true),
            ("me:se/cret@host", "***@host", true),
            ("http://me:secret", "http://***", true),
            ("https://example.com/a@b", "https://***@b", true),
        ] {
            assert_eq!((&*shown_setting(value), is_doubtful_setting(value)), (expected, doubtful), "{value}");
        }
    }

    /// Every way to put a secret into a user and a password, with something special before it, in it and after it.
    #[test]
    fn no_part_of_a_password_is_shown_whatever_is_special_in_it() {
        const SPECIAL: &str = "/?#@:\\%[]&=+;,!$'()*~ .\"<>|^`{}-_é\t";
        let mut seen = 0;
        for a in SPECIAL.chars() {
            for b in SPECIAL.chars() {
                let words = [
                    format!("{a}SENTINEL{b}x"),
                    format!("x{a}SENTINEL{b}"),
                    format!("1{a}{b}SENTINEL"),
                    format!("SENTINEL{a}{b}1"),
                ];
                for word in words {
                    for user in [
                        format!("me:{word}"),
                        format!("{word}:x"),
                        format!("my.name:{word}"),
                        format!("{word}:{word}"),
                    ] {
                        for end in [
                            "host/m.safetensors",
                            "host:9000",
                            "example.com/a/m.safetensors?x=y@z",
                            "a.b.example.com",
                            "127.0.0.1:1/a@b",
                        ] {
                            for scheme in ["http", "https", "HTTPS", "ftp", "s3", "gs", "az", "abfss", "hf"] {
                                let location = format!("{scheme}://{user}@{end}");
                                assert!(
                                    !shown(&location).contains("SENTINEL"),
                                    "{location} {}",
                                    shown(&location)
                                );
                                assert!(!shown_setting(&location).contains("SENTINEL"), "{location}");
                                seen += 1;
                            }
                            let value = format!("{user}@{end}");
                            assert!(
                                !shown_setting(&value).contains("SENTINEL"),
                                "{value} {}",
                                shown_setting(&value)
                            );
                        }
                    }
                }
            }
        }
        // Nor of a signature in a query.
        for c in SPECIAL.chars() {
            for host in ["host", "host:9000", "example.com", "127.0.0.1:1", "me:x@host", "bucket"] {
                for scheme in ["http", "https", "s3", "gs", "az", "hf", "ftp", " http"] {
                    for query in
                        [format!("a{c}b@SENTINEL"), format!("SENTINEL{c}@b"), format!("a@{c}SENTINEL@b")]
                    {
                        let location = format!("{scheme}://{host}/m.safetensors?sig={query}");
                        assert!(!shown(&location).contains("SENTINEL"), "{location} {}", shown(&location));
                    }
                }
            }
        }
        assert!(seen > 100_000, "{seen}");
    }

    #[test]
    fn a_scheme_makes_a_url() {
        assert!(is_url("s3://b") && !is_url("a b://c") && !is_url("/a/b") && !is_url("://x"));
        assert!(is_http("HTTPS://h") && !is_http("s3://b") && !is_http("http:/x"));
    }
}
