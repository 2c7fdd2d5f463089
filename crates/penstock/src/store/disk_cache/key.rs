//! Which version of which object an entry is of.

use crate::store::block_map::checksum;
use crate::store::{Identity, RemoteStore, is_http};

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Key {
    /// The directory of the entry: a digest of all the rest.
    pub(super) name: String,
    /// The location without secrets, and the version: compared in full, since digests can be equal by chance.
    pub(super) label: String,
    pub(super) identity: Identity,
    pub(super) bytes: u64,
}

impl Key {
    /// The key of a version; `None` where nothing names it, so that another could be taken for it.
    pub(super) fn of(location: &str, identity: &Identity) -> Option<Self> {
        let (bytes, tagged) = RemoteStore::described(identity)?;
        let mut label = format!("{}\n{}", RemoteStore::lasting(location), identity.0);
        // A query may sign, and differ every day; or it may say which object is meant. A tag tells objects apart, a date
        // does not.
        let query = location.find('?').map_or("", |at| &location[at..]);
        if is_http(location) && !tagged && !query.is_empty() {
            label.push_str(&format!("\n{:016x}", checksum(query.as_bytes())));
        }
        let name = format!("{:016x}", checksum(label.as_bytes()));
        Some(Self { name, label, identity: identity.clone(), bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(tag: &str, date: &str) -> Identity {
        Identity(format!("12\n{tag}\n\n{date} UTC"))
    }

    #[test]
    fn a_key_is_of_one_version_and_holds_no_secret() {
        let (day, none) = ("2026-11-21 06:47:41", "1970-01-01 00:00:00");
        let key = |location: &str, tag: &str, date: &str| Key::of(location, &identity(tag, date));
        let one = key("https://me:SECRET@h/a?sig=SECRET", "\"t\"", day).unwrap();
        assert!(!one.label.contains("SECRET") && one.bytes == 12);
        // Signed anew, it is the same object; with another tag it is not.
        assert_eq!(key("https://h/a?sig=OTHER", "\"t\"", day), Some(one.clone()));
        assert_ne!(key("https://h/a", "\"u\"", day).unwrap().name, one.name);
        assert_ne!(key("https://h/b", "\"t\"", day).unwrap().name, one.name);
        // Without a tag, the query may say which object it is.
        assert_ne!(key("https://h/a?id=1", "", day), key("https://h/a?id=2", "", day));
        assert_eq!(key("https://h/a", "", none), None);
        // Keys are taken to the letter.
        assert_ne!(key("s3://b/a?id=1", "", day), key("s3://b/a?id=2", "", day));
        assert_ne!(key("gs://b/a#1", "", day), key("gs://b/a#2", "", day));
        // An unchanged file of a repository is the same in the next commit.
        let commit = "0123456789012345678901234567890123456789";
        assert_eq!(
            key("hf://o/n/a", "\"t\"", none),
            key(&format!("hf://models/o/n@{commit}/a"), "\"t\"", none)
        );
        assert_eq!(Key::of("s3://b/a", &Identity("nonsense".into())), None);
    }
}
