//! Small objects beside weights, such as configurations and tokenizers: what there is, and its bytes.

use penstock::memory::Window;
use penstock::store::{Lane, Router, Store as _};
use penstock::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::Outcome;

/// (location, bytes) of the objects directly under a prefix.
#[pyfunction]
pub fn list_objects(py: Python<'_>, prefix: String) -> Outcome<Vec<(String, u64)>> {
    let entries = py.detach(|| Router::default().list(&prefix))?;
    Ok(entries.into_iter().map(|entry| (entry.location, entry.bytes)).collect())
}

/// The bytes of an object that is not larger than `limit`.
#[pyfunction]
pub fn read_object<'py>(py: Python<'py>, location: String, limit: u64) -> Outcome<Bound<'py, PyBytes>> {
    let bytes = py.detach(|| read(&location, limit))?;
    Ok(PyBytes::new(py, &bytes))
}

fn read(location: &str, limit: u64) -> penstock::Result<Vec<u8>> {
    let object = Router::default().open(location)?;
    let size = object.bytes();
    let Some(len) = usize::try_from(size).ok().filter(|_| size <= limit) else {
        let cause = format!("it has {size} bytes, and at most {limit} are read whole");
        return Err(Error::new(ErrorKind::Config, cause).object(object.location()));
    };
    let mut bytes = vec![0; len];
    object.read_into(0, Window::from_slice(&mut bytes), &mut Lane::default())?;
    Ok(bytes)
}
