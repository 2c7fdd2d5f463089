//! What can be said of a location without asking anyone.

use std::borrow::Cow;

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

/// Whether a location is an HTTP URL, in which a question mark begins a query. Keys of object stores may hold one.
pub(crate) fn is_http(location: &str) -> bool {
    scheme(location)
        .is_some_and(|scheme| scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https"))
}

/// Schemes of locations whose keys are taken to the letter, question marks and hashes included.
const OF_KEYS: [&str; 11] =
    ["s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl", "wasb", "wasbs"];

/// Whether a location names a key of an object store.
pub(crate) fn is_key(location: &str) -> bool {
    scheme(location).is_some_and(|scheme| OF_KEYS.iter().any(|known| scheme.eq_ignore_ascii_case(known)))
}

/// A location as errors may show it: a URL without what may be secret, its user and its query.
///
/// Part of a key that looks like a query is not shown either: someone may have copied a signature with it.
pub fn shown(location: &str) -> Cow<'_, str> {
    if !is_url(location) {
        return Cow::Borrowed(location);
    }
    let plain = match is_key(location) {
        true => location
            .split_once('?')
            .filter(|(_, after)| after.contains('='))
            .map_or(location, |(plain, _)| plain),
        false => location.split(['?', '#']).next().unwrap_or(location),
    };
    without_user(plain, &['/'])
}

/// A URL, or a word that holds one, without the user and the password before its host, which ends at one of `ends`.
pub(crate) fn without_user<'a>(url: &'a str, ends: &[char]) -> Cow<'a, str> {
    let Some((scheme, rest)) = url.split_once("://") else { return Cow::Borrowed(url) };
    // In a text, marks may stand before it.
    let bare = scheme.rsplit(|c: char| !c.is_ascii_alphanumeric() && !"+-.".contains(c)).next();
    // Azure names a container before its host. It is no secret.
    if ["abfs", "abfss", "wasb", "wasbs"]
        .iter()
        .any(|azure| bare.unwrap_or_default().eq_ignore_ascii_case(azure))
    {
        return Cow::Borrowed(url);
    }
    let (host, path) = rest.split_at(rest.find(ends).unwrap_or(rest.len()));
    match host.rsplit_once('@') {
        Some((_, host)) => Cow::Owned(format!("{scheme}://{host}{path}")),
        None => Cow::Borrowed(url),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_do_not_show_secrets() {
        assert_eq!(shown("https://user:pass@host/a@b?sig=1#x"), "https://host/a@b");
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
    fn a_scheme_makes_a_url() {
        assert!(is_url("s3://b") && !is_url("a b://c") && !is_url("/a/b") && !is_url("://x"));
        assert!(is_http("HTTPS://h") && !is_http("s3://b") && !is_http("http:/x"));
    }
}
