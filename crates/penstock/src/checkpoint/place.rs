//! Questions about locations that a [`Store`] cannot answer, and reading small objects whole.
//!
//! A store opens objects and lists what is directly in a directory; it does not say whether a name *is* a directory, nor
//! what sub-directories there are. For local paths that is asked of the file system here, in two functions and nowhere
//! else in this module; for URLs the name itself decides.

use std::ffi::OsStr;
use std::io::ErrorKind as Io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::{header, sniff};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Window;
use crate::store::{Object, ReadContext, Store, location_of, path_of};
pub(super) use crate::store::{is_http, is_url, shown};

/// The most that is read of an object that is read whole: an index, a reference.
const MAX_WHOLE_BYTES: u64 = 100_000_000;

/// What a location names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Object,
    Directory,
    Missing,
}

/// What `location` names. A path that cannot be looked at counts as an object: opening it says why.
pub(super) fn place(location: &str) -> Place {
    if is_url(location) {
        let (path, _) = split_query(location);
        let object = [".safetensors", ".json"].iter().any(|end| path.ends_with(end));
        return if object { Place::Object } else { Place::Directory };
    }
    match std::fs::metadata(path_of(location)) {
        Ok(metadata) if metadata.is_dir() => Place::Directory,
        Err(error) if matches!(error.kind(), Io::NotFound | Io::NotADirectory) => Place::Missing,
        _ => Place::Object,
    }
}

/// The names of the directories in a local directory, sorted; none where it cannot be read.
pub(super) fn sub_directories(directory: &str) -> Vec<String> {
    let entries = std::fs::read_dir(path_of(or_here(directory))).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .filter(|entry| Path::is_dir(&entry.path()))
        .map(|entry| location_of(entry.file_name()))
        .collect();
    names.sort_unstable();
    names
}

/// The path that a `file://` URL names; any other location is itself.
pub(super) fn without_file_scheme(location: &str) -> Result<String> {
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
    let mut decoded = Vec::with_capacity(path.len());
    let mut bytes = path.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let mut digit = || bytes.next().and_then(|digit| char::from(digit).to_digit(16));
        let value = digit().zip(digit()).and_then(|(high, low)| u8::try_from(high * 16 + low).ok());
        match value {
            Some(0) | None => return Err(refuse("has an invalid percent escape")),
            Some(value) => decoded.push(value),
        }
    }
    Ok(location_of(OsStr::from_bytes(&decoded)))
}

/// A location without its query, and the query: only HTTP URLs have one.
pub(super) fn split_query(location: &str) -> (&str, &str) {
    let end = if is_http(location) { location.find(['?', '#']) } else { None };
    location.split_at(end.unwrap_or(location.len()))
}

/// The path of an HTTP URL: without the host, whose address may be in brackets, and the query.
pub(super) fn path_of_url(location: &str) -> &str {
    let location = split_query(location).0;
    let rest = location.split_once("://").map_or(location, |(_, rest)| rest);
    rest.find('/').map_or("", |at| &rest[at..])
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
    let mut escaped = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/!$&'()*+,;=:@".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    format!("{}/{escaped}{}", parent(location), split_query(location).1)
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
        assert_eq!(path_of_url("http://[::1]:80/a/*.safetensors?b=[c]"), "/a/*.safetensors");
        assert_eq!((path_of_url("http://[::1]"), path_of_url("http://h?a=/*")), ("", ""));
        assert_eq!((name("/a/b/"), parent("/a/b/"), parent("/a"), parent("a")), ("b", "/a", "/", ""));
        assert_eq!((name("https://h/a/b?c=d/e"), parent("https://h/a/b?c=d/e")), ("b", "https://h/a"));
        assert_eq!((name("s3://b/a/what?/x"), parent("s3://b/a/what?")), ("x", "s3://b/a"));
        assert_eq!(
            beside("https://h/a/i.json?sig=x", "m 1.safetensors"),
            "https://h/a/m%201.safetensors?sig=x"
        );
        assert_eq!((beside("s3://b/i", "m 1"), beside("i", "m")), ("s3://b/m 1".into(), "m".into()));
        assert_eq!((join("/", "a"), join("", "a"), join("x/", "a")), ("/a".into(), "a".into(), "x/a".into()));
    }

    #[test]
    fn urls_are_directories_unless_named_like_an_object() {
        assert_eq!(place("s3://bucket/model"), Place::Directory);
        assert_eq!(place("https://host/m.safetensors?x=1"), Place::Object);
        assert_eq!(place("/no/such/place"), Place::Missing);
        assert!(!is_url("a b://c") && !is_url("/a/b"));
    }
}
