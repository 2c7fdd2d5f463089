//! `hf://` locations taken apart: `hf://[models/|datasets/|spaces/]org/name[@revision][/path]`.
//!
//! The grammar is the one of huggingface_hub. A revision is a branch, a tag or a commit; one that holds a slash is
//! written with `%2F`, except `refs/pr/N` and `refs/convert/NAME`, which are taken as they are.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::error::{Error, ErrorKind, Result};
use crate::store::location::is_hub;
use crate::store::shown;

/// What need not be escaped in a part of a URL's path.
const PART: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// The same for a path of several parts.
const PATH: &AsciiSet = &PART.remove(b'/');

/// The branch that a location without a revision means.
const DEFAULT_REVISION: &str = "main";

/// What a repository holds. They are three different name spaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum RepositoryKind {
    Model,
    Dataset,
    Space,
}

impl RepositoryKind {
    /// As the API calls it, and the directories of the cache begin.
    pub(super) fn plural(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Dataset => "datasets",
            Self::Space => "spaces",
        }
    }

    /// What comes before a repository's name in URLs of pages and files, and in locations.
    fn prefix(self) -> &'static str {
        match self {
            Self::Model => "",
            Self::Dataset => "datasets/",
            Self::Space => "spaces/",
        }
    }
}

/// Where something is on the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HubAddress {
    pub(super) kind: RepositoryKind,
    /// `org/name`.
    pub(super) repository: String,
    pub(super) revision: String,
    /// The path in the repository, without a slash at either end; empty for the repository itself.
    pub(super) path: String,
}

impl HubAddress {
    /// Takes `location` apart.
    ///
    /// # Errors
    /// `NotFound` where it is not of the form above.
    pub(super) fn parse(location: &str) -> Result<Self> {
        let refuse = |cause: &'static str| {
            Error::new(ErrorKind::NotFound, cause)
                .object(shown(location))
                .remedy("Write hf://org/name, hf://org/name@revision or hf://org/name@revision/path: gpt2 is openai-community/gpt2")
        };
        let rest = location
            .get(5..)
            .filter(|_| is_hub(location))
            .ok_or_else(|| refuse("this is not an hf:// location"))?;
        let (kind, rest) = match rest.split_once('/') {
            Some(("models", rest)) => (RepositoryKind::Model, rest),
            Some(("datasets", rest)) => (RepositoryKind::Dataset, rest),
            Some(("spaces", rest)) => (RepositoryKind::Space, rest),
            Some(("buckets" | "kernels", _)) => {
                return Err(refuse("only models, datasets and spaces of the hub can be read"));
            }
            _ => (RepositoryKind::Model, rest),
        };
        let Some((organisation, rest)) = rest.split_once('/') else {
            return Err(refuse("a repository's name has two parts: its organisation's and its own"));
        };
        let name_end = rest.find(['/', '@']).unwrap_or(rest.len());
        let (name, rest) = rest.split_at(name_end);
        if rest.is_empty() && [".safetensors", ".json"].iter().any(|end| name.ends_with(end)) {
            // Of `gpt2/model.safetensors`: pages of old models have short names, which lead on to the two parts.
            return Err(refuse("a repository's name has two parts, and this one is followed by a file"));
        }
        let valid = |part: &str| {
            let plain = part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
            plain
                && !part.is_empty()
                && !part.starts_with(['.', '-'])
                && !part.contains("--")
                && !part.contains("..")
        };
        if !valid(organisation) || !valid(name) {
            return Err(refuse("this is no repository's name"));
        }
        let (revision, path) = match rest.strip_prefix('@') {
            Some(rest) => split_revision(rest).ok_or_else(|| refuse("the revision is empty or no UTF-8"))?,
            None => (DEFAULT_REVISION.to_owned(), rest),
        };
        let path = path.trim_matches('/');
        let bad = |part: &str| part.is_empty() || part == "." || part == ".." || part.contains('\0');
        if !path.is_empty() && path.split('/').any(bad) {
            return Err(refuse("the path has an empty part, `.` or `..`"));
        }
        Ok(Self { kind, repository: format!("{organisation}/{name}"), revision, path: path.to_owned() })
    }

    /// The location of `path` in this repository as it was at `commit`.
    pub(super) fn pinned(&self, commit: &str, path: &str) -> String {
        let slash = if path.is_empty() { "" } else { "/" };
        format!("hf://{}{}@{commit}{slash}{path}", self.kind.prefix(), self.repository)
    }

    /// What names the file in whatever revision: with a digest of its content, that is enough to know it by.
    pub(super) fn of_any_revision(&self) -> String {
        format!("hf://{}{}/{}", self.kind.prefix(), self.repository, self.path)
    }

    /// The commit, where the revision is one in full.
    pub(super) fn commit(&self) -> Option<&str> {
        is_commit(&self.revision).then_some(&*self.revision)
    }

    /// Where the API tells which commit the revision is.
    pub(super) fn revision_url(&self, endpoint: &str) -> String {
        let revision = utf8_percent_encode(&self.revision, PART);
        format!("{endpoint}/api/{}/{}/revision/{revision}", self.kind.plural(), self.repository)
    }

    /// Where the API tells what is in the directory that the path names.
    pub(super) fn tree_url(&self, endpoint: &str, commit: &str, recursive: bool) -> String {
        let path = utf8_percent_encode(&self.path, PATH);
        let slash = if self.path.is_empty() { "" } else { "/" };
        let plural = self.kind.plural();
        format!(
            "{endpoint}/api/{plural}/{}/tree/{commit}{slash}{path}?recursive={recursive}&expand=false",
            self.repository
        )
    }

    /// Where the file is that the path names.
    pub(super) fn file_url(&self, endpoint: &str, commit: &str) -> String {
        format!("{}/resolve/{commit}/{}", self.page(endpoint), utf8_percent_encode(&self.path, PATH))
    }

    /// The repository's page, for people.
    pub(super) fn page(&self, endpoint: &str) -> String {
        format!("{endpoint}/{}{}", self.kind.prefix(), self.repository)
    }

    /// Its directory in the cache.
    pub(super) fn folder(&self) -> String {
        format!("{}--{}", self.kind.plural(), self.repository.replace('/', "--"))
    }
}

/// Whether a revision is a commit in full: such a one cannot move.
pub(super) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

/// The revision that `rest` begins with, and the path after it.
fn split_revision(rest: &str) -> Option<(String, &str)> {
    let special = |kind: &str| {
        let name = rest.strip_prefix(kind)?;
        let length = name.find('/').unwrap_or(name.len());
        (length > 0).then(|| rest.split_at(kind.len() + length))
    };
    if let Some((revision, path)) = special("refs/pr/").or_else(|| special("refs/convert/")) {
        return Some((revision.to_owned(), path));
    }
    let (revision, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let revision = percent_decode_str(revision).decode_utf8().ok()?;
    let valid =
        !revision.is_empty() && !revision.split('/').any(|part| part.is_empty() || part.starts_with('.'));
    (valid && !revision.contains('\0')).then(|| (revision.into_owned(), path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(location: &str) -> (RepositoryKind, String, String, String) {
        let HubAddress { kind, repository, revision, path } = HubAddress::parse(location).unwrap();
        (kind, repository, revision, path)
    }

    #[test]
    fn locations_name_a_repository_a_revision_and_a_path() {
        let expect = |kind, repository: &str, revision: &str, path: &str| {
            (kind, repository.to_owned(), revision.to_owned(), path.to_owned())
        };
        for (location, expected) in [
            ("hf://org/name", expect(RepositoryKind::Model, "org/name", "main", "")),
            ("HF://org/name/", expect(RepositoryKind::Model, "org/name", "main", "")),
            ("hf://models/org/name", expect(RepositoryKind::Model, "org/name", "main", "")),
            ("hf://datasets/o.g/na-me_1", expect(RepositoryKind::Dataset, "o.g/na-me_1", "main", "")),
            ("hf://spaces/org/name/a/b.txt", expect(RepositoryKind::Space, "org/name", "main", "a/b.txt")),
            ("hf://org/name@v1.0/a b@c", expect(RepositoryKind::Model, "org/name", "v1.0", "a b@c")),
            ("hf://org/name@feature%2Fx/a", expect(RepositoryKind::Model, "org/name", "feature/x", "a")),
            ("hf://org/name@refs/pr/7/a/b", expect(RepositoryKind::Model, "org/name", "refs/pr/7", "a/b")),
            (
                "hf://datasets/org/name@refs/convert/parquet",
                expect(RepositoryKind::Dataset, "org/name", "refs/convert/parquet", ""),
            ),
        ] {
            assert_eq!(parts(location), expected, "{location}");
        }
    }

    #[test]
    fn what_is_no_repository_is_refused() {
        for location in [
            "hf://",
            "hf://gpt2",
            "hf://org/",
            "hf:///name",
            "hf://org/../x",
            "hf://org/name/../x",
            "hf://org/name/a//b",
            "hf://org/name@",
            "hf://org/name@/a",
            "hf://org/name@%ff",
            "hf://org/na me",
            "hf://a--b/c",
            "hf://buckets/a/b",
            "hf://org/name@..%2F..%2Fx",
            "s3://org/name",
        ] {
            let error = HubAddress::parse(location).unwrap_err();
            assert_eq!((error.kind(), error.object_name()), (ErrorKind::NotFound, Some(location)));
        }
    }

    #[test]
    fn urls_are_escaped_and_locations_pinned() {
        let address = HubAddress::parse("hf://datasets/org/name@refs/pr/7/a b/ü#?.bin").unwrap();
        assert_eq!(address.revision_url("http://h"), "http://h/api/datasets/org/name/revision/refs%2Fpr%2F7");
        assert_eq!(
            address.file_url("http://h", "abc"),
            "http://h/datasets/org/name/resolve/abc/a%20b/%C3%BC%23%3F.bin"
        );
        assert_eq!(
            address.tree_url("http://h", "abc", true),
            "http://h/api/datasets/org/name/tree/abc/a%20b/%C3%BC%23%3F.bin?recursive=true&expand=false"
        );
        let pinned = address.pinned("0123456789012345678901234567890123456789", "x/y");
        let again = HubAddress::parse(&pinned).unwrap();
        assert_eq!((again.commit(), &*again.path), (Some("0123456789012345678901234567890123456789"), "x/y"));
        assert_eq!((address.commit(), &*address.folder()), (None, "datasets--org--name"));
        assert_eq!(again.of_any_revision(), "hf://datasets/org/name/x/y");
    }
}
