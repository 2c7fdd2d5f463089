//! Paths as locations: file names are bytes, locations are text.
//!
//! A location must name every file that the system can name, and a file name need not be UTF-8. Bytes of a path that are
//! not UTF-8 are escaped in its location, as a NUL and two hexadecimal digits (`\0ff`): no path holds a NUL, so a
//! location means one path and a path has one location. Only bytes that UTF-8 text cannot hold are ever unescaped, so
//! an escape never makes a slash.
//!
//! Nothing here touches the file system.

use std::borrow::Cow;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The location of the file at `path`.
pub fn location_of(path: impl AsRef<Path>) -> String {
    let bytes = path.as_ref().as_os_str().as_bytes();
    let mut location = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        // A NUL is no file name's, but a caller may pass one: it must not make an escape of what follows.
        location.push_str(&chunk.valid().replace('\0', "\x0000"));
        for byte in chunk.invalid() {
            location.push_str(&format!("\0{byte:02x}"));
        }
    }
    location
}

/// The path that a location of this machine names.
pub fn path_of(location: &str) -> Cow<'_, Path> {
    if !location.contains('\0') {
        return Cow::Borrowed(Path::new(location));
    }
    let mut bytes = Vec::with_capacity(location.len());
    for piece in pieces(location) {
        match piece {
            Chunk::Text(text) => bytes.extend_from_slice(text.as_bytes()),
            Chunk::Byte(byte) => bytes.push(byte),
        }
    }
    Cow::Owned(PathBuf::from(OsString::from_vec(bytes)))
}

/// `text`, in which there may be locations, as people read it: with `\xff` for a byte that is not UTF-8.
pub fn readable(text: &str) -> Cow<'_, str> {
    if !text.contains('\0') {
        return Cow::Borrowed(text);
    }
    let shown = pieces(text).map(|piece| match piece {
        Chunk::Text(text) => text.replace('\0', "\\x00"),
        Chunk::Byte(byte) => format!("\\x{byte:02x}"),
    });
    Cow::Owned(shown.collect())
}

enum Chunk<'t> {
    Text(&'t str),
    Byte(u8),
}

fn pieces(text: &str) -> impl Iterator<Item = Chunk<'_>> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if let Some((byte, after)) = escape(rest) {
            rest = after;
            return Some(Chunk::Byte(byte));
        }
        // From the second character on: a NUL that begins no escape is text.
        let end = rest.char_indices().skip(1).find(|(at, _)| escape(&rest[*at..]).is_some());
        let (before, after) = rest.split_at(end.map_or(rest.len(), |(at, _)| at));
        rest = after;
        (!before.is_empty()).then_some(Chunk::Text(before))
    })
}

/// The byte whose escape `text` begins with, and what follows it.
fn escape(text: &str) -> Option<(u8, &str)> {
    let digits = text.strip_prefix('\0')?.get(..2)?;
    let byte = u8::from_str_radix(digits, 16).ok()?;
    (byte == 0 || byte >= 0x80).then(|| (byte, &text[3..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(bytes: &[u8]) -> PathBuf {
        PathBuf::from(OsString::from_vec(bytes.to_vec()))
    }

    #[test]
    fn every_path_has_a_location_that_leads_back_to_it() {
        let mut paths = vec![b"/a/\xff\xfe.safetensors".to_vec(), b"\xc3(/\0ff/\0".to_vec(), b"".to_vec()];
        paths.extend((0..=255_u8).map(|byte| vec![b'x', byte, b'f', b'f']));
        for bytes in paths {
            let location = location_of(path(&bytes));
            assert_eq!(path_of(&location).as_os_str().as_bytes(), bytes, "{location:?}");
        }
        assert_eq!(location_of("/models/ü"), "/models/ü");
    }

    #[test]
    fn an_escape_never_makes_a_separator() {
        for text in ["..\x002f..", "\x002f", "\0ZZ", "\0f", "\0é0", "\0+f"] {
            assert_eq!(path_of(text).as_os_str().as_bytes(), text.as_bytes(), "{text:?}");
        }
    }

    #[test]
    fn people_read_bytes_that_are_not_text_as_escapes() {
        assert_eq!(readable(&location_of(path(b"/m/a\xffb"))), "/m/a\\xffb");
        assert_eq!(readable("/m/ü"), "/m/ü");
    }
}
