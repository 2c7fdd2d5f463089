//! Paths and URLs across the border: `str` (with surrogate escapes), `bytes` or `os.PathLike` in Python, locations in the
//! core; and back.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use penstock::store::{is_remote, location_of, path_of};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A path of this machine.
pub struct PathArgument(pub PathBuf);

impl FromPyObject<'_, '_> for PathArgument {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let plain = given.py().import("os")?.call_method1("fspath", (given,))?;
        if let Ok(bytes) = plain.cast::<PyBytes>() {
            return Ok(Self(OsStr::from_bytes(bytes.as_bytes()).into()));
        }
        let text: OsString = plain.extract().map_err(|error: PyErr| {
            // A surrogate that stands for no byte: there is no such file name.
            let class = given.get_type();
            PyTypeError::new_err(format!("a path was expected, not this {class}: {error}"))
        })?;
        Ok(Self(text.into()))
    }
}

/// A path of this machine or a URL, as the core names it.
pub struct LocationArgument(pub String);

impl FromPyObject<'_, '_> for LocationArgument {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let PathArgument(path) = given.extract()?;
        Ok(Self(match path.to_str() {
            Some(url) if is_remote(url) => url.to_owned(),
            _ => location_of(path),
        }))
    }
}

/// A location as Python names it: a path that is not UTF-8 with surrogate escapes, so that `open` takes it.
pub fn to_python(location: &str) -> OsString {
    match is_remote(location) {
        true => location.into(),
        false => path_of(location).into_owned().into(),
    }
}
