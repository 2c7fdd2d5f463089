//! What is under a prefix: all of it, or as a directory shows it.

use futures_util::TryStreamExt;
use object_store::ObjectMeta;
use object_store::path::Path;

use super::fetch::{Counters, named, with_retries};
use super::object;
use crate::store::Identity;
use crate::store::remote::http::context::LoadContext;
use crate::store::remote::provider::backend::Backend;
use crate::store::remote::request::outcome::{Fault, Stop};
use crate::store::remote::settings::address::Address;

/// One object under a prefix.
#[derive(Clone, PartialEq, Eq)]
pub struct ListedObject {
    /// Where it is, in the form that stores take; it may carry secrets.
    pub location: String,
    /// Its key from the prefix and its slash on.
    pub path: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Which version it was.
    pub identity: Identity,
}

/// What is under a prefix.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Listing {
    /// The objects, in no order.
    pub objects: Vec<ListedObject>,
    /// What has objects below it, where only what is directly under the prefix was asked for. Names without slashes.
    pub directories: Vec<String>,
}

/// Everything under a prefix, all pages; with `recursive` at any depth.
///
/// A key that cannot be read (`a//b`) is an error, which names it.
pub(crate) fn list(
    backend: &Backend,
    address: &Address,
    prefix: &Path,
    recursive: bool,
    context: &LoadContext,
) -> Result<Listing, Stop> {
    let (objects, prefixes) =
        context.run(with_retries(backend, context, false, &Counters::default(), async || {
            pages(backend, prefix, recursive).await.map_err(|error| (Fault::Store(error), false))
        }))?;
    let below = |path: &Path| {
        let rest = path.as_ref().strip_prefix(prefix.as_ref())?;
        let rest = rest.strip_prefix('/').unwrap_or(rest);
        (!rest.is_empty()).then(|| rest.to_owned())
    };
    let objects = objects.into_iter().filter_map(|meta| {
        let (path, meta) = (below(&meta.location)?, named(meta));
        let location = address.with_key(meta.location.as_ref());
        Some(ListedObject { location, path, bytes: meta.size, identity: object::identity(&meta) })
    });
    Ok(Listing { objects: objects.collect(), directories: prefixes.iter().filter_map(below).collect() })
}

/// Objects and prefixes of all pages.
pub(super) async fn pages(
    backend: &Backend,
    prefix: &Path,
    recursive: bool,
) -> object_store::Result<(Vec<ObjectMeta>, Vec<Path>)> {
    if recursive {
        let objects = backend.store.list(Some(prefix)).try_collect().await?;
        return Ok((objects, Vec::new()));
    }
    let listed = backend.store.list_with_delimiter(Some(prefix)).await?;
    Ok((listed.objects, listed.common_prefixes))
}
