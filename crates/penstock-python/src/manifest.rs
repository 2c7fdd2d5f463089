//! Making manifests, and what is in them.

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use penstock::Error;
use penstock::manifest;
use penstock::store::{CachePolicy, Router, Store, location_of};
use pyo3::prelude::*;

use crate::environment::{Options, environment};
use crate::paths::{LocationArgument, PathArgument, to_python};
use crate::signals::interruptibly;

/// (path, bytes, BLAKE3 hash in hexadecimal digits) of a file.
type Hashed = (OsString, u64, String);

/// Hashes all files of a directory with that many threads, and puts a manifest of them there: its path, and what is in it.
/// Ctrl-C raises KeyboardInterrupt from here.
#[pyfunction]
pub fn make_manifest(
    py: Python<'_>,
    directory: PathArgument,
    threads: usize,
) -> PyResult<(OsString, Vec<Hashed>)> {
    let PathArgument(directory) = directory;
    let cancelled = AtomicBool::new(false);
    let make = || {
        let made = manifest::make(&directory, threads, |path| location_of(path), &cancelled)?;
        let path = manifest::write(&directory, &made).map_err(|error| {
            Error::from_io("writing the manifest", &error).object(location_of(&directory))
        })?;
        Ok((path, made))
    };
    let (path, made) = interruptibly(py, make, || cancelled.store(true, Ordering::Relaxed))?;
    let hashed = made.files().iter().map(|file| {
        let root = file.root().iter().map(|byte| format!("{byte:02x}")).collect();
        (to_python(file.name()), file.bytes(), root)
    });
    Ok((path.into(), hashed.collect()))
}

/// (path, bytes, BLAKE3 hash) of a file.
type Listed = (OsString, u64, [u8; 32]);

/// (path, bytes, BLAKE3 hash) of every file of the manifest at a location, or None where there is no manifest. Ctrl-C
/// raises KeyboardInterrupt from here.
#[pyfunction]
#[pyo3(signature = (location, storage_options=None))]
pub fn read_manifest(
    py: Python<'_>,
    location: LocationArgument,
    storage_options: Option<Options>,
) -> PyResult<Option<Vec<Listed>>> {
    let environment = environment(std::slice::from_ref(&location.0), storage_options)?;
    let store = Arc::new(Router::with_environment(CachePolicy::default(), None, environment));
    let read = || penstock::checkpoint::read_manifest(Arc::clone(&store) as _, &location.0);
    let found = interruptibly(py, read, || store.interrupt())?;
    let files = |file: &manifest::FileHashes| (to_python(file.name()), file.bytes(), *file.root());
    Ok(found.map(|found| found.files().iter().map(files).collect()))
}
