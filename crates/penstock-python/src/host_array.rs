//! The memory of one host tensor, for whoever can take it without a copy: numpy through its address, anything else
//! through DLPack.
//!
//! What a consumer gets shares ownership: the memory goes when the last of this object and its consumers goes, and
//! consumers may free their share without the GIL, from any thread.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use penstock::checkpoint::Dtype;
use penstock::device::{CudaDevice, Device, PinnedMemory};
use penstock::memory::{FileMapping, HostTensor, spare_bytes};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

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
        let refused = memory.refused().map(str::to_owned);
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
        py.detach(|| memory.register().map(str::to_owned))
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
            (true, _) => (DlDataType { code: 1, bits: 8, contexts: 1 }, vec![self.bytes]),
            (false, None) => {
                return Err(PyBufferError::new_err(format!("DLPack has no dtype for {}", self.dtype.name())));
            }
        };
        capsule(py, Arc::clone(&self.owner), dtype, &shape)
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
        (1, 0)
    }
}

/// Bytes of host memory that this process could take: of the machine, and within its control groups' limits, page cache
/// counted as free. None where the system says nothing about it.
#[pyfunction]
pub fn spare_memory() -> Option<u64> {
    spare_bytes()
}

// The structures of dlpack.h, version 0.8 (the unversioned ones, which every consumer takes).

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDataType {
    code: u8,
    bits: u8,
    contexts: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype: DlDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct DlManagedTensor {
    tensor: DlTensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedTensor)>,
}

/// What a capsule keeps: the structure that consumers see, and what its pointers lead to.
struct Managed {
    seen: DlManagedTensor,
    _owner: Arc<Owner>,
    _shape: Box<[i64]>,
    _strides: Box<[i64]>,
}

fn dlpack_dtype(dtype: Dtype) -> Option<DlDataType> {
    let code = match dtype {
        Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64 => 0,
        Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64 => 1,
        Dtype::F16 | Dtype::F32 | Dtype::F64 => 2,
        Dtype::Bf16 => 4,
        Dtype::C64 => 5,
        Dtype::Bool => 6,
        _ => return None,
    };
    Some(DlDataType { code, bits: u8::try_from(dtype.bits()).ok()?, contexts: 1 })
}

fn capsule(py: Python<'_>, owner: Arc<Owner>, dtype: DlDataType, shape: &[u64]) -> PyResult<Py<PyAny>> {
    let too_large = |_| PyBufferError::new_err("the tensor is too large for DLPack");
    let mut shape: Box<[i64]> =
        shape.iter().map(|n| i64::try_from(*n)).collect::<Result<_, _>>().map_err(too_large)?;
    let mut strides = vec![1i64; shape.len()].into_boxed_slice();
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1].saturating_mul(shape[i + 1]);
    }
    let seen = DlManagedTensor {
        tensor: DlTensor {
            data: owner.address().cast(),
            device_type: 1,
            device_id: 0,
            ndim: i32::try_from(shape.len()).map_err(too_large)?,
            dtype,
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        },
        manager: std::ptr::null_mut(),
        deleter: Some(delete),
    };
    let managed = Box::into_raw(Box::new(Managed { seen, _owner: owner, _shape: shape, _strides: strides }));
    // SAFETY: `managed` was just made from a box; the manager pointer leads back to it for `delete`.
    unsafe { (*managed).seen.manager = managed.cast() };
    // SAFETY: a non-null pointer, a static name, a destructor for capsules of that name; the GIL is held.
    let capsule = unsafe {
        ffi::PyCapsule_New((&raw mut (*managed).seen).cast(), NAME.as_ptr(), Some(destroy_capsule))
    };
    if capsule.is_null() {
        // SAFETY: no capsule was made, so this is still the only owner.
        drop(unsafe { Box::from_raw(managed) });
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a new reference, checked not to be null.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) }.unbind())
}

const NAME: &std::ffi::CStr = c"dltensor";

/// Called by the consumer when it is done with the tensor; needs no GIL.
unsafe extern "C" fn delete(seen: *mut DlManagedTensor) {
    // SAFETY: the consumer passes what it was given, once; its manager is the box made in `capsule`.
    drop(unsafe { Box::from_raw((*seen).manager.cast::<Managed>()) });
}

/// Called when a capsule is freed: one that no consumer took (which would have renamed it) still owns its tensor.
unsafe extern "C" fn destroy_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python with a capsule made above, with the GIL held.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            let seen = ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast::<DlManagedTensor>();
            if !seen.is_null() {
                delete(seen);
            }
        }
    }
}
