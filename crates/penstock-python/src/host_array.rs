//! The memory of one host tensor, for whoever can take it without a copy: numpy through its address, anything else
//! through DLPack.
//!
//! What a consumer gets shares ownership: the memory goes when the last of this object and its consumers goes, and
//! consumers may free their share without the GIL, from any thread.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use penstock::checkpoint::Dtype;
use penstock::device::{CudaDevice, Device, PinnedMemory};
use penstock::memory::{FileMapping, HostTensor, spare_bytes_below};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::dlpack::{DlDataType, DlDevice, capsule, dlpack_dtype};
use crate::errors::Outcome;

/// Who keeps the bytes.
#[derive(Debug)]
pub enum Owner {
    /// Memory of the tensor's own.
    Tensor(HostTensor),
    /// Part of a mapped file.
    View(Arc<FileMapping>, Range<u64>),
    /// Memory that is registered with a device.
    Pinned(PinnedMemory),
}

impl Owner {
    fn address(&self) -> *mut u8 {
        match self {
            Self::Tensor(tensor) => tensor.as_ptr(),
            // SAFETY: a tensor's range lies in its object, all of which is mapped.
            Self::View(mapping, range) => unsafe {
                mapping.as_ptr().add(usize::try_from(range.start).unwrap_or(0))
            },
            Self::Pinned(memory) => memory.as_ptr(),
        }
    }
}

/// Host memory of one tensor: contiguous, row-major, writable, its owner's alone.
#[pyclass(frozen, module = "penstock._native")]
#[derive(Debug)]
pub struct HostArray {
    owner: Arc<Owner>,
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: u64,
}

impl HostArray {
    pub fn new(owner: Owner, dtype: Dtype, shape: Vec<u64>, bytes: u64) -> Self {
        Self { owner: Arc::new(owner), dtype, shape, bytes }
    }
}

#[pymethods]
impl HostArray {
    /// `nbytes` bytes that are registered with the GPU of that ordinal, uninitialised. Also says why the driver refused
    /// to register them, if it did: then they are pageable.
    #[staticmethod]
    fn pinned(py: Python<'_>, nbytes: usize, ordinal: i32) -> Outcome<(Self, Option<String>)> {
        let make = || -> penstock::Result<PinnedMemory> {
            let device = CudaDevice::open(ordinal)?;
            let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(8));
            PinnedMemory::make(nbytes, device.pinning(), threads)
        };
        let memory = py.detach(make)?;
        let refused = memory.refused();
        Ok((Self::new(Owner::Pinned(memory), Dtype::U8, vec![nbytes as u64], nbytes as u64), refused))
    }

    /// `nbytes` zeros that get pages as they are written to, to be registered with the GPU of that ordinal by `pin`.
    #[staticmethod]
    fn to_be_pinned(nbytes: usize, ordinal: i32) -> Outcome<Self> {
        let memory = PinnedMemory::reserve(nbytes, CudaDevice::open(ordinal)?.pinning())?;
        Ok(Self::new(Owner::Pinned(memory), Dtype::U8, vec![nbytes as u64], nbytes as u64))
    }

    /// Registers memory of `to_be_pinned`, if it is not yet. Says why the driver refused, if it did.
    fn pin(&self, py: Python<'_>) -> Option<String> {
        let Owner::Pinned(memory) = &*self.owner else {
            return Some("it was not made to be pinned".to_owned());
        };
        py.detach(|| memory.register())
    }

    /// Where it begins.
    #[getter]
    fn address(&self) -> usize {
        self.owner.address() as usize
    }

    /// Its bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// Its dtype, as the header spells it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Its shape.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// A DLPack capsule of the tensor; with `raw`, of its bytes as a vector of uint8.
    ///
    /// Raises BufferError for a dtype that DLPack has no word for, unless `raw`.
    #[pyo3(signature = (raw=false))]
    fn dlpack(&self, py: Python<'_>, raw: bool) -> PyResult<Py<PyAny>> {
        let (dtype, shape) = match (raw, dlpack_dtype(self.dtype)) {
            (false, Some(dtype)) => (dtype, self.shape.clone()),
            (true, _) => (DlDataType::BYTE, vec![self.bytes]),
            (false, None) => {
                return Err(PyBufferError::new_err(format!("DLPack has no dtype for {}", self.dtype.name())));
            }
        };
        let address = self.owner.address().cast();
        capsule(py, address, DlDevice::CPU, dtype, &shape, Arc::clone(&self.owner) as _)
    }

    /// The DLPack protocol. The memory is the host's, so `stream` means nothing; copies are the consumer's business.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    #[allow(clippy::needless_pass_by_value, reason = "the protocol's signature")]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<Py<PyAny>>,
        max_version: Option<Py<PyAny>>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        let _ = (stream, max_version);
        if dl_device.is_some_and(|device| device != (1, 0)) || copy == Some(true) {
            return Err(PyBufferError::new_err("only a view of the host memory can be had"));
        }
        self.dlpack(py, false)
    }

    /// The DLPack protocol: the CPU.
    fn __dlpack_device__(&self) -> (i32, i32) {
        DlDevice::CPU.pair()
    }
}

/// Bytes of host memory that this process could take: of the machine, and within its control groups' limits, page cache
/// counted as free. None where the system says nothing about it. `root` is where its file system begins.
#[pyfunction]
#[pyo3(signature = (root = PathBuf::from("/")))]
pub fn spare_memory(root: PathBuf) -> Option<u64> {
    spare_bytes_below(&root)
}
