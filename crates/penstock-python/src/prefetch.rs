//! Reading ahead, as a context manager.

use std::sync::{Mutex, MutexGuard, PoisonError};

use penstock::pipeline;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Files on their way into the page cache, until `stop` or the end of a `with` block.
#[pyclass(frozen, module = "penstock._native")]
pub struct Prefetch {
    inner: Mutex<pipeline::Prefetch>,
}

impl Prefetch {
    pub fn new(inner: pipeline::Prefetch) -> Self {
        Self { inner: Mutex::new(inner) }
    }

    fn locked(&self) -> MutexGuard<'_, pipeline::Prefetch> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Prefetch {
    /// Bytes that were not cached and were asked for so far.
    #[getter]
    fn bytes(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.locked().bytes())
    }

    /// Whether nothing more will be asked for.
    #[getter]
    fn done(&self, py: Python<'_>) -> bool {
        py.detach(|| self.locked().is_done())
    }

    /// Asks for nothing more. May be called again.
    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.locked().stop());
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        self.stop(py);
    }
}
