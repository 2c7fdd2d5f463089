//! Glob patterns on the local file system.
//!
//! Each part of a path is matched by itself, against names as locations have them, so that names which are not UTF-8
//! take part. `**` stands for any number of directories and does not follow links, which may lead in circles. A
//! leading dot is matched by a dot only.

use std::io::ErrorKind as Io;
use std::path::Path;

use glob::{MatchOptions, Pattern, PatternError};

use super::location::{join, or_here};
use crate::error::{Error, Result};
use crate::store::{location_of, path_of};

const OPTIONS: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };

/// A pattern, part by part.
pub(super) struct LocalGlob {
    root: &'static str,
    parts: Vec<Component>,
}

enum Component {
    Name(String),
    Pattern(Pattern),
    Directories,
}

impl LocalGlob {
    /// # Errors
    /// Where a part is no valid pattern.
    pub(super) fn new(pattern: &str) -> std::result::Result<Self, PatternError> {
        let parts = pattern.split('/').filter(|part| !part.is_empty()).map(|part| {
            Ok(match part {
                "**" => Component::Directories,
                _ if part.contains(['*', '?', '[']) => Component::Pattern(Pattern::new(part)?),
                _ => Component::Name(part.to_owned()),
            })
        });
        let root = if pattern.starts_with('/') { "/" } else { "" };
        Ok(Self { root, parts: parts.collect::<std::result::Result<_, _>>()? })
    }

    /// The locations that match, in the order of their names.
    ///
    /// # Errors
    /// `Access` and `Storage` where a directory on the way cannot be listed.
    pub(super) fn matches(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        walk(self.root.to_owned(), &self.parts, &mut found)?;
        Ok(found)
    }
}

fn walk(at: String, parts: &[Component], found: &mut Vec<String>) -> Result<()> {
    let Some((part, rest)) = parts.split_first() else {
        found.push(at);
        return Ok(());
    };
    match part {
        Component::Name(name) => {
            let below = join(&at, name);
            if std::fs::symlink_metadata(path_of(&below)).is_ok() {
                walk(below, rest, found)?;
            }
        }
        Component::Pattern(pattern) => {
            for name in names(&at, |_| true)? {
                let below = join(&at, &name);
                let leads_on = rest.is_empty() || Path::is_dir(&path_of(&below));
                if leads_on && pattern.matches_with(&name, OPTIONS) {
                    walk(below, rest, found)?;
                }
            }
        }
        Component::Directories => {
            for name in names(&at, |entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))? {
                if !name.starts_with('.') {
                    walk(join(&at, &name), parts, found)?;
                }
            }
            walk(at, rest, found)?;
        }
    }
    Ok(())
}

/// Names in a directory, sorted; none where it is no directory.
fn names(directory: &str, wanted: impl Fn(&std::fs::DirEntry) -> bool) -> Result<Vec<String>> {
    let failed = |error: &std::io::Error| {
        Error::from_io("listing the directory", error).object(crate::store::shown(directory))
    };
    let entries = match std::fs::read_dir(path_of(or_here(directory))) {
        Err(error) if matches!(error.kind(), Io::NotFound | Io::NotADirectory) => return Ok(Vec::new()),
        entries => entries.map_err(|error| failed(&error))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| failed(&error))?;
        if wanted(&entry) {
            names.push(location_of(entry.file_name()));
        }
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    fn matching(folder: &tempfile::TempDir, pattern: &str) -> Vec<String> {
        let top = location_of(folder.path());
        let matches = LocalGlob::new(&join(&top, pattern)).unwrap().matches().unwrap();
        matches.iter().map(|found| found[top.len() + 1..].to_owned()).collect()
    }

    #[test]
    fn patterns_match_part_by_part() {
        let folder = tempfile::tempdir().unwrap();
        for directory in ["a/b", "c", ".hidden"] {
            std::fs::create_dir_all(folder.path().join(directory)).unwrap();
        }
        for file in ["a/x.s", "a/b/y.s", "c/z.s", "c/.z.s", "top.s", ".hidden/w.s"] {
            std::fs::write(folder.path().join(file), "").unwrap();
        }
        assert_eq!(matching(&folder, "*.s"), ["top.s"]);
        assert_eq!(matching(&folder, "*/?.s"), ["a/x.s", "c/z.s"]);
        assert_eq!(matching(&folder, "[ac]/*.s"), ["a/x.s", "c/z.s"]);
        assert_eq!(matching(&folder, "a/**/*.s"), ["a/b/y.s", "a/x.s"]);
        assert_eq!(matching(&folder, ".hidden/*.s"), [".hidden/w.s"]);
        assert_eq!(matching(&folder, "**/z.s"), ["c/z.s"]);
        assert!(matching(&folder, "none/*.s").is_empty() && matching(&folder, "top.s/*").is_empty());
        assert!(LocalGlob::new("a/[").is_err());
    }

    #[test]
    fn names_that_are_not_utf8_match_too() {
        let folder = tempfile::tempdir().unwrap();
        let odd = folder.path().join(OsStr::from_bytes(b"m\xff"));
        std::fs::create_dir(&odd).unwrap();
        std::fs::write(odd.join(OsStr::from_bytes(b"\xfe.s")), "").unwrap();
        for pattern in ["m*/*.s", "m\0ff/*.s", "**/\0fe.s"] {
            assert_eq!(matching(&folder, pattern), ["m\0ff/\0fe.s"], "{pattern:?}");
        }
    }

    #[test]
    fn links_in_circles_end() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["one", "two"] {
            std::os::unix::fs::symlink(folder.path(), folder.path().join(name)).unwrap();
        }
        std::fs::write(folder.path().join("x.s"), "").unwrap();
        assert_eq!(matching(&folder, "**/x.s"), ["x.s"]);
    }
}
