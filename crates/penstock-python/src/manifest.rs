//! Making manifests.

use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, Ordering};

use penstock::Error;
use penstock::manifest;
use penstock::store::location_of;
use pyo3::prelude::*;

use crate::paths::{PathArgument, to_python};
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
