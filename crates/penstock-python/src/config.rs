//! The settings of a load.

use std::path::PathBuf;

use penstock::store::{CachePolicy, DiskCache, Environment, Router};
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

impl Config {
    /// The stores that these settings and an environment lead to.
    pub fn router(&self, environment: Environment) -> Router {
        Router::with_environment(self.inner.cache.unwrap_or_default(), self.disk_cache(), environment)
    }

    pub fn disk_cache(&self) -> Option<DiskCache> {
        // An empty name is no directory: a keyword that turns off what a variable turned on.
        let directory = self.inner.cache_dir.clone().filter(|directory| !directory.as_os_str().is_empty());
        Some(DiskCache { directory: directory?, bytes: self.inner.cache_bytes })
    }
}

#[pymethods]
impl Config {
    #[new]
    #[pyo3(signature = (
        *, readers=None, block_bytes=None, staging_bytes=None, read_ahead_bytes=None, cache=None, cache_dir=None,
        cache_bytes=None
    ))]
    #[allow(clippy::too_many_arguments, reason = "keywords")]
    fn new(
        readers: Option<usize>,
        block_bytes: Option<u64>,
        staging_bytes: Option<u64>,
        read_ahead_bytes: Option<u64>,
        cache: Option<&str>,
        cache_dir: Option<PathBuf>,
        cache_bytes: Option<u64>,
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
        let given = penstock::config::Config {
            readers,
            block_bytes,
            staging_bytes,
            read_ahead_bytes,
            cache,
            cache_dir,
            cache_bytes,
        };
        Ok(Self { inner: given.or_environment(|name| std::env::var(name).ok())? })
    }

    /// The same settings with another disk cache; `None` leaves each of the two as it is.
    #[pyo3(signature = (cache_dir, cache_bytes))]
    fn with_disk_cache(&self, cache_dir: Option<PathBuf>, cache_bytes: Option<u64>) -> Outcome<Self> {
        let inner = penstock::config::Config {
            cache_dir: cache_dir.or_else(|| self.inner.cache_dir.clone()),
            cache_bytes: cache_bytes.or(self.inner.cache_bytes),
            ..self.inner.clone()
        };
        Ok(Self { inner: inner.or_environment(|name| std::env::var(name).ok())? })
    }

    /// Where what comes over the network is kept for the next load; None for nowhere.
    #[getter]
    fn cache_dir(&self) -> Option<String> {
        let directory =
            self.inner.cache_dir.as_ref().filter(|directory| !directory.as_os_str().is_empty())?;
        Some(directory.to_string_lossy().into_owned())
    }

    #[getter]
    fn cache_bytes(&self) -> Option<u64> {
        self.inner.cache_bytes
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
            "Config(readers={}, block_bytes={}, staging_bytes={}, read_ahead_bytes={}, cache={}, cache_dir={}, \
             cache_bytes={})",
            show(self.inner.readers.map(|n| n as u64)),
            show(self.inner.block_bytes),
            show(self.inner.staging_bytes),
            show(self.inner.read_ahead_bytes),
            self.cache().map_or("None".to_owned(), |name| format!("'{name}'")),
            self.cache_dir().map_or("None".to_owned(), |directory| format!("{directory:?}")),
            show(self.inner.cache_bytes),
        )
    }
}
