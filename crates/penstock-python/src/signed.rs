//! What a signature says of files, as Python gives it, and comparing files with it.

use std::collections::HashMap;

use penstock::checkpoint::{Algorithm, Signed, SignedFile};
use penstock::store::{CachePolicy, Router, Store};
use penstock::{Error, ErrorKind, threads};
use pyo3::prelude::*;

use crate::checkpoint::absolute;
use crate::environment::{Options, environment};
use crate::errors::{Failure, Outcome};
use crate::paths::LocationArgument;
use crate::signals::interruptibly;

/// A file's path, how it is hashed ("sha256", "blake3"), and of each of its parts where it ends and its digest.
type File = (String, String, Vec<(Option<u64>, [u8; 32])>);
/// A directory that is signed, and its files.
pub type SignedTree = (LocationArgument, Vec<File>);

/// These directories as the core has them.
pub fn signed_of(trees: Vec<SignedTree>) -> Outcome<Signed> {
    let mut made = Vec::with_capacity(trees.len());
    for (root, files) in trees {
        let mut signed = HashMap::with_capacity(files.len());
        for (path, algorithm, parts) in files {
            let algorithm = match &*algorithm {
                "sha256" => Algorithm::Sha256,
                "blake3" => Algorithm::Blake3,
                other => {
                    let cause = format!("files are signed by {other:?}: only sha256 and blake3 are known");
                    return Err(Failure(Error::new(ErrorKind::Config, cause)));
                }
            };
            signed.insert(path, SignedFile { algorithm, parts });
        }
        made.push((absolute(vec![root.0]).pop().unwrap_or_default(), signed));
    }
    Ok(Signed::new(made))
}

/// Reads files of signed directories whole, by that many threads, and makes sure that they are the signed ones. A file is
/// given by its location and the directory that it is in. Ctrl-C raises KeyboardInterrupt from here.
#[pyfunction]
#[pyo3(signature = (files, signed, readers, storage_options=None))]
pub fn check_signed(
    py: Python<'_>,
    files: Vec<(LocationArgument, LocationArgument)>,
    signed: Vec<SignedTree>,
    readers: usize,
    storage_options: Option<Options>,
) -> PyResult<u64> {
    let (locations, directories): (Vec<_>, Vec<_>) =
        files.into_iter().map(|(location, directory)| (location.0, directory.0)).unzip();
    let router =
        Router::with_environment(CachePolicy::default(), None, environment(&locations, storage_options)?);
    let signed = signed_of(signed)?;
    let files: Vec<_> = absolute(locations).into_iter().zip(absolute(directories)).collect();
    let check = |(location, directory): &(String, String)| {
        let object = router.open(location)?;
        signed.check(location, directory.trim_end_matches('/'), &*object)?;
        Ok(object.bytes())
    };
    let check = || threads::in_order(&files, readers, "penstock-verify", check).map_err(|(_, error)| error);
    let read: Vec<u64> = interruptibly(py, check, || {
        router.interrupt();
        signed.cancel();
    })?;
    Ok(read.iter().sum())
}
