//! Objects as they are: what is directly under a prefix, and a small object's bytes. For the small files beside weights;
//! what is larger is pulled.

use std::ffi::OsString;

use penstock::memory::Window;
use penstock::store::{
    CachePolicy, Entry, LocalStore, ReadContext, RemoteStore, RetryPolicy, Router, Store, is_remote, path_of,
};
use penstock::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::environment::{Options, environment};
use crate::errors::Failure;
use crate::paths::LocationArgument;
use crate::signals::interruptibly;

/// Locations, names and bytes of objects; names of what has objects below it.
type Listed = (Vec<(OsString, OsString, u64)>, Vec<String>);

/// What is directly under a prefix, or in a directory of this machine: (location, name, bytes) of objects, and, of a
/// prefix, names of what has objects below it. Both are sorted.
///
/// Looks for signals while it waits for a server, so Ctrl-C raises KeyboardInterrupt from here.
#[pyfunction]
#[pyo3(signature = (location, storage_options=None))]
pub fn list_objects(
    py: Python<'_>,
    location: LocationArgument,
    storage_options: Option<Options>,
) -> PyResult<Listed> {
    let environment = environment(std::slice::from_ref(&location.0), storage_options)?;
    let location = &*location.0;
    if !is_remote(location) {
        let entries =
            py.detach(|| LocalStore::new(CachePolicy::default()).list(location)).map_err(Failure)?;
        let named = |Entry { location, bytes }| {
            let path = path_of(&location);
            (path.as_os_str().to_owned(), path.file_name().unwrap_or_default().to_owned(), bytes)
        };
        return Ok((entries.into_iter().map(named).collect(), Vec::new()));
    }
    let store = RemoteStore::new(environment, RetryPolicy::default());
    let listing = interruptibly(py, || store.find(location, false), || store.interrupt())?;
    let objects =
        listing.objects.into_iter().map(|found| (found.location.into(), found.path.into(), found.bytes));
    Ok((objects.collect(), listing.directories))
}

/// What to say of a URL at which nothing was found: what is most like it of all that lies beside it.
#[pyfunction]
#[pyo3(signature = (location, storage_options=None))]
pub fn remedy_for_missing(
    py: Python<'_>,
    location: LocationArgument,
    storage_options: Option<Options>,
) -> PyResult<Option<String>> {
    let environment = environment(std::slice::from_ref(&location.0), storage_options)?;
    let store = RemoteStore::new(environment, RetryPolicy::default());
    interruptibly(py, || Ok(store.remedy_for_missing(&location.0)), || store.interrupt())
}

/// The bytes of an object that is not larger than `limit`.
#[pyfunction]
#[pyo3(signature = (location, limit, storage_options=None))]
pub fn read_object<'py>(
    py: Python<'py>,
    location: LocationArgument,
    limit: u64,
    storage_options: Option<Options>,
) -> PyResult<Bound<'py, PyBytes>> {
    let LocationArgument(location) = location;
    let environment = environment(std::slice::from_ref(&location), storage_options)?;
    let router = Router::with_environment(CachePolicy::default(), None, environment);
    let bytes = match is_remote(&location) {
        true => interruptibly(py, || read(&router, &location, limit), || router.interrupt())?,
        false => py.detach(|| read(&router, &location, limit)).map_err(Failure)?,
    };
    Ok(PyBytes::new(py, &bytes))
}

fn read(router: &Router, location: &str, limit: u64) -> penstock::Result<Vec<u8>> {
    let object = router.open(location)?;
    let size = object.bytes();
    let Some(len) = usize::try_from(size).ok().filter(|_| size <= limit) else {
        let cause = format!("it has {size} bytes, and at most {limit} are read whole");
        return Err(Error::new(ErrorKind::Config, cause).object(object.location()));
    };
    let mut bytes = vec![0; len];
    object.read_into(0, Window::from_slice(&mut bytes), &mut ReadContext::default())?;
    Ok(bytes)
}
