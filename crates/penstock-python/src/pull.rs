//! Finding what a URL names, and bringing it to a directory.

use std::ffi::OsString;
use std::sync::{Mutex, PoisonError};

use penstock::memory::Owner;
use penstock::pull::{self, How, Item, PulledFile};
use penstock::store::{self, RemoteStore, RetryPolicy, Store};
use penstock::{Error, ErrorKind};
use pyo3::prelude::*;

use crate::detached::Detached;
use crate::environment::{Options, environment};
use crate::errors::{Failure, Outcome};
use crate::logging;
use crate::paths::{LocationArgument, PathArgument, to_python};
use crate::signals::{SIGNAL_CHECK, interruptibly};

/// Paths, bytes and how each came; bytes that came over the network; seconds.
type Entry = (String, u64, &'static str);
type Ended = (Vec<Entry>, u64, f64);

/// What a URL names: the objects under a prefix, the files of a repository, or one object.
#[pyclass(frozen, module = "penstock._native")]
pub struct Source {
    store: RemoteStore,
    items: Vec<Item>,
}

#[pymethods]
impl Source {
    /// Finds what is there; Ctrl-C raises KeyboardInterrupt from here. The environment is copied here, for the pull too.
    #[new]
    #[pyo3(signature = (location, storage_options=None))]
    fn new(py: Python<'_>, location: LocationArgument, storage_options: Option<Options>) -> PyResult<Self> {
        let LocationArgument(location) = location;
        let environment = environment(std::slice::from_ref(&location), storage_options)?;
        let store = RemoteStore::new(environment, RetryPolicy::default());
        let items = interruptibly(py, || pull::find(&store, &location), || store.interrupt())?;
        Ok(Self { store, items })
    }

    /// (path below the URL, bytes) of every object. Bytes are 0 where they are not known before it is opened.
    #[getter]
    fn entries(&self) -> Vec<(&str, u64)> {
        self.items.iter().map(|item| (&*item.path, item.bytes)).collect()
    }

    /// (path, bytes, how) of each of the entries with these indices: what a pull would do. Ctrl-C raises
    /// KeyboardInterrupt from here.
    fn preview(
        &self,
        py: Python<'_>,
        destination: PathArgument,
        indices: Vec<usize>,
    ) -> PyResult<Vec<Entry>> {
        let items = self.wanted(indices);
        let preview = || pull::preview(&self.store, &items, &destination.0);
        let files = interruptibly(py, preview, || self.store.interrupt())?;
        Ok(files.into_iter().map(entry).collect())
    }

    /// Begins to pull the entries with these indices.
    fn pull(
        &self,
        py: Python<'_>,
        destination: PathArgument,
        indices: Vec<usize>,
        readers: Option<usize>,
    ) -> Outcome<Pull> {
        let items = self.wanted(indices);
        let inner = py.detach(|| pull::Pull::start(&self.store, items, &destination.0, readers))?;
        Ok(Pull { inner: Detached::new(Mutex::new(inner)), owner: Owner::current() })
    }
}

impl Source {
    fn wanted(&self, indices: Vec<usize>) -> Vec<Item> {
        indices.into_iter().filter_map(|index| self.items.get(index).cloned()).collect()
    }
}

/// A file as Python has it.
fn entry(file: PulledFile) -> Entry {
    let how = match file.how {
        How::Pulled => "pulled",
        How::Resumed => "resumed",
        How::Kept => "kept",
    };
    (file.path, file.bytes, how)
}

/// A pull under way.
#[pyclass(frozen, module = "penstock._native")]
pub struct Pull {
    inner: Detached<Mutex<pull::Pull>>,
    owner: Owner,
}

impl Pull {
    /// What `body` makes of the pull. In a forked child a thread of the parent may have it, and nothing of it runs:
    /// `Cancelled`.
    fn locked<T: Send>(
        &self,
        py: Python<'_>,
        body: impl FnOnce(&mut pull::Pull) -> Result<T, Error> + Send,
    ) -> Outcome<T> {
        if !self.owner.is_current() {
            let cause = "the pull belongs to the process that this one was forked from";
            let error = Error::new(ErrorKind::Cancelled, cause);
            return Err(Failure(error.remedy("Begin a pull of its own in the child")));
        }
        let inner = &*self.inner;
        py.detach(|| body(&mut inner.lock().unwrap_or_else(PoisonError::into_inner))).map_err(Failure)
    }
}

#[pymethods]
impl Pull {
    /// Waits a moment; returns what was done once that is all, else None.
    ///
    /// Looks for signals, so Ctrl-C raises KeyboardInterrupt from here.
    fn wait(&self, py: Python<'_>) -> PyResult<Option<Ended>> {
        let ended = self.locked(py, |pull| pull.wait(SIGNAL_CHECK));
        logging::emit(py)?;
        let ended = ended?;
        py.check_signals()?;
        Ok(ended.map(|pulled| {
            let files = pulled.files.into_iter().map(entry).collect();
            (files, pulled.fetched_bytes, pulled.wall.as_secs_f64())
        }))
    }

    /// (bytes done, bytes in all as far as known, files done, files in all).
    fn progress(&self, py: Python<'_>) -> Outcome<(u64, u64, usize, usize)> {
        let progress = self.locked(py, |pull| Ok(pull.progress()))?;
        Ok((progress.done_bytes, progress.bytes, progress.done_files, progress.files))
    }

    /// Stops it, and returns when nothing of it runs. What came so far is kept for the next pull. In a forked child nothing
    /// of it runs.
    fn stop(&self, py: Python<'_>) {
        let _ = self.locked(py, |pull| {
            pull.stop();
            Ok(())
        });
    }
}

/// A location without what may be secret: a URL's user and query.
#[pyfunction]
pub fn shown(location: LocationArgument) -> OsString {
    to_python(&store::shown(&location.0))
}

/// The path that a `file://` URL names; any other location is itself.
#[pyfunction]
pub fn without_file_scheme(location: LocationArgument) -> Outcome<OsString> {
    Ok(to_python(&penstock::checkpoint::without_file_scheme(&location.0)?))
}

/// A setting that is the URL of a server, or its host, without what may be secret.
#[pyfunction]
#[pyo3(name = "shown_setting")]
pub fn shown_endpoint(value: &str) -> String {
    store::shown_setting(value).into_owned()
}

/// Waits until what loads have read is in their disk caches, at most so many seconds; whether it is.
///
/// Looks for signals, so Ctrl-C raises KeyboardInterrupt from here.
#[pyfunction]
#[pyo3(signature = (seconds=30.0))]
pub fn flush_disk_cache(py: Python<'_>, seconds: f64) -> PyResult<bool> {
    let seconds = if seconds.is_nan() { 0.0 } else { seconds.clamp(0.0, 1e6) };
    let end = std::time::Instant::now() + std::time::Duration::from_secs_f64(seconds);
    loop {
        if py.detach(|| store::flush_disk_caches(SIGNAL_CHECK)) {
            return Ok(true);
        }
        py.check_signals()?;
        if std::time::Instant::now() >= end {
            return Ok(false);
        }
    }
}
