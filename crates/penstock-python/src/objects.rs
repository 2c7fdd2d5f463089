//! Objects as they are: what is under a prefix, and one object's bytes, in memory or in a file. For the small files beside
//! weights.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use penstock::memory::Window;
use penstock::store::{CachePolicy, Lane, Router, Store};
use penstock::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::Outcome;

/// Bytes that are fetched at once.
const STEP: u64 = 8 << 20;

/// (location, bytes) of the objects directly under a prefix, or the files in a directory, sorted by location.
#[pyfunction]
pub fn list_objects(py: Python<'_>, prefix: &str) -> Outcome<Vec<(String, u64)>> {
    let entries = py.detach(|| Router::new(CachePolicy::default()).list(prefix))?;
    Ok(entries.into_iter().map(|entry| (entry.location, entry.bytes)).collect())
}

/// Writes an object's bytes to a new file; of a file of that name nothing remains.
#[pyfunction]
pub fn fetch_object(py: Python<'_>, location: &str, path: &str) -> Outcome<u64> {
    py.detach(|| {
        let object = Router::new(CachePolicy::default()).open(location)?;
        let failed = |error: std::io::Error| {
            Error::new(ErrorKind::Storage, format!("the file cannot be written: {error}")).object(path)
        };
        let mut file = File::create(Path::new(path)).map_err(failed)?;
        let mut lane = Lane::default();
        let mut buffer = vec![0; usize::try_from(object.bytes().min(STEP)).unwrap_or(usize::MAX)];
        let mut at = 0;
        while at < object.bytes() {
            let len = usize::try_from(STEP.min(object.bytes() - at)).unwrap_or(usize::MAX);
            object.read_into(at, Window::from_slice(&mut buffer[..len]), &mut lane)?;
            file.write_all(&buffer[..len]).map_err(failed)?;
            at += len as u64;
        }
        object.verify_unchanged()?;
        Ok(at)
    })
}

/// The bytes of an object that is not larger than `limit`.
#[pyfunction]
pub fn read_object<'py>(py: Python<'py>, location: String, limit: u64) -> Outcome<Bound<'py, PyBytes>> {
    let bytes = py.detach(|| read(&location, limit))?;
    Ok(PyBytes::new(py, &bytes))
}

fn read(location: &str, limit: u64) -> penstock::Result<Vec<u8>> {
    let object = Router::new(CachePolicy::default()).open(location)?;
    let size = object.bytes();
    let Some(len) = usize::try_from(size).ok().filter(|_| size <= limit) else {
        let cause = format!("it has {size} bytes, and at most {limit} are read whole");
        return Err(Error::new(ErrorKind::Config, cause).object(object.location()));
    };
    let mut bytes = vec![0; len];
    object.read_into(0, Window::from_slice(&mut bytes), &mut Lane::default())?;
    Ok(bytes)
}
