//! Questions about locations that a [`Store`] cannot answer, and reading small objects whole.
//!
//! A store opens objects and lists what is directly in a directory; it does not say whether a name *is* a directory, nor
//! what sub-directories there are. For local paths that is asked of the file system here, in one function; for URLs the name itself decides.

use std::ffi::OsStr;
use std::io::ErrorKind as Io;
use std::os::unix::ffi::OsStrExt;

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};

use super::{header, sniff};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Window;
use crate::store::{HIDDEN, Object, ReadContext, Store, location_of, path_of};
pub(super) use crate::store::{is_http, is_url, shown};

/// The most that is read of an object that is read whole: an index.
const MAX_WHOLE_BYTES: u64 = 100_000_000;

/// What is escaped in the path of an HTTP URL: everything that RFC 3986 does not allow there.
const ESCAPED: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'[')
    .add(b'\\')
    .add(b']')
    .add(b'^')
    .add(b'`')
    .add(b'{')
    .add(b'|')
    .add(b'}');
const ESCAPED_WITH_AT: &AsciiSet = &ESCAPED.add(b'@');

/// What a location names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LocationKind {
    Object,
    Directory,
    Missing,
}

/// What `location` names. A path that cannot be looked at counts as an object: opening it says why.
pub(super) fn classify(location: &str) -> LocationKind {
    if is_url(location) {
        let (path, _) = split_query(location);
        let object = [".safetensors", ".json"].iter().any(|end| path.ends_with(end));
        return if object { LocationKind::Object } else { LocationKind::Directory };
    }
    match std::fs::metadata(path_of(location)) {
        Ok(metadata) if metadata.is_dir() => LocationKind::Directory,
        Err(error) if matches!(error.kind(), Io::NotFound | Io::NotADirectory) => LocationKind::Missing,
        _ => LocationKind::Object,
    }
}

/// The path that a `file://` URL names; any other location is itself.
///
/// # Errors
///
/// [`ErrorKind::NotFound`] for a URL that names another machine, a relative path or no path.
pub fn without_file_scheme(location: &str) -> Result<String> {
    let Some(rest) = location.strip_prefix("file://") else { return Ok(location.to_owned()) };
    let refuse = |why: &str| {
        Error::new(ErrorKind::NotFound, format!("the URL {why}"))
            .object(shown(location))
            .remedy("Write file:///absolute/path, or the path itself")
    };
    let path = rest.strip_prefix("localhost").unwrap_or(rest);
    if !path.starts_with('/') {
        return Err(refuse("names another machine or a relative path"));
    }
    let is_escape = |rest: &str| rest.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
    let decoded: Vec<u8> = percent_decode_str(path).collect();
    if !path.split('%').skip(1).all(is_escape) || decoded.contains(&0) {
        return Err(refuse("has an invalid percent escape"));
    }
    Ok(location_of(OsStr::from_bytes(&decoded)))
}

/// A location without its query, and the query: only HTTP URLs have one.
pub(super) fn split_query(location: &str) -> (&str, &str) {
    let end = if is_http(location) { location.find(['?', '#']) } else { None };
    location.split_at(end.unwrap_or(location.len()))
}

/// Whether an object begins as a web page does.
pub(super) fn is_web_page(object: &dyn Object) -> bool {
    let mut begin = [0; 64];
    let length = object.bytes().min(begin.len() as u64) as usize;
    let read = object.read_into(0, Window::from_slice(&mut begin[..length]), &mut ReadContext::default());
    read.is_ok() && sniff::is_web_page(&begin[..length])
}

/// The last component of a location.
pub(super) fn name(location: &str) -> &str {
    let location = split_query(location).0.trim_end_matches('/');
    location.rsplit('/').next().unwrap_or(location)
}

/// The directory of a location: empty where it has none.
pub(super) fn parent(location: &str) -> &str {
    let location = split_query(location).0.trim_end_matches('/');
    match location.rfind('/') {
        Some(0) => "/",
        Some(at) => &location[..at],
        None => "",
    }
}

/// `name` in `directory`.
pub(super) fn join(directory: &str, name: &str) -> String {
    if directory.is_empty() { name.to_owned() } else { format!("{}/{name}", directory.trim_end_matches('/')) }
}

/// The object called `name` beside the one at `location`. In an HTTP URL the name is escaped, and what signs the URL
/// is taken to sign its neighbours too, as an Azure container's signature does.
pub(super) fn beside(location: &str, name: &str) -> String {
    if !is_http(location) {
        return join(parent(location), name);
    }
    let url = |escaped| {
        format!("{}/{}{}", parent(location), utf8_percent_encode(name, escaped), split_query(location).1)
    };
    let plain = url(ESCAPED);
    // After a colon, such as that of a port, an `@` may end a password: the URL would be refused.
    if shown(&plain).contains(HIDDEN) { url(ESCAPED_WITH_AT) } else { plain }
}

/// A directory as the file system wants it named: the empty one is the working directory.
pub(super) fn or_here(directory: &str) -> &str {
    if directory.is_empty() { "." } else { directory }
}

/// Reads a small object whole.
pub(super) fn read_whole(store: &dyn Store, location: &str) -> Result<Vec<u8>> {
    let object = store.open(location)?;
    let too_large = || {
        Error::new(ErrorKind::Format, format!("the file has {} bytes: far too large", object.bytes()))
            .object(shown(location))
    };
    let length = Some(object.bytes()).filter(|bytes| *bytes <= MAX_WHOLE_BYTES);
    let length = length.and_then(|bytes| usize::try_from(bytes).ok()).ok_or_else(too_large)?;
    let mut buffer = Vec::new();
    header::lengthen(&mut buffer, length).map_err(|error| error.object(shown(location)))?;
    if length > 0 {
        let read = object.read_into(0, Window::from_slice(&mut buffer), &mut ReadContext::default());
        read.map_err(|error| error.object(shown(location)))?;
    }
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_urls_become_paths() {
        assert_eq!(without_file_scheme("file:///a%20b/%C3%BC").unwrap(), "/a b/ü");
        assert_eq!(without_file_scheme("file://localhost/a").unwrap(), "/a");
        assert_eq!(without_file_scheme("/a%20b").unwrap(), "/a%20b");
        assert_eq!(without_file_scheme("file:///%ff").unwrap(), "/\0ff");
    }

    #[test]
    fn bad_file_urls_are_refused() {
        for url in ["file://host/a", "file://a", "file:///%", "file:///%2", "file:///%zz", "file:///%00"] {
            assert_eq!(without_file_scheme(url).unwrap_err().object_name(), Some(url));
        }
    }

    #[test]
    fn locations_are_taken_apart_and_put_together() {
        assert_eq!((name("/a/b/"), parent("/a/b/"), parent("/a"), parent("a")), ("b", "/a", "/", ""));
        assert_eq!((name("https://h/a/b?c=d/e"), parent("https://h/a/b?c=d/e")), ("b", "https://h/a"));
        assert_eq!((name("s3://b/a/what?/x"), parent("s3://b/a/what?")), ("x", "s3://b/a"));
        assert_eq!(
            beside("https://h/a/i.json?sig=x", "m 1.safetensors"),
            "https://h/a/m%201.safetensors?sig=x"
        );
        for (index, shard) in [
            ("https://h/i", "https://h/m@1"),
            ("http://h:1/i", "http://h:1/m%401"),
            ("https://me:x@h/i?sig=y", "https://me:x@h/m%401?sig=y"),
        ] {
            assert_eq!(beside(index, "m@1"), shard);
        }
        assert_eq!((beside("s3://b/i", "m 1"), beside("i", "m")), ("s3://b/m 1".into(), "m".into()));
        assert_eq!((join("/", "a"), join("", "a"), join("x/", "a")), ("/a".into(), "a".into(), "x/a".into()));
    }

    #[test]
    fn urls_are_directories_unless_named_like_an_object() {
        assert_eq!(classify("s3://bucket/model"), LocationKind::Directory);
        assert_eq!(classify("https://host/m.safetensors?x=1"), LocationKind::Object);
        assert_eq!(classify("/no/such/place"), LocationKind::Missing);
        assert!(!is_url("a b://c") && !is_url("/a/b"));
    }
}
