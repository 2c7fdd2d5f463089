//! The settings of a load.

use penstock::store::CachePolicy;
use penstock::{Error, ErrorKind};
use pyo3::prelude::*;

use crate::errors::Outcome;

/// Settings of a load. Every one of them is found by itself where neither a keyword nor the environment says
/// otherwise; they exist for benchmarks and for ruling things out.
#[pyclass(frozen, module = "penstock._native")]
#[derive(Debug, Clone, Default)]
pub struct Config {
    pub inner: penstock::config::Config,
}

#[pymethods]
impl Config {
    #[new]
    #[pyo3(signature = (*, readers=None, block_bytes=None, staging_bytes=None, read_ahead_bytes=None, cache=None))]
    fn new(
        readers: Option<usize>,
        block_bytes: Option<u64>,
        staging_bytes: Option<u64>,
        read_ahead_bytes: Option<u64>,
        cache: Option<&str>,
    ) -> Outcome<Self> {
        let cache = cache
            .map(|name| {
                CachePolicy::from_name(name).ok_or_else(|| {
                    Error::new(
                        ErrorKind::Config,
                        format!("cache={name:?} is not one of auto, use, bypass, populate"),
                    )
                })
            })
            .transpose()?;
        let given = penstock::config::Config { readers, block_bytes, staging_bytes, read_ahead_bytes, cache };
        Ok(Self { inner: given.or_environment(|name| std::env::var(name).ok())? })
    }

    #[getter]
    fn readers(&self) -> Option<usize> {
        self.inner.readers
    }

    #[getter]
    fn block_bytes(&self) -> Option<u64> {
        self.inner.block_bytes
    }

    #[getter]
    fn staging_bytes(&self) -> Option<u64> {
        self.inner.staging_bytes
    }

    #[getter]
    fn read_ahead_bytes(&self) -> Option<u64> {
        self.inner.read_ahead_bytes
    }

    #[getter]
    fn cache(&self) -> Option<&'static str> {
        self.inner.cache.map(CachePolicy::name)
    }

    fn __repr__(&self) -> String {
        let show = |value: Option<u64>| value.map_or("None".to_owned(), |value| value.to_string());
        format!(
            "Config(readers={}, block_bytes={}, staging_bytes={}, read_ahead_bytes={}, cache={})",
            show(self.inner.readers.map(|n| n as u64)),
            show(self.inner.block_bytes),
            show(self.inner.staging_bytes),
            show(self.inner.read_ahead_bytes),
            self.cache().map_or("None".to_owned(), |name| format!("'{name}'")),
        )
    }
}
