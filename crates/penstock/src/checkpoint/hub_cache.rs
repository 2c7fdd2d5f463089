//! Directories of the Hugging Face cache: `models--org--name`.
//!
//! Such a directory holds no model files itself but `snapshots/<revision>/…` and, for each branch, `refs/<branch>` with
//! the revision it stood at when last fetched. Naming it means branch `main` or, where that was never fetched, the only
//! snapshot. Nothing here goes to the network.

use super::location::{self, LocationKind, classify};
use crate::error::{Error, ErrorKind, Result};
use crate::store::Store;

/// The snapshot that a directory means if it is a model's directory in the cache.
pub(super) fn snapshot(store: &dyn Store, directory: &str) -> Result<Option<String>> {
    let snapshots = location::join(directory, "snapshots");
    let Some(model) = location::name(directory).strip_prefix("models--") else { return Ok(None) };
    if location::is_url(directory) || classify(&snapshots) != LocationKind::Directory {
        return Ok(None);
    }
    let model = model.replacen("--", "/", 1);
    let refuse = |cause: String, remedy: String| {
        Error::new(ErrorKind::NotFound, cause).object(crate::store::shown(directory)).remedy(remedy)
    };
    let download = format!("Download the model with `hf download {model}`");
    let main = location::join(directory, "refs/main");
    if classify(&main) == LocationKind::Object {
        let text = location::read_whole(store, &main)?;
        let revision = String::from_utf8_lossy(&text).trim().to_owned();
        if revision.is_empty() || revision.starts_with('.') || revision.contains(['/', '\\', '\0']) {
            return Err(refuse(format!("refs/main holds {revision:?}, which is no revision"), download));
        }
        let snapshot = location::join(&snapshots, &revision);
        return match classify(&snapshot) {
            LocationKind::Directory => Ok(Some(snapshot)),
            _ => Err(refuse(
                format!("refs/main names revision {revision}, which is not in the cache"),
                download,
            )),
        };
    }
    match &store.directories(&snapshots)[..] {
        [] => Err(refuse("the cache holds no snapshot of the model".into(), download)),
        [only] => Ok(Some(location::join(&snapshots, only))),
        several => Err(refuse(
            format!(
                "the cache holds {} snapshots of the model and does not say which is main",
                several.len()
            ),
            format!("Name one of them: {snapshots}/{{{}}}", several.join(",")),
        )),
    }
}
