//! Checkpoints on a plain HTTP server, which cannot say what it holds.
//!
//! So a "directory" is looked through for the names that the libraries give to checkpoints. What is there is listed;
//! shards are found through their index, like everywhere.

use crate::error::{Error, ErrorKind, Result};
use crate::store::Entry;
use crate::store::remote::RemoteStore;
use crate::store::remote::objects::opening::inspect;
use crate::store::remote::settings::address::Address;
use crate::threads;

/// What transformers, diffusers and peft call the files they save.
const NAMES: [&str; 5] = [
    "model.safetensors.index.json",
    "model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "adapter_model.safetensors",
];

/// The refusal to list.
pub(super) fn cannot_list() -> Error {
    Error::new(ErrorKind::NotFound, "a plain HTTP server cannot list what it holds")
        .remedy("Give the URL of the shard index, or a list of the .safetensors files' URLs")
}

/// The well-known files under a URL.
pub(super) fn list(store: &RemoteStore, directory: &Address) -> Result<Vec<Entry>> {
    let url = directory.url();
    let (path, query) = url.split_at(url.find('?').unwrap_or(url.len()));
    let look = |name: &&str| {
        let location = format!("{}/{name}{query}", path.trim_end_matches('/'));
        let (backend, path) = store.connect(&Address::parse(&location)?)?;
        match inspect(&backend, &path, &store.context) {
            Ok(meta) => Ok(Some(Entry { location, bytes: meta.size })),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.object(crate::store::shown(&location))),
        }
    };
    let found = threads::in_order(&NAMES, NAMES.len(), "penstock-find", look).map_err(|(_, error)| error)?;
    let found: Vec<_> = found.into_iter().flatten().collect();
    if found.is_empty() {
        return Err(Error::new(
            ErrorKind::NotFound,
            format!(
                "the URL names no file, a plain HTTP server cannot list what it holds, and none of {} is there",
                NAMES.join(", ")
            ),
        )
        .object(directory.shown())
        .remedy(format!(
            "Name the shard index, such as {}, or give a list of the .safetensors files' URLs",
            crate::store::shown(&format!("{}/{}", path.trim_end_matches('/'), NAMES[0]))
        )));
    }
    Ok(found)
}
