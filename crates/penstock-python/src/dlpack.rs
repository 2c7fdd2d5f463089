//! DLPack capsules: memory that a consumer shares, of the host or of a GPU.
//!
//! Promises that the owner of the memory lives until the consumer is done, who may say so without the GIL, from any thread.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use penstock::checkpoint::Dtype;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

// The structures of dlpack.h, version 0.8 (the unversioned ones, which every consumer takes).

#[repr(C)]
#[derive(Clone, Copy)]
pub struct DlDataType {
    code: u8,
    bits: u8,
    contexts: u16,
}

impl DlDataType {
    /// `uint8`.
    pub const BYTE: Self = Self { code: 1, bits: 8, contexts: 1 };
}

/// Where memory is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DlDevice {
    kind: i32,
    id: i32,
}

impl DlDevice {
    /// The host's memory.
    pub const CPU: Self = Self { kind: 1, id: 0 };

    /// Memory of the GPU with that ordinal.
    pub fn cuda(id: i32) -> Self {
        Self { kind: 2, id }
    }

    /// As the protocol's `__dlpack_device__` says it.
    pub fn pair(self) -> (i32, i32) {
        (self.kind, self.id)
    }
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
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
    _owner: Arc<dyn Any + Send + Sync>,
    _shape: Box<[i64]>,
    _strides: Box<[i64]>,
}

/// DLPack's word for a dtype, if it has one.
pub fn dlpack_dtype(dtype: Dtype) -> Option<DlDataType> {
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

/// A capsule of a contiguous, row-major tensor at `address`. `owner` keeps that memory, and goes when the consumer is done.
pub fn capsule(
    py: Python<'_>,
    address: *mut c_void,
    device: DlDevice,
    dtype: DlDataType,
    shape: &[u64],
    owner: Arc<dyn Any + Send + Sync>,
) -> PyResult<Py<PyAny>> {
    let too_large = |_| PyBufferError::new_err("the tensor is too large for DLPack");
    let mut shape: Box<[i64]> =
        shape.iter().map(|n| i64::try_from(*n)).collect::<Result<_, _>>().map_err(too_large)?;
    let mut strides = vec![1i64; shape.len()].into_boxed_slice();
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1].saturating_mul(shape[i + 1]);
    }
    let seen = DlManagedTensor {
        tensor: DlTensor {
            data: address,
            device,
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
