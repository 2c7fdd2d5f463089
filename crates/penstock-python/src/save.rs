//! Saves under way.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use penstock::device::{CudaDevice, Device, DeviceBytes, SourceBytes, SourceDevice};
use penstock::memory::{HostBytes, Owner};
use penstock::save::{self, Published};
use penstock::store::sink::{LocalSink, Sink};
use penstock::store::{RemoteStore, RetryPolicy, Store, is_remote, path_of};
use penstock::{Error, ErrorKind};
use pyo3::prelude::*;

use crate::detached::Detached;
use crate::environment::{Options, environment};
use crate::errors::{Failure, Outcome};
use crate::logging;
use crate::paths::LocationArgument;
use crate::signals::{SIGNAL_CHECK, interruptibly};

/// Name, bytes and BLAKE3 hash in hexadecimal digits (where there is a manifest) of a file.
type Saved = (String, u64, Option<String>);

/// Memory on its way to a directory or a file of this machine, or to a prefix of an object store.
#[pyclass(frozen, module = "penstock._native")]
pub struct Save {
    inner: Detached<Mutex<Option<save::Save>>>,
    sink: Arc<dyn Sink>,
    owner: Owner,
}

#[pymethods]
impl Save {
    /// Takes the place. `devices` are ordinals of GPUs, each with the handle of the stream that tensors were made on.
    /// Ctrl-C raises KeyboardInterrupt from here.
    #[new]
    #[pyo3(signature = (location, is_directory, *, overwrite, flush, manifest, devices, writers=None, storage_options=None))]
    #[allow(clippy::too_many_arguments, reason = "as Python gives them")]
    fn new(
        py: Python<'_>,
        location: LocationArgument,
        is_directory: bool,
        overwrite: bool,
        flush: bool,
        manifest: bool,
        devices: Vec<(i32, u64)>,
        writers: Option<usize>,
        storage_options: Option<Options>,
    ) -> PyResult<Self> {
        let LocationArgument(location) = location;
        let environment = environment(std::slice::from_ref(&location), storage_options)?;
        let opened = || -> penstock::Result<Vec<SourceDevice>> {
            let open = |(ordinal, stream): &(i32, u64)| {
                let device = CudaDevice::open(*ordinal)?;
                let fence = device.fence(*stream)?;
                Ok((device as Arc<dyn Device>, fence))
            };
            devices.iter().map(open).collect()
        };
        let devices = py.detach(opened).map_err(Failure)?;
        let sink: Arc<dyn Sink> = match is_remote(&location) {
            true => {
                let store = RemoteStore::new(environment, RetryPolicy::default()).for_another_load();
                interruptibly(py, || store.sink(&location), || store.interrupt())?
            }
            false => {
                let path: &Path = &path_of(&location);
                let make = || LocalSink::create(path, is_directory, overwrite, flush);
                Arc::new(py.detach(make).map_err(Failure)?)
            }
        };
        let inner = save::Save::new(Arc::clone(&sink), devices, writers, manifest);
        Ok(Self { inner: Detached::new(Mutex::new(Some(inner))), sink, owner: Owner::current() })
    }

    /// Adds a file: `header`, and after it pieces of memory, (address, bytes, number of the device, or None for host
    /// memory). Returns its number.
    ///
    /// The memory must stay, and not be written to, until `wait_for` has said that the file is written, or the save has
    /// ended.
    fn add(
        &self,
        py: Python<'_>,
        name: &str,
        header: Vec<u8>,
        pieces: Vec<(u64, usize, Option<usize>)>,
    ) -> Outcome<usize> {
        let sources = pieces.into_iter().map(|(address, len, device)| match device {
            // SAFETY: the caller keeps the memory, as said above.
            Some(number) => SourceBytes::Device(unsafe { DeviceBytes::new(number, address, len) }),
            // SAFETY: as above.
            None => SourceBytes::Host(unsafe { HostBytes::new(address as usize as *const u8, len) }),
        });
        let sources = std::iter::once(SourceBytes::Owned(header)).chain(sources).collect();
        self.locked(py, |save| save.add(name, sources))
    }

    /// Waits a moment for a file; whether it is written.
    ///
    /// Looks for signals, so Ctrl-C raises KeyboardInterrupt from here.
    fn wait_for(&self, py: Python<'_>, file: usize) -> PyResult<bool> {
        let written = self.locked(py, |save| save.wait_for(file, SIGNAL_CHECK));
        logging::emit(py)?;
        let written = written?;
        py.check_signals()?;
        Ok(written)
    }

    /// Bytes written so far.
    fn written(&self, py: Python<'_>) -> Outcome<u64> {
        self.locked(py, |save| Ok(save.written()))
    }

    /// Fallbacks taken and limits met, in words.
    fn notes(&self, py: Python<'_>) -> Outcome<Vec<String>> {
        self.locked(py, |save| Ok(save.notes()))
    }

    /// Shows what was saved, after the manifest and, if given, one more small file (name, bytes). Returns all files.
    /// Ctrl-C raises KeyboardInterrupt from here.
    #[pyo3(signature = (last=None))]
    fn publish(&self, py: Python<'_>, last: Option<(String, Vec<u8>)>) -> PyResult<Vec<Saved>> {
        self.check_owner()?;
        let taken = py.detach(|| self.inner.lock().unwrap_or_else(PoisonError::into_inner).take());
        let save = taken.ok_or_else(|| Failure(ended()))?;
        let last = last.as_ref().map(|(name, bytes)| (&**name, &**bytes));
        let published = interruptibly(py, || save.publish(last), || self.sink.interrupt())?;
        let saved = |Published { name, bytes, root }: Published| {
            let root = root.map(|root| root.iter().map(|byte| format!("{byte:02x}")).collect());
            (name, bytes, root)
        };
        Ok(published.into_iter().map(saved).collect())
    }

    /// Ends it where it is; nothing of it is left, and no memory is read any more when this returns.
    fn stop(&self, py: Python<'_>) {
        if self.owner.is_current() {
            py.detach(|| drop(self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()));
        }
    }
}

impl Save {
    fn check_owner(&self) -> Outcome<()> {
        match self.owner.is_current() {
            true => Ok(()),
            false => {
                let cause = "the save belongs to the process that this one was forked from";
                Err(Failure(Error::new(ErrorKind::Cancelled, cause)))
            }
        }
    }

    fn locked<T: Send>(
        &self,
        py: Python<'_>,
        body: impl FnOnce(&mut save::Save) -> Result<T, Error> + Send,
    ) -> Outcome<T> {
        self.check_owner()?;
        let inner = &*self.inner;
        py.detach(|| match &mut *inner.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(save) => body(save),
            None => Err(ended()),
        })
        .map_err(Failure)
    }
}

fn ended() -> Error {
    Error::new(ErrorKind::Cancelled, "the save has ended")
}
