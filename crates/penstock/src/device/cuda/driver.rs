//! The CUDA driver: one table of functions, looked up once, each call's answer turned into an error that says more
//! than a number.

use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::ops::Deref;

use crate::error::{Error, ErrorKind, Result};
use crate::memory::PerProcess;

pub(super) type Code = c_int;

/// `CUDA_ERROR_NOT_READY`: an event that has not happened yet. Not a failure.
const NOT_READY: Code = 600;
const OUT_OF_MEMORY: Code = 2;
const NOT_INITIALIZED: Code = 3;
const NO_DEVICE: Code = 100;

/// `CU_MEMHOSTREGISTER_PORTABLE`.
const REGISTER_PORTABLE: c_uint = 1;
/// `CU_STREAM_NON_BLOCKING`: no synchronisation with the default stream.
const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const EVENT_NO_TIMING: c_uint = 2;

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident),*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(transparent)]
        pub(super) struct $name(*mut c_void);

        // SAFETY: an opaque handle that the driver accepts from any thread; it is never dereferenced here.
        unsafe impl Send for $name {}
        // SAFETY: as for `Send`.
        unsafe impl Sync for $name {}

        impl $name {
            /// The handle as frameworks write it.
            #[allow(dead_code)]
            pub(super) fn from_raw(raw: u64) -> Self {
                Self(raw as usize as *mut c_void)
            }
            /// See [`Self::from_raw`].
            #[allow(dead_code)]
            pub(super) fn to_raw(self) -> u64 {
                self.0 as usize as u64
            }
        }
    )*};
}

handles! {
    /// `CUcontext`.
    Context,
    /// `CUstream`.
    StreamHandle,
    /// `CUevent`.
    EventHandle
}

macro_rules! functions {
    ($(#[$doc:meta])* $name:ident { $($field:ident = $symbol:literal ( $($arg:ty),* );)* }) => {
        $(#[$doc])*
        pub(super) struct $name {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) -> Code,)*
        }

        impl $name {
            fn look_up(library: &Library) -> Result<Self> {
                $(
                    // SAFETY: the signature is the one of cuda.h for this versioned symbol.
                    let $field = *unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> Code>($symbol) }
                        .map_err(|error| {
                            Error::new(ErrorKind::Device, format!("the CUDA driver lacks a function: {error}"))
                                .remedy("Update the NVIDIA driver")
                        })?;
                )*
                Ok(Self { $($field,)* })
            }
        }
    };
}

functions! {
    /// The functions of the driver that Penstock cannot do without.
    Functions {
    init = b"cuInit\0" (c_uint);
    get_error_name = b"cuGetErrorName\0" (Code, *mut *const c_char);
    get_error_string = b"cuGetErrorString\0" (Code, *mut *const c_char);
    device_get = b"cuDeviceGet\0" (*mut c_int, c_int);
    device_get_count = b"cuDeviceGetCount\0" (*mut c_int);
    primary_ctx_retain = b"cuDevicePrimaryCtxRetain\0" (*mut Context, c_int);
    ctx_push = b"cuCtxPushCurrent_v2\0" (Context);
    ctx_pop = b"cuCtxPopCurrent_v2\0" (*mut Context);
    ctx_set = b"cuCtxSetCurrent\0" (Context);
    mem_host_register = b"cuMemHostRegister_v2\0" (*mut c_void, usize, c_uint);
    mem_host_unregister = b"cuMemHostUnregister\0" (*mut c_void);
    memcpy_htod_async = b"cuMemcpyHtoDAsync_v2\0" (u64, *const c_void, usize, StreamHandle);
    memcpy_dtoh_async = b"cuMemcpyDtoHAsync_v2\0" (*mut c_void, u64, usize, StreamHandle);
    stream_create = b"cuStreamCreate\0" (*mut StreamHandle, c_uint);
    stream_destroy = b"cuStreamDestroy_v2\0" (StreamHandle);
    stream_synchronize = b"cuStreamSynchronize\0" (StreamHandle);
    stream_wait_event = b"cuStreamWaitEvent\0" (StreamHandle, EventHandle, c_uint);
    event_create = b"cuEventCreate\0" (*mut EventHandle, c_uint);
    event_destroy = b"cuEventDestroy_v2\0" (EventHandle);
    event_record = b"cuEventRecord\0" (EventHandle, StreamHandle);
    event_query = b"cuEventQuery\0" (EventHandle);
    event_synchronize = b"cuEventSynchronize\0" (EventHandle);
    }
}

functions! {
    /// Virtual memory management, and what it needs. Drivers before CUDA 10.2 do not have it.
    VirtualFunctions {
    device_get_attribute = b"cuDeviceGetAttribute\0" (*mut c_int, c_int, c_int);
    thread_exchange_capture_mode = b"cuThreadExchangeStreamCaptureMode\0" (*mut c_int);
    ctx_synchronize = b"cuCtxSynchronize\0" ();
    mem_get_info = b"cuMemGetInfo_v2\0" (*mut usize, *mut usize);
    mem_get_granularity = b"cuMemGetAllocationGranularity\0" (*mut usize, *const AllocationProperties, c_int);
    mem_address_reserve = b"cuMemAddressReserve\0" (*mut u64, usize, usize, u64, c_ulonglong);
    mem_address_free = b"cuMemAddressFree\0" (u64, usize);
    mem_create = b"cuMemCreate\0" (*mut c_ulonglong, usize, *const AllocationProperties, c_ulonglong);
    mem_release = b"cuMemRelease\0" (c_ulonglong);
    mem_map = b"cuMemMap\0" (u64, usize, usize, c_ulonglong, c_ulonglong);
    mem_unmap = b"cuMemUnmap\0" (u64, usize);
    mem_set_access = b"cuMemSetAccess\0" (u64, usize, *const AccessDescription, usize);
    memset_async = b"cuMemsetD8Async\0" (u64, c_uchar, usize, StreamHandle);
    }
}

/// `CUmemLocation`.
#[repr(C)]
pub(super) struct Location {
    pub(super) kind: c_int,
    pub(super) id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
pub(super) struct AllocationProperties {
    pub(super) kind: c_int,
    pub(super) handle_types: c_int,
    pub(super) location: Location,
    pub(super) win32_handle_metadata: *mut c_void,
    /// `allocFlags`: compression, RDMA, usage, reserved. All zero.
    pub(super) flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub(super) struct AccessDescription {
    pub(super) location: Location,
    pub(super) flags: c_int,
}

// As the C compiler lays out those of cuda.h, CUDA 10.2 to 13.
const _: () = {
    assert!(size_of::<Location>() == 8);
    assert!(size_of::<AllocationProperties>() == 32);
    assert!(std::mem::offset_of!(AllocationProperties, location) == 8);
    assert!(std::mem::offset_of!(AllocationProperties, win32_handle_metadata) == 16);
    assert!(std::mem::offset_of!(AllocationProperties, flags) == 24);
    assert!(size_of::<AccessDescription>() == 12);
    assert!(std::mem::offset_of!(AccessDescription, flags) == 8);
};

/// The driver's library, and its functions.
pub(super) struct Driver {
    functions: Functions,
    virtual_memory: Option<VirtualFunctions>,
    _library: Library,
}

impl Deref for Driver {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

impl Driver {
    /// The process's driver, opened at the first call.
    ///
    /// # Errors
    /// `Device` where there is none, it lacks a function, or it cannot be initialised.
    pub(super) fn load() -> Result<&'static Self> {
        // Of each process, so that no child waits for a thread of its parent's.
        static DRIVER: PerProcess<Driver> = PerProcess::new();
        let driver = DRIVER.get_or_try_init(|| {
            // SAFETY: loading the driver runs its initialisers, which is what every CUDA program does.
            let library = unsafe { Library::new("libcuda.so.1") }.map_err(|error| {
                Error::new(ErrorKind::Device, format!("there is no NVIDIA driver on this machine: {error}"))
                    .remedy("Load to device=\"cpu\", or run where libcuda.so.1 can be found")
            })?;
            let (functions, virtual_memory) =
                (Functions::look_up(&library)?, VirtualFunctions::look_up(&library));
            Ok(Driver { functions, virtual_memory: virtual_memory.ok(), _library: library })
        })?;
        // Every time: cheap once done, and in a forked child it is what says that CUDA cannot be used there.
        // SAFETY: cuInit may be called from any thread at any time; its flags must be zero.
        driver.check("initialising CUDA", unsafe { (driver.init)(0) })?;
        Ok(driver)
    }

    /// Turns a driver's answer into a result.
    pub(super) fn check(&self, action: &str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let text = |function: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: the function writes a pointer to a static string, or null for a code it does not know.
            let found = unsafe { function(code, &raw mut text) } == 0 && !text.is_null();
            if !found {
                return String::new();
            }
            // SAFETY: not null, so a static nul-terminated string of the driver.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let kind = if code == OUT_OF_MEMORY { ErrorKind::Memory } else { ErrorKind::Device };
        let cause = format!(
            "{action} failed: {} ({code}): {}",
            text(self.get_error_name),
            text(self.get_error_string)
        );
        let error = Error::new(kind, cause);
        Err(match code {
            OUT_OF_MEMORY => error.remedy("Free GPU or pinned memory, or raise RLIMIT_MEMLOCK (ulimit -l)"),
            NOT_INITIALIZED => error.remedy(
                "CUDA cannot be used in a child of a process that already used it: start workers with \"spawn\"",
            ),
            NO_DEVICE => error.remedy("Load to device=\"cpu\", or check CUDA_VISIBLE_DEVICES"),
            _ => error,
        })
    }

    /// Runs `body` with `context` current on this thread, which gets its own context back afterwards.
    pub(super) fn enter<T>(&self, context: Context, body: impl FnOnce() -> Result<T>) -> Result<T> {
        // SAFETY: a context retained by `primary_context`, which is never released.
        self.check("making the GPU current", unsafe { (self.ctx_push)(context) })?;
        let done = body();
        let mut popped = Context(std::ptr::null_mut());
        // SAFETY: pops what was pushed above.
        unsafe { (self.ctx_pop)(&raw mut popped) };
        done
    }

    /// Makes `context` current on this thread for good: for threads of our own. The CUDA runtime, and so torch, takes a
    /// thread's current context for its current device.
    pub(super) fn make_current(&self, context: Context) -> Result<()> {
        // SAFETY: as in `enter`.
        self.check("making the GPU current", unsafe { (self.ctx_set)(context) })
    }

    pub(super) fn device_count(&self) -> Result<i32> {
        let mut count = 0;
        // SAFETY: writes one int.
        self.check("counting GPUs", unsafe { (self.device_get_count)(&raw mut count) })?;
        Ok(count)
    }

    /// Virtual memory management, where the driver has it.
    pub(super) fn virtual_memory(&self) -> Option<&VirtualFunctions> {
        self.virtual_memory.as_ref()
    }

    /// The driver's number of a GPU.
    pub(super) fn device(&self, ordinal: i32) -> Result<c_int> {
        let mut device = 0;
        // SAFETY: writes one int.
        self.check("finding the GPU", unsafe { (self.device_get)(&raw mut device, ordinal) })?;
        Ok(device)
    }

    pub(super) fn primary_context(&self, ordinal: i32) -> Result<Context> {
        let (device, mut context) = (self.device(ordinal)?, Context(std::ptr::null_mut()));
        // SAFETY: writes one handle; `device` was just obtained.
        self.check("opening the GPU", unsafe { (self.primary_ctx_retain)(&raw mut context, device) })?;
        Ok(context)
    }

    /// # Safety
    /// The memory must stay mapped until it is unregistered. A context must be current.
    pub(super) unsafe fn host_register(&self, ptr: *mut u8, len: usize) -> Result<()> {
        // SAFETY: as the caller promises.
        let code = unsafe { (self.mem_host_register)(ptr.cast(), len, REGISTER_PORTABLE) };
        self.check("pinning staging memory", code)
    }

    /// # Safety
    /// `ptr` must have been registered and have no copy in flight. A context must be current.
    pub(super) unsafe fn host_unregister(&self, ptr: *mut u8) -> Result<()> {
        // SAFETY: as the caller promises.
        self.check("unpinning staging memory", unsafe { (self.mem_host_unregister)(ptr.cast()) })
    }

    /// # Safety
    /// See [`CopyStream::copy`](crate::device::CopyStream::copy). The stream's context must be current.
    pub(super) unsafe fn copy(
        &self,
        to: u64,
        from: *const u8,
        len: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        // SAFETY: as the caller promises.
        self.check("copying to the GPU", unsafe { (self.memcpy_htod_async)(to, from.cast(), len, stream) })
    }

    /// # Safety
    /// See [`CopyStream::read_back`](crate::device::CopyStream::read_back). The stream's context must be current.
    pub(super) unsafe fn read_back(
        &self,
        to: *mut u8,
        from: u64,
        len: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        // SAFETY: as the caller promises.
        self.check("copying from the GPU", unsafe { (self.memcpy_dtoh_async)(to.cast(), from, len, stream) })
    }

    pub(super) fn stream_create(&self) -> Result<StreamHandle> {
        let mut stream = StreamHandle(std::ptr::null_mut());
        // SAFETY: writes one handle.
        let code = unsafe { (self.stream_create)(&raw mut stream, STREAM_NON_BLOCKING) };
        self.check("creating a stream", code)?;
        Ok(stream)
    }

    pub(super) fn stream_synchronize(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: a live stream of the current context.
        self.check("waiting for copies to the GPU", unsafe { (self.stream_synchronize)(stream) })
    }

    pub(super) fn stream_destroy(&self, stream: StreamHandle) {
        // SAFETY: a live stream, given up by its owner.
        unsafe { (self.stream_destroy)(stream) };
    }

    pub(super) fn stream_wait(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        // SAFETY: both are alive; no flags.
        let code = unsafe { (self.stream_wait_event)(stream, event, 0) };
        self.check("waiting for the consumer's stream", code)
    }

    pub(super) fn event_create(&self) -> Result<EventHandle> {
        let mut event = EventHandle(std::ptr::null_mut());
        // SAFETY: writes one handle.
        let code = unsafe { (self.event_create)(&raw mut event, EVENT_NO_TIMING) };
        self.check("creating an event", code)?;
        Ok(event)
    }

    pub(super) fn event_destroy(&self, event: EventHandle) {
        // SAFETY: a live event, given up by its owner.
        unsafe { (self.event_destroy)(event) };
    }

    pub(super) fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        // SAFETY: a live event; the stream is alive or the default stream.
        self.check("recording an event", unsafe { (self.event_record)(event, stream) })
    }

    pub(super) fn event_done(&self, event: EventHandle) -> Result<bool> {
        // SAFETY: a live event.
        match unsafe { (self.event_query)(event) } {
            NOT_READY => Ok(false),
            code => self.check("copying to the GPU", code).map(|()| true),
        }
    }

    pub(super) fn event_wait(&self, event: EventHandle) -> Result<()> {
        // SAFETY: a live event.
        self.check("copying to the GPU", unsafe { (self.event_synchronize)(event) })
    }
}
