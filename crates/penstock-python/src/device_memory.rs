//! Device memory at addresses that stay, for the model pool.

use std::sync::Arc;

use penstock::device::{CudaDevice, DEVICE_CHUNK, DeviceMemory as Memory, DeviceRange as Range};
use pyo3::prelude::*;

use crate::detached::Detached;
use crate::dlpack::{DlDataType, DlDevice, capsule};
use crate::errors::Outcome;

/// The ranges of one GPU, and the memory that none of them has, kept for the next one.
#[pyclass(frozen, module = "penstock._native")]
pub struct DeviceMemory {
    inner: Detached<Arc<Memory>>,
    device: Arc<CudaDevice>,
    ordinal: i32,
}

#[pymethods]
impl DeviceMemory {
    /// Of the GPU with that ordinal. With `debug`, addresses without memory of their own lead to scratch memory that holds
    /// NaN, in place of a fault.
    ///
    /// Raises DeviceError where the GPU or its driver has no virtual memory management.
    #[new]
    #[pyo3(signature = (ordinal, *, chunk_bytes=None, debug=false))]
    fn new(py: Python<'_>, ordinal: i32, chunk_bytes: Option<usize>, debug: bool) -> Outcome<Self> {
        let chunk_bytes = chunk_bytes.unwrap_or(DEVICE_CHUNK);
        let (inner, device) = py.detach(|| -> penstock::Result<_> {
            let device = CudaDevice::open(ordinal)?;
            Ok((Memory::new(device.space()?, chunk_bytes, debug)?, device))
        })?;
        Ok(Self { inner: Detached::new(inner), device, ordinal })
    }

    /// Addresses for so many bytes, without memory.
    fn reserve(&self, py: Python<'_>, nbytes: usize) -> Outcome<DeviceRange> {
        let range = py.detach(|| self.inner.reserve(nbytes))?;
        Ok(DeviceRange { inner: Arc::new(Detached::new(range)), ordinal: self.ordinal })
    }

    /// Gives kept memory back to the driver, as far as at least `bytes_to_keep` are left. Returns the bytes given back.
    #[pyo3(signature = (bytes_to_keep=0))]
    fn trim(&self, py: Python<'_>, bytes_to_keep: usize) -> Outcome<usize> {
        Ok(py.detach(|| self.inner.trim(bytes_to_keep))?)
    }

    /// Bytes of addresses of all ranges, of memory that they have, and of memory kept for the next one.
    fn usage(&self) -> (usize, usize, usize) {
        let usage = self.inner.usage();
        (usage.reserved, usage.mapped, usage.kept)
    }

    /// Bytes of a large chunk.
    #[getter]
    fn chunk_bytes(&self) -> usize {
        self.inner.chunk_bytes()
    }

    /// The least number of bytes that can be mapped.
    #[getter]
    fn granularity(&self) -> usize {
        self.inner.granularity()
    }

    /// Whether nothing was written to addresses without memory since the last call. The caller has waited for the work that
    /// may have. Always true without `debug`.
    fn scratch_is_clean(&self, py: Python<'_>) -> Outcome<bool> {
        Ok(py.detach(|| self.inner.scratch_is_clean())?)
    }

    /// Has the calling thread's CUDA calls heed graph captures of all threads (0), of its own (1), or none (2); returns what
    /// it was.
    fn exchange_capture_mode(&self, mode: i32) -> Outcome<i32> {
        Ok(self.device.exchange_capture_mode(mode)?)
    }
}

/// Addresses of one component, and the memory that its first bytes have.
#[pyclass(frozen, module = "penstock._native")]
pub struct DeviceRange {
    /// Shared with the tensors: the addresses stay reserved as long as one of them exists.
    inner: Arc<Detached<Range>>,
    ordinal: i32,
}

#[pymethods]
impl DeviceRange {
    /// Where it begins.
    #[getter]
    fn address(&self) -> u64 {
        self.inner.address()
    }

    /// The bytes that were asked for.
    #[getter]
    fn nbytes(&self) -> usize {
        self.inner.len()
    }

    /// Bytes of memory when all of it is mapped.
    #[getter]
    fn whole_bytes(&self) -> usize {
        self.inner.whole()
    }

    /// Bytes from the beginning that have memory.
    #[getter]
    fn mapped_bytes(&self) -> usize {
        self.inner.mapped()
    }

    /// Gives memory to the first `nbytes`, rounded up to a chunk. Returns how many have memory now.
    ///
    /// Raises InsufficientMemoryError where there is not enough; nothing has changed then.
    fn map(&self, py: Python<'_>, nbytes: usize) -> Outcome<usize> {
        Ok(py.detach(|| self.inner.map(nbytes))?)
    }

    /// Takes the memory from every chunk that begins at `from_byte` or later, and keeps it for other ranges. Returns the
    /// bytes of these chunks. The caller has waited for all work that uses them.
    #[pyo3(signature = (from_byte=0))]
    fn unmap(&self, py: Python<'_>, from_byte: usize) -> Outcome<usize> {
        // SAFETY: `penstock.pool.device_slab`, the only caller, waits for what used the component before. Whoever keeps
        // a tensor of it beyond that breaks the promise that the pool's users give.
        Ok(py.detach(|| unsafe { self.inner.unmap(from_byte) })?)
    }

    /// Takes all memory away, for good. The addresses stay reserved as long as a tensor of them exists.
    fn close(&self, py: Python<'_>) -> Outcome<()> {
        // SAFETY: as for `unmap`.
        Ok(py.detach(|| unsafe { self.inner.close() })?)
    }

    /// A DLPack capsule of all of it as a vector of uint8, mapped or not. What consumes it keeps the addresses reserved.
    fn dlpack(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let address = self.inner.address() as usize as *mut _;
        let shape = [self.inner.len() as u64];
        capsule(
            py,
            address,
            DlDevice::cuda(self.ordinal),
            DlDataType::BYTE,
            &shape,
            Arc::clone(&self.inner) as _,
        )
    }
}
