//! What a URL names, for a pull.
//!
//! A prefix, a repository or a directory of one means everything under it; the URL of an object means that object. A
//! plain HTTP server cannot list: there a directory means the checkpoint in it, its index and its shards.

use crate::checkpoint::resolve;
use crate::error::{Error, ErrorKind, Result};
use crate::store::sink::{INCOMPLETE_MARKER, incomplete};
use crate::store::{Identity, ListedObject, RemoteStore, Store, is_http, is_url, shown};

use super::tree::STATE;

/// One object to pull.
#[derive(Clone, PartialEq, Eq)]
pub struct Item {
    /// Where it is, in the form that stores take; it may carry secrets.
    pub location: String,
    /// Where it goes, relative to the destination.
    pub path: String,
    /// Its size in bytes, as far as known.
    pub bytes: u64,
    /// Which version it was when it was found.
    pub(super) identity: Identity,
}

impl std::fmt::Debug for Item {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Locations may carry secrets.
        f.debug_struct("Item").field("path", &self.path).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Finds what `location` names, sorted by path.
///
/// # Errors
/// `NotFound` where nothing is there, or the location is no URL; what the store fails with.
pub fn find(store: &RemoteStore, location: &str) -> Result<Vec<Item>> {
    if !is_url(location) || location.starts_with("file://") {
        return Err(Error::new(ErrorKind::NotFound, "only what is remote can be pulled")
            .object(shown(location))
            .remedy("Give an s3://, gs://, az://, hf:// or https:// location; files of this machine can be copied with cp"));
    }
    let mut items = match store.find(location, true) {
        Ok(listing) => listing.objects.into_iter().map(Item::from).collect(),
        Err(error) if error.kind() == ErrorKind::NotFound => named(store, location, error)?,
        Err(error) => return Err(error),
    };
    items.sort_by(|a, b| a.path.cmp(&b.path));
    if items.iter().any(|item| item.path.rsplit('/').next() == Some(INCOMPLETE_MARKER)) {
        return Err(incomplete(&shown(location)));
    }
    let directories: std::collections::HashSet<_> = items
        .iter()
        .flat_map(|item| item.path.match_indices('/').map(|(at, _)| item.path[..at].to_owned()))
        .collect();
    // Consoles make empty objects to show a folder. And what an earlier pull kept for itself is no part of a model.
    items.retain(|item| {
        let marks_a_folder = item.bytes == 0 && directories.contains(&item.path);
        !marks_a_folder && item.path.split('/').next() != Some(STATE)
    });
    Ok(items)
}

/// The object at `location`, or on a server that cannot list, the checkpoint there.
fn named(store: &RemoteStore, location: &str, nothing: Error) -> Result<Vec<Item>> {
    let plain =
        if is_http(location) { location.split(['?', '#']).next().unwrap_or(location) } else { location };
    if !plain.ends_with('/') {
        match store.open(location) {
            Ok(object) => {
                let path = name(plain)?;
                let (bytes, identity) = (object.bytes(), object.identity());
                return Ok(vec![Item { location: location.to_owned(), path, bytes, identity }]);
            }
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            Err(_) if !is_http(location) => return Err(nothing),
            Err(_) => {}
        }
    }
    let resolved = resolve(store, &[location.to_owned()])?;
    // An index names its shards relative to where it is.
    let base = resolved.indexes.first().map_or(location, |index| &index.location);
    let base = base.split(['?', '#']).next().unwrap_or(base);
    let base = base.rsplit_once('/').map_or(base, |(base, _)| base).to_owned();
    let locations = resolved.indexes.into_iter().map(|index| index.location).chain(resolved.objects);
    let item = |location: String| {
        let plain = location.split(['?', '#']).next().unwrap_or(&location);
        let below = plain.strip_prefix(&base).and_then(|below| below.strip_prefix('/'));
        let path = match below {
            Some(below) => decoded(below, &location)?,
            None => name(plain)?,
        };
        // How large it is will be seen when it is opened.
        Ok(Item { path, bytes: 0, identity: Identity(String::new()), location })
    };
    locations.map(item).collect()
}

/// The last part of a location, as a file's name.
fn name(location: &str) -> Result<String> {
    let name = location.rsplit('/').next().unwrap_or(location);
    if is_http(location) { decoded(name, location) } else { Ok(name.to_owned()) }
}

fn decoded(text: &str, location: &str) -> Result<String> {
    let decoded = percent_encoding::percent_decode_str(text).decode_utf8();
    decoded.map(std::borrow::Cow::into_owned).map_err(|_| {
        Error::new(ErrorKind::NotFound, "the name is not UTF-8 once its escapes are decoded")
            .object(shown(location))
    })
}

impl From<ListedObject> for Item {
    fn from(ListedObject { location, path, bytes, identity }: ListedObject) -> Self {
        Self { location, path, bytes, identity }
    }
}
