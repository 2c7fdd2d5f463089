//! The entries of a disk cache: what there is, whether it is intact, what may go.

use std::time::UNIX_EPOCH;

use penstock::store::CacheManager;
use pyo3::prelude::*;

use crate::errors::Outcome;
use crate::paths::PathArgument;

/// Name, location, bytes, bytes that are there, whether it is complete, and when it was used (seconds since 1970).
type Entry = (String, String, u64, u64, bool, f64);

/// The entries of the disk cache in a directory, those used last first.
#[pyfunction]
pub fn cache_entries(py: Python<'_>, directory: PathArgument) -> Vec<Entry> {
    let entries = py.detach(|| CacheManager::new(&directory.0).entries());
    let of = |entry: penstock::store::CacheEntry| {
        let used = entry.used.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        (entry.name, entry.location, entry.bytes, entry.cached_bytes, entry.is_complete, used)
    };
    entries.into_iter().map(of).collect()
}

/// Compares an entry with its checksums: (bytes compared, bytes damaged). Damaged ones are fetched again when needed.
/// None where there is no such entry by now.
#[pyfunction]
pub fn cache_verify(py: Python<'_>, directory: PathArgument, name: &str) -> Outcome<Option<(u64, u64)>> {
    Ok(py.detach(|| CacheManager::new(&directory.0).verify(name))?)
}

/// Removes an entry; False where it is in use, or there is none.
#[pyfunction]
pub fn cache_remove(py: Python<'_>, directory: PathArgument, name: &str) -> Outcome<bool> {
    Ok(py.detach(|| CacheManager::new(&directory.0).remove(name))?)
}

/// Removes entries, those used longest ago first, until all together have at most so many bytes.
#[pyfunction]
pub fn cache_prune(py: Python<'_>, directory: PathArgument, nbytes: u64) -> Outcome<()> {
    Ok(py.detach(|| CacheManager::new(&directory.0).prune(nbytes))?)
}
