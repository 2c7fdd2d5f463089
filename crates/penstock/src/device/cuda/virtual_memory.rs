//! CUDA's virtual memory management: `cuMemAddressReserve`, `cuMemCreate`, `cuMemMap` and their opposites.
//!
//! Every call has the device's context current, and heeds no graph capture: a thread that captures a graph is not
//! disturbed by memory that is mapped elsewhere meanwhile, while by default the driver would end its capture.

use std::ffi::c_int;

use super::driver::{
    AccessDescription, AllocationProperties, Code, Context, Driver, Location, StreamHandle, VirtualFunctions,
};
use crate::device::Space;
use crate::error::{Error, ErrorKind, Result};

/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`.
const SUPPORTED: c_int = 102;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: c_int = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: c_int = 1;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
const MINIMUM: c_int = 0;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: c_int = 3;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_int = 2;

pub(super) struct CudaSpace {
    name: String,
    driver: &'static Driver,
    functions: &'static VirtualFunctions,
    context: Context,
    device: c_int,
    granularity: usize,
}

impl CudaSpace {
    pub(super) fn new(name: &str, driver: &'static Driver, context: Context, ordinal: i32) -> Result<Self> {
        let functions = functions(driver)?;
        let (device, mut supported) = (driver.device(ordinal)?, 0);
        // SAFETY: writes one int.
        let code = unsafe { (functions.device_get_attribute)(&raw mut supported, SUPPORTED, device) };
        driver.check("asking for virtual memory management", code)?;
        if supported == 0 {
            return Err(Error::new(ErrorKind::Device, "the GPU has no virtual memory management"));
        }
        let mut made = Self { name: name.to_owned(), driver, functions, context, device, granularity: 0 };
        let (properties, mut granularity) = (made.properties(), 0);
        made.call("asking for the granularity of memory", || {
            // SAFETY: writes one size; the structure is the one of cuda.h.
            unsafe { (functions.mem_get_granularity)(&raw mut granularity, &raw const properties, MINIMUM) }
        })?;
        if !granularity.is_power_of_two() {
            let cause =
                format!("the driver maps memory in units of {granularity} bytes, which is no power of two");
            return Err(Error::new(ErrorKind::Device, cause));
        }
        made.granularity = granularity;
        Ok(made)
    }

    fn location(&self) -> Location {
        Location { kind: ON_DEVICE, id: self.device }
    }

    fn properties(&self) -> AllocationProperties {
        AllocationProperties {
            kind: PINNED,
            handle_types: 0,
            location: self.location(),
            win32_handle_metadata: std::ptr::null_mut(),
            flags: [0; 8],
        }
    }

    /// Runs `body` with the context current, heeding no capture.
    fn within(&self, body: impl FnOnce() -> Result<()>) -> Result<()> {
        self.driver.enter(self.context, || {
            let before = exchange_capture_mode(self.driver, RELAXED)?;
            let done = body();
            // What the driver has done is done, and it refuses nothing here that it did not above.
            let _ = exchange_capture_mode(self.driver, before);
            done
        })
    }

    fn call(&self, action: &str, call: impl FnOnce() -> Code) -> Result<()> {
        self.within(|| self.driver.check(action, call()))
    }

    /// Makes a call on a stream of its own, and waits for it.
    fn queue(&self, action: &str, call: impl FnOnce(StreamHandle) -> Code) -> Result<()> {
        self.within(|| {
            let stream = self.driver.stream_create()?;
            let queued = self.driver.check(action, call(stream));
            let done = self.driver.stream_synchronize(stream);
            self.driver.stream_destroy(stream);
            queued.and(done)
        })
    }
}

fn functions(driver: &'static Driver) -> Result<&'static VirtualFunctions> {
    driver.virtual_memory().ok_or_else(|| {
        Error::new(ErrorKind::Device, "the CUDA driver has no virtual memory management")
            .remedy("Update the NVIDIA driver")
    })
}

pub(super) fn exchange_capture_mode(driver: &'static Driver, mode: c_int) -> Result<c_int> {
    let mut mode = mode;
    // SAFETY: reads and writes one int, an enumeration of C.
    let code = unsafe { (functions(driver)?.thread_exchange_capture_mode)(&raw mut mode) };
    driver.check("setting the thread's capture mode", code)?;
    Ok(mode)
}

impl Space for CudaSpace {
    fn name(&self) -> &str {
        &self.name
    }

    fn granularity(&self) -> usize {
        self.granularity
    }

    fn free_bytes(&self) -> Result<usize> {
        let (mut free, mut total) = (0, 0);
        self.call("asking for free memory", || {
            // SAFETY: writes two sizes.
            unsafe { (self.functions.mem_get_info)(&raw mut free, &raw mut total) }
        })?;
        Ok(free)
    }

    fn reserve(&self, len: usize) -> Result<u64> {
        let mut start = 0;
        self.call("reserving addresses", || {
            // SAFETY: writes one address; any alignment and address will do, and there are no flags.
            unsafe { (self.functions.mem_address_reserve)(&raw mut start, len, 0, 0, 0) }
        })?;
        Ok(start)
    }

    unsafe fn unreserve(&self, start: u64, len: usize) -> Result<()> {
        // SAFETY: as the caller promises.
        self.call("freeing addresses", || unsafe { (self.functions.mem_address_free)(start, len) })
    }

    fn create(&self, len: usize) -> Result<u64> {
        let (properties, mut chunk) = (self.properties(), 0);
        self.call("allocating device memory", || {
            // SAFETY: writes one handle; the structure is the one of cuda.h, and there are no flags.
            unsafe { (self.functions.mem_create)(&raw mut chunk, len, &raw const properties, 0) }
        })?;
        Ok(chunk)
    }

    unsafe fn release(&self, chunk: u64) -> Result<()> {
        // SAFETY: as the caller promises.
        self.call("freeing device memory", || unsafe { (self.functions.mem_release)(chunk) })
    }

    unsafe fn map(&self, start: u64, len: usize, chunk: u64) -> Result<()> {
        // SAFETY: as the caller promises; offset and flags must be zero.
        self.call("mapping device memory", || unsafe { (self.functions.mem_map)(start, len, 0, chunk, 0) })
    }

    unsafe fn allow(&self, start: u64, len: usize) -> Result<()> {
        let access = AccessDescription { location: self.location(), flags: READ_WRITE };
        self.call("giving access to device memory", || {
            // SAFETY: as the caller promises; the structure is the one of cuda.h, and there is one.
            unsafe { (self.functions.mem_set_access)(start, len, &raw const access, 1) }
        })
    }

    unsafe fn unmap(&self, start: u64, len: usize) -> Result<()> {
        // SAFETY: as the caller promises.
        self.call("unmapping device memory", || unsafe { (self.functions.mem_unmap)(start, len) })
    }

    unsafe fn fill(&self, start: u64, len: usize, byte: u8) -> Result<()> {
        self.queue("filling device memory", |stream| {
            // SAFETY: as the caller promises; it is waited for.
            unsafe { (self.functions.memset_async)(start, byte, len, stream) }
        })
    }

    unsafe fn read(&self, start: u64, into: &mut [u8]) -> Result<()> {
        self.queue("reading device memory", |stream| {
            // SAFETY: as the caller promises; the host's side is borrowed until the copy has been waited for.
            unsafe { (self.driver.memcpy_dtoh_async)(into.as_mut_ptr().cast(), start, into.len(), stream) }
        })
    }

    fn synchronize(&self) -> Result<()> {
        // SAFETY: the context is current.
        self.call("waiting for the GPU", || unsafe { (self.functions.ctx_synchronize)() })
    }
}
