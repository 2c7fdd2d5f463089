//! Errors of the core as exceptions of `penstock.errors`.

use penstock::store::readable;
use penstock::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use crate::paths::to_python;

/// The core's failure on its way to Python.
pub struct Failure(pub Error);

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

/// What a binding returns.
pub type Outcome<T> = Result<T, Failure>;

impl From<Failure> for PyErr {
    fn from(Failure(error): Failure) -> Self {
        // Raised while attached to Python; building the exception may itself fail, and then that is what is raised.
        Python::attach(|py| exception(py, &error).unwrap_or_else(|raised| raised))
    }
}

fn exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let class = match error.kind() {
        ErrorKind::NotFound => "LocationNotFoundError",
        ErrorKind::Access => "LocationAccessError",
        ErrorKind::Changed => "LocationChangedError",
        ErrorKind::Integrity => "IntegrityError",
        ErrorKind::Signature => "SignatureError",
        ErrorKind::Format => "FormatError",
        ErrorKind::TensorNotFound => "TensorNotFoundError",
        ErrorKind::Selection => "SelectionError",
        ErrorKind::Destination => "DestinationError",
        ErrorKind::Device => "DeviceError",
        ErrorKind::Memory => "InsufficientMemoryError",
        ErrorKind::Exists => "LocationExistsError",
        ErrorKind::Config => "ConfigError",
        ErrorKind::Dependency => "MissingDependencyError",
        ErrorKind::Cancelled => "LoadCancelledError",
        _ => "StorageError",
    };
    let context = PyDict::new(py);
    context.set_item("location", error.object_name().map(to_python))?;
    context.set_item("tensor", error.tensor_name())?;
    context.set_item("byte_range", error.byte_range().map(|range| (range.start, range.end)))?;
    context.set_item("cause", readable(error.cause()))?;
    context.set_item("remedy", error.remedy_text().map(readable))?;
    context.set_item("errno", error.os_error())?;
    context.set_item("code", error.error_code().as_str())?;
    context
        .set_item("details", error.details().iter().map(|(name, value)| (*name, value)).into_py_dict(py)?)?;
    let class = py.import("penstock.errors")?.getattr(class)?;
    Ok(PyErr::from_value(class.call((error.to_string(),), Some(&context))?))
}
