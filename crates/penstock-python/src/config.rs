//! The settings of a load.

use std::ffi::OsString;
use std::path::PathBuf;

use penstock::manifest::Verify;
use penstock::store::{CachePolicy, DiskCache, Environment, Router};
use penstock::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict};

use crate::errors::Outcome;
use crate::paths::PathArgument;

/// Settings of a load. Every one of them is found by itself where neither a keyword nor the environment says
/// otherwise; they exist for benchmarks and for ruling things out.
#[pyclass(frozen, eq, module = "penstock._native")]
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LoadOptions {
    pub inner: penstock::config::Config,
}

impl LoadOptions {
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
impl LoadOptions {
    #[new]
    #[pyo3(signature = (
        *, readers=None, block_bytes=None, staging_bytes=None, window_bytes=None, cache=None, cache_dir=None,
        cache_bytes=None, verify=None, trace=None
    ))]
    #[allow(clippy::too_many_arguments, reason = "keywords")]
    fn new(
        readers: Option<Bound<'_, PyAny>>,
        block_bytes: Option<Bound<'_, PyAny>>,
        staging_bytes: Option<Bound<'_, PyAny>>,
        window_bytes: Option<Bound<'_, PyAny>>,
        cache: Option<Bound<'_, PyAny>>,
        cache_dir: Option<Bound<'_, PyAny>>,
        cache_bytes: Option<Bound<'_, PyAny>>,
        verify: Option<Bound<'_, PyAny>>,
        trace: Option<Bound<'_, PyAny>>,
    ) -> Outcome<Self> {
        let readers = number("readers", readers, "a number of threads, 1 to 256")?;
        let given = penstock::config::Config {
            readers: readers.map(|readers| usize::try_from(readers).unwrap_or(usize::MAX)),
            block_bytes: size("block_bytes", block_bytes)?,
            staging_bytes: size("staging_bytes", staging_bytes)?,
            window_bytes: size("window_bytes", window_bytes)?,
            cache: cache
                .map(|given| {
                    let name = given.extract::<String>().ok();
                    let known = name.as_deref().and_then(CachePolicy::from_name);
                    known.ok_or_else(|| refused("cache", &given, "one of auto, use, bypass, populate"))
                })
                .transpose()?,
            cache_dir: path("cache_dir", cache_dir)?,
            cache_bytes: size("cache_bytes", cache_bytes)?,
            trace: path("trace", trace)?,
            verify: verify
                .map(|given| {
                    let name = given.extract::<String>().ok();
                    let known = name.as_deref().and_then(Verify::from_name);
                    known.ok_or_else(|| refused("verify", &given, "one of auto, require, off"))
                })
                .transpose()?,
        };
        Ok(Self { inner: given.or_environment(|name| std::env::var(name).ok())? })
    }

    /// The same settings with another disk cache; `None` leaves each of the two as it is.
    #[pyo3(signature = (cache_dir, cache_bytes))]
    fn with_disk_cache(
        &self,
        cache_dir: Option<Bound<'_, PyAny>>,
        cache_bytes: Option<Bound<'_, PyAny>>,
    ) -> Outcome<Self> {
        let inner = penstock::config::Config {
            cache_dir: path("cache_dir", cache_dir)?.or_else(|| self.inner.cache_dir.clone()),
            cache_bytes: size("cache_bytes", cache_bytes)?.or(self.inner.cache_bytes),
            ..self.inner.clone()
        };
        Ok(Self { inner: inner.or_environment(|name| std::env::var(name).ok())? })
    }

    /// Where what comes over the network is kept for the next load; None for nowhere.
    #[getter]
    fn cache_dir(&self) -> Option<OsString> {
        let directory =
            self.inner.cache_dir.as_ref().filter(|directory| !directory.as_os_str().is_empty())?;
        Some(directory.into())
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
    fn window_bytes(&self) -> Option<u64> {
        self.inner.window_bytes
    }

    #[getter]
    fn cache(&self) -> Option<&'static str> {
        self.inner.cache.map(CachePolicy::name)
    }

    #[getter]
    fn verify(&self) -> Option<&'static str> {
        self.inner.verify.map(Verify::name)
    }

    /// The file that a load's trace is added to; None for none.
    #[getter]
    fn trace(&self) -> Option<OsString> {
        Some(self.inner.trace.as_ref().filter(|file| !file.as_os_str().is_empty())?.into())
    }

    /// What `pickle` and `copy` make another one of: the settings as they are, the environment's among them.
    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((), Bound<'py, PyDict>)> {
        let keywords = PyDict::new(py);
        keywords.set_item("readers", self.inner.readers)?;
        keywords.set_item("block_bytes", self.inner.block_bytes)?;
        keywords.set_item("staging_bytes", self.inner.staging_bytes)?;
        keywords.set_item("window_bytes", self.inner.window_bytes)?;
        keywords.set_item("cache", self.cache())?;
        keywords
            .set_item("cache_dir", self.inner.cache_dir.as_ref().map(|directory| directory.as_os_str()))?;
        keywords.set_item("cache_bytes", self.inner.cache_bytes)?;
        keywords.set_item("verify", self.verify())?;
        keywords.set_item("trace", self.inner.trace.as_ref().map(|file| file.as_os_str()))?;
        Ok(((), keywords))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let ((), keywords) = self.__getnewargs_ex__(py)?;
        let shown = keywords.iter().map(|(name, value)| Ok(format!("{name}={}", value.repr()?)));
        Ok(format!("LoadOptions({})", shown.collect::<PyResult<Vec<_>>>()?.join(", ")))
    }
}

/// The bytes that a text such as `4194304`, `4MiB`, `4M` (powers of 1024) or `4MB` (of 1000) means, in any case; None
/// where it means none.
#[pyfunction]
pub fn size_meant(text: &str) -> Option<u64> {
    penstock::config::parse_size(text.trim())
}

/// A setting in bytes: a number, or what the environment's variables may hold.
fn size(name: &str, given: Option<Bound<'_, PyAny>>) -> Outcome<Option<u64>> {
    let Some(given) = given else { return Ok(None) };
    match given.extract::<String>() {
        Ok(text) => size_meant(&text).map(Some).ok_or_else(|| refused(name, &given, SIZE).into()),
        Err(_) => number(name, Some(given), SIZE),
    }
}

const SIZE: &str = "a number of bytes, or a size such as 4MiB or 500GB";

/// A setting that is a whole number.
fn number(name: &str, given: Option<Bound<'_, PyAny>>, expected: &str) -> Outcome<Option<u64>> {
    let Some(given) = given else { return Ok(None) };
    // Python counts True as 1; a setting that was meant to be switched on is no number.
    match given.extract() {
        Ok(number) if !given.is_instance_of::<PyBool>() => Ok(Some(number)),
        _ => Err(refused(name, &given, expected).into()),
    }
}

fn path(name: &str, given: Option<Bound<'_, PyAny>>) -> Outcome<Option<PathBuf>> {
    let Some(given) = given else { return Ok(None) };
    match given.extract() {
        Ok(PathArgument(path)) => Ok(Some(path)),
        Err(_) => Err(refused(name, &given, "a path: a str, bytes or os.PathLike").into()),
    }
}

fn refused(name: &str, given: &Bound<'_, PyAny>, expected: &str) -> Error {
    let shown = given.repr().map_or_else(|_| "?".to_owned(), |repr| repr.to_string());
    Error::new(ErrorKind::Config, format!("{name}={shown} is not {expected}"))
        .remedy("Leave it unset: Penstock finds good values by itself")
}
