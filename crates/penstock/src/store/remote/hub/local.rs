//! The cache that huggingface_hub keeps on this machine, read only.
//!
//! `models--org--name/refs/<revision>` holds the commit that a revision was at when it was last asked for,
//! `snapshots/<commit>/<path>` the files of a commit, mostly as links to `blobs/<etag>`. A file appears in a snapshot
//! only when it is complete, so what is there can be used.

use std::path::{Path, PathBuf};

use super::address::{HubAddress, is_commit};
use super::settings::Settings;
use crate::store::local::differ_in_change_time;
use crate::store::remote::objects::listing::{ListedObject, Listing};
use crate::store::remote::objects::object;
use crate::store::{Identity, Object};

/// One repository in the cache.
pub(super) struct CachedRepository {
    folder: PathBuf,
}

impl CachedRepository {
    pub(super) fn of(settings: &Settings, address: &HubAddress) -> Option<Self> {
        Some(Self { folder: settings.cache.as_ref()?.join(address.folder()) })
    }

    /// The commit that `revision` was at when it was last asked for.
    pub(super) fn commit(&self, revision: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.folder.join("refs").join(revision)).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// The file at `path` in `commit`, if it is there.
    pub(super) fn file(&self, commit: &str, path: &str) -> Option<PathBuf> {
        let file = self.folder.join("snapshots").join(commit).join(path);
        std::fs::metadata(&file).is_ok_and(|metadata| metadata.is_file()).then_some(file)
    }

    /// What is cached of the directory at `path` in `commit`. It may not be all that the hub has.
    pub(super) fn list(&self, address: &HubAddress, commit: &str, recursive: bool) -> Listing {
        let top = self.folder.join("snapshots").join(commit).join(&address.path);
        let mut listing = Listing::default();
        let mut directories = vec![String::new()];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(top.join(&directory)).into_iter().flatten().flatten() {
                let Ok(name) = entry.file_name().into_string() else { continue };
                let relative = if directory.is_empty() { name } else { format!("{directory}/{name}") };
                let Ok(metadata) = std::fs::metadata(entry.path()) else { continue };
                if metadata.is_dir() && recursive {
                    directories.push(relative);
                } else if metadata.is_dir() {
                    listing.directories.push(relative);
                } else {
                    let slash = if address.path.is_empty() { "" } else { "/" };
                    let path = format!("{}{slash}{relative}", address.path);
                    listing.objects.push(ListedObject {
                        location: address.pinned(commit, &path),
                        path: relative,
                        bytes: metadata.len(),
                        identity: named(&entry.path(), metadata.len())
                            .unwrap_or_else(|| Identity(String::new())),
                    });
                }
            }
        }
        listing
    }
}

/// What a cached file is to the hub, where the cache says: the name of a blob is its tag.
fn named(file: &Path, bytes: u64) -> Option<Identity> {
    let blob = std::fs::read_link(file).ok()?;
    let tag = blob.file_name()?.to_str()?;
    let is_tag = matches!(tag.len(), 40 | 64) && tag.bytes().all(|b| b.is_ascii_hexdigit());
    is_tag.then(|| object::tagged(bytes, tag))
}

/// Which version of the file on the hub an opened file of the cache is; its own identity where the cache does not say.
pub(super) fn identity(file: &Path, opened: &dyn Object) -> Identity {
    named(file, opened.bytes()).unwrap_or_else(|| opened.identity())
}

/// Whether a cached file is that version, or cannot be told from it but by its change time.
pub(super) fn is_likely(cached: &Identity, identity: &Identity) -> bool {
    cached == identity || differ_in_change_time(cached, identity)
}
