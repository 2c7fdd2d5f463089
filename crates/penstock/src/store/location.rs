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

/// A location as errors may show it: a URL without what may be secret, its user and its query.
///
/// Whoever writes a password into a URL may forget to escape what is special in it. So an `@` after the host may end a
/// user's name and password all the same, and what comes before it is shown only where it is certainly none: see
/// [`doubtful`]. Part of a key that looks like a query is not shown either: someone may have copied a signature with it.
pub fn shown(location: &str) -> Cow<'_, str> {
    if location.starts_with('/') {
        return Cow::Borrowed(location);
    }
    let Some((before, rest)) = location.split_once("://") else {
        let query = query(location).filter(|_| !is_plainly_path(location));
        return match (doubtful_path(location), query) {
            // Either may hold the other.
            (Some(at), Some(query)) if query < at => Cow::Borrowed(HIDDEN),
            (Some(at), _) => Cow::Owned(format!("{HIDDEN}{}", up_to(&location[at..], &['?', '#']))),
            // Of a signed URL without its scheme.
            (None, Some(at)) => Cow::Owned(shown_nearly(&location[..at]).into_owned()),
            (None, None) => shown_nearly(location),
        };
    };
    let Some(scheme) = scheme(location) else {
        // A mistyped URL, or a path with a strange name.
        return match split_user(location) {
            Some((before, _)) if before.contains(['?', '#']) => Cow::Borrowed(HIDDEN),
            Some((_, after)) => Cow::Owned(format!("{HIDDEN}@{}", up_to(after, &['?', '#']))),
            None => Cow::Borrowed(up_to(location, &['?', '#'])),
        };
    };
    let is_key = is_key(location);
    let without_query = |text: &str| match is_key {
        true => query(text).unwrap_or(text.len()),
        false => up_to(text, &['?', '#']).len(),
    };
    match doubtful(location) {
        Some(Doubt::Before(at)) => {
            let after = &rest[at + 1..];
            Cow::Owned(format!("{scheme}://{HIDDEN}@{}", &after[..without_query(after)]))
        }
        Some(Doubt::All) => Cow::Owned(format!("{scheme}://{HIDDEN}")),
        None => {
            let authority = up_to(rest, if is_key { &ENDS[..1] } else { &ENDS });
            // What was hidden before stays so.
            let is_hidden = rest.strip_prefix(HIDDEN).is_some_and(|rest| rest.starts_with('@'));
            let user = match is_hidden || names_container(location) || is_hub(location) {
                true => 0,
                false => authority.rfind('@').map_or(0, |at| at + 1),
            };
            match user {
                0 => Cow::Borrowed(&location[..before.len() + "://".len() + without_query(rest)]),
                _ => Cow::Owned(format!("{scheme}://{}", &rest[user..user + without_query(&rest[user..])])),
            }
        }
    }
}

/// A path as errors may show it: one that is a slash or two short of a URL (`https:/host`) as that URL would be shown.
fn shown_nearly(location: &str) -> Cow<'_, str> {
    let Some((scheme, rest)) = location.split_once(':') else { return Cow::Borrowed(location) };
    let url = format!("{scheme}://{}", rest.trim_start_matches('/'));
    if provider(&url).is_none() {
        return Cow::Borrowed(location);
    }
    match shown(&url) {
        shown if shown == url => Cow::Borrowed(location),
        shown => Cow::Owned(shown.replacen("://", ":/", 1)),
    }
}

/// A setting that should be a URL, as errors may show it.
pub fn shown_setting(value: &str) -> Cow<'_, str> {
    match value.contains("://") {
        true if !value.starts_with('/') => shown(value),
        _ => match split_user(value) {
            Some((before, _)) if before.contains(['?', '#']) => Cow::Borrowed(HIDDEN),
            Some((_, after)) => Cow::Owned(format!("{HIDDEN}@{}", up_to(after, &['?', '#']))),
            None => Cow::Borrowed(up_to(value, &['?', '#'])),
        },
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

/// The words of a location that may be of a user or a password although they stand where a host, a bucket or a key does:
/// errors that name those must not show them.
pub(crate) fn doubtful_words(location: &str) -> Vec<&str> {
    let rest = location.split_once("://").map_or("", |(_, rest)| rest);
    let hidden = match doubtful(location) {
        Some(Doubt::Before(at)) => &rest[..at],
        Some(Doubt::All) => rest,
        None => "",
    };
    let ends = |c: char| !c.is_ascii_alphanumeric() && !"-_.%".contains(c);
    hidden.split(ends).filter(|word| !word.is_empty()).collect()
}

/// Whether a path may be a URL that lacks its scheme, or a part of that, with a password or a signature in it.
pub fn is_doubtful_path(location: &str) -> bool {
    let is_doubtful = || doubtful_path(location).is_some() || query(location).is_some();
    !location.contains("://") && !is_plainly_path(location) && is_doubtful()
}

fn is_plainly_path(location: &str) -> bool {
    location.starts_with(['/', '.', '~'])
}

/// The `@` of a relative path before which a user and a password, or a token of the Hugging Face hub, may stand.
fn doubtful_path(location: &str) -> Option<usize> {
    let (before, _) = split_user(location)?;
    let at = before.len();
    // Part of a URL of which the scheme is known is judged as that.
    let (scheme, rest) = before.split_once(':').unwrap_or(("", before));
    let url = format!("{scheme}://{rest}");
    let is_nearly_url = provider(&url).is_some();
    (!is_plainly_path(location) && !is_nearly_url && (before.contains(':') || holds_token(before)))
        .then_some(at)
}

/// What comes before the last `@`, which may end a user and a password, and what comes after it. The `@` may be escaped, as
/// people do who are careful with half of it.
fn split_user(text: &str) -> Option<(&str, &str)> {
    let last = ["@", "%40"].into_iter().filter_map(|mark| Some((text.rfind(mark)?, mark.len()))).max();
    last.map(|(at, len)| (&text[..at], &text[at + len..]))
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

/// What of a URL may be a user and a password that hold what should be escaped.
#[derive(Debug, PartialEq, Eq)]
enum Doubt {
    /// What comes before this `@` of what follows the scheme.
    Before(usize),
    /// All of it: what comes after may be a query.
    All,
}

fn doubtful(location: &str) -> Option<Doubt> {
    let scheme = scheme(location)?;
    let rest = &location[scheme.len() + "://".len()..];
    let last = rest.rfind('@');
    let is_hub = is_hub(location);
    if is_key(location) || is_hub {
        // An `@` may be part of a key, and so may a colon; but a colon before an `@` is what passwords begin with.
        let begin = name_of_arn(rest);
        let authority = up_to(&rest[begin..], &['/']);
        let named = names_container(location) || is_hub;
        if is_hub && last.is_none() && split_user(rest).is_some_and(|(before, _)| holds_token(before)) {
            return Some(Doubt::All);
        }
        return match last {
            Some(at) if begin > at => None,
            Some(at) if is_hub && holds_token(&rest[..at]) => Some(Doubt::Before(at)),
            Some(at) if !rest[begin..at].contains(':') && (named || !authority.contains('@')) => None,
            // It may be a signature's query as well.
            Some(at) if rest[..at].contains(['?', '#']) => Some(Doubt::All),
            Some(at)
                if begin + authority.len() > at && !named && !authority[at - begin + 1..].contains(':') =>
            {
                None
            }
            Some(at) => Some(Doubt::Before(at)),
            None => authority.contains(':').then_some(Doubt::All),
        };
    }
    let authority = up_to(rest, &ENDS);
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let Some(at) = last.filter(|at| *at >= authority.len()) else {
        return (!host.is_empty() && !is_host_and_port(host)).then_some(Doubt::All);
    };
    let (between, after) = (&rest[authority.len()..at], up_to(&rest[at + 1..], &ENDS));
    let is_file = [".safetensors", ".json"].iter().any(|end| after.ends_with(end));
    if is_certainly_host(host) && !between.contains(':') && (is_file || !may_be_host(after)) {
        return None;
    }
    Some(if between.contains(['?', '#']) { Doubt::All } else { Doubt::Before(at) })
}

/// Whether it can only be a host: no user is called like that.
fn is_certainly_host(text: &str) -> bool {
    let (host, port) = host_and_port(text);
    is_host_and_port(text) && (is_address(host) || (port.is_none() && is_domain(host)))
}

/// Whether a host could be meant, rather than part of a file's name.
fn may_be_host(text: &str) -> bool {
    let (host, port) = host_and_port(text);
    port.is_some() || is_address(host) || is_domain(host)
}

fn is_address(host: &str) -> bool {
    host.starts_with('[') || host == "localhost" || host.parse::<std::net::Ipv4Addr>().is_ok()
}

/// Whether it is a name in the domain name system, in a domain of somebody's.
fn is_domain(host: &str) -> bool {
    let plain = |label: &str| {
        !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
    };
    let mut labels = host.trim_end_matches('.').split('.').rev();
    let top = labels.next().unwrap_or_default();
    let is_top = top.len() > 1 && plain(top) && top.starts_with(|c: char| c.is_ascii_alphabetic());
    let mut below = labels.peekable();
    is_top && below.peek().is_some() && below.all(plain)
}

fn is_host_and_port(text: &str) -> bool {
    let (host, port) = host_and_port(text);
    let is_host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(host) => up_to(host, &['%']).parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && !host.contains([':', '[', ']', '%', ' ', ';', '&', '"', '\'']),
    };
    is_host && port.is_none_or(|port| port.is_empty() || port.parse::<u16>().is_ok())
}

fn host_and_port(text: &str) -> (&str, Option<&str>) {
    match text.rfind(':').filter(|at| !text[*at..].contains(']')) {
        Some(at) => (&text[..at], Some(&text[at + 1..])),
        None => (text, None),
    }
}

/// Where the resource of an ARN begins that `rest` begins with; else 0.
fn name_of_arn(rest: &str) -> usize {
    let mut at = 0;
    for (number, part) in rest.splitn(6, ':').take(5).enumerate() {
        let plain = part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        if !plain || (number == 0 && part != "arn") || (number == 1 && !part.starts_with("aws")) {
            return 0;
        }
        at += part.len() + 1;
    }
    let name = rest.get(at..).map_or(0, |name| {
        ["accesspoint:", "outpost:"].iter().find(|kind| name.starts_with(**kind)).map_or(0, |kind| kind.len())
    });
    if at <= rest.len() { at + name } else { 0 }
}

/// Whether it names a container before its host: Azure's, which is no secret.
fn names_container(location: &str) -> bool {
    provider(location) == Some(Provider::Azure)
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
        assert_eq!(shown("https://user:pass@example.com/a@b?sig=1#x"), "https://example.com/a@b");
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
            "http://127.0.0.1:9000/models@v1/m.safetensors",
            "http://[::1]:9000/a@b/m.safetensors",
            "http://localhost/a@b/m.safetensors",
            "http://minio:9000/models/m.safetensors",
            "s3://bucket/a@b/m.safetensors",
            "s3://bucket/a/12:30/m.safetensors",
            "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/ap/a@b",
            "s3://arn:aws:s3:us-west-2:123456789012:accesspoint:ap/a@b",
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
            assert_eq!(doubtful_words(location), [""; 0], "{location}");
        }
        for (location, expected) in [
            ("https://me:pa/ss@host/m.safetensors", "https://***@host/m.safetensors"),
            ("https://me:12/34@host/m.safetensors?sig=1", "https://***@host/m.safetensors"),
            ("https://my.name/x:y@host/m", "https://***@host/m"),
            ("https://my.name:12/x@minio/m", "https://***@minio/m"),
            ("https://my.name/x@example.com/m", "https://***@example.com/m"),
            ("http://me:pa?ss@host/m", "http://***"),
            ("http://minio:9000/m?sig=a@b", "http://***"),
            ("http://host:port/m", "http://***"),
            ("s3://key:sec/ret@bucket/x", "s3://***@bucket/x"),
            ("s3://arn:sec/ret@bucket/x", "s3://***@bucket/x"),
            ("s3://key:secret", "s3://***"),
            ("abfss://me:x@c@acc.dfs.core.windows.net/a", "abfss://***@acc.dfs.core.windows.net/a"),
            (" https://me:x@host/m", "***@host/m"),
            ("https:/me:x/y@host/m", "https:/***@host/m"),
            ("s3:me:x@bucket/m", "s3:/bucket/m"),
            ("https//me:x/y@host/m", "***@host/m"),
            ("me:x@host/m", "***@host/m"),
            ("me:x%40host/m", "***%40host/m"),
            (" https://me:x%40h/m", "***@h/m"),
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
            ("https://example.com/a@b", "https://example.com/a@b", true),
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
