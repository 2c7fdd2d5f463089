//! What lies beside a key that is not there, for an error to name.
//!
//! One listing without retries, and not for long: a prefix may have millions of objects directly under it. Where it
//! fails or takes longer, nothing is said: the error says enough without.

use std::time::Duration;

use object_store::path::Path;

use super::listing::pages;
use crate::closest::closest;
use crate::store::remote::http::context::LoadContext;
use crate::store::remote::provider::backend::Backend;

/// How long a listing is waited for.
const PATIENCE: Duration = Duration::from_secs(3);
/// The most names that are listed.
const MOST: usize = 8;

/// Names directly under a prefix; those that have objects below them end in a slash.
pub(crate) fn names(backend: &Backend, prefix: &Path, context: &LoadContext) -> Vec<String> {
    let listed = context.run(async {
        let listed = tokio::time::timeout(PATIENCE, pages(backend, prefix, false)).await;
        Ok(listed.ok().and_then(Result::ok).unwrap_or_default())
    });
    let Ok((objects, prefixes)) = listed else { return Vec::new() };
    let objects = objects.iter().filter_map(|meta| meta.location.filename().map(str::to_owned));
    let prefixes = prefixes.iter().filter_map(|path| path.filename().map(|name| format!("{name}/")));
    objects.chain(prefixes).collect()
}

/// What to say of `name`, which is not among these `names` in `directory`.
pub(crate) fn remedy(directory: &str, name: &str, names: &[String]) -> Option<String> {
    let plain = |name: &str| name.trim_end_matches('/').to_owned();
    let like: Vec<_> = closest(&plain(name), names.iter().map(|name| name.trim_end_matches('/')))
        .into_iter()
        .filter_map(|like| names.iter().find(|name| plain(name) == like))
        .map(|name| format!("{directory}{name}"))
        .collect();
    if !like.is_empty() {
        return Some(format!("Did you mean {}?", like.join(" or ")));
    }
    let shown: Vec<_> = names.iter().take(MOST).map(String::as_str).collect();
    let more = names.len().saturating_sub(MOST);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!names.is_empty()).then(|| format!("Check the key: {directory} holds {}{more}", shown.join(", ")))
}
