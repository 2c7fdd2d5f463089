//! NVIDIA GPUs, through the driver API opened at run time: no CUDA at build time, one build for every CUDA version.
//!
//! * `driver`: the library, its functions, its errors.
//! * `stream`: copies and events, and those that wait for the next load.
//!
//! The context is the device's primary one, which is the one torch uses; it is retained once and never released,
//! since the process's frameworks live in it. Only driver calls are made: a failed *runtime* call would leave an error
//! behind that torch reports later, somewhere else.

mod driver;
mod stream;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{CopyStream, Device, Fence};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{PerProcess, Pinning};

use driver::{Context, Driver, EventHandle, StreamHandle};
use stream::{CudaStream, Idle};

/// One GPU.
pub struct CudaDevice {
    name: String,
    driver: &'static Driver,
    context: Context,
    idle: Arc<Idle>,
}

/// GPUs by their ordinals.
type Devices = Mutex<Vec<(i32, Arc<CudaDevice>)>>;

/// Of each process: a forked child must neither use its parent's contexts nor wait for a thread of its parent's that was
/// opening a GPU.
static DEVICES: PerProcess<Devices> = PerProcess::new();

fn devices() -> MutexGuard<'static, Vec<(i32, Arc<CudaDevice>)>> {
    DEVICES.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

impl CudaDevice {
    /// The GPU with that ordinal, as CUDA numbers them (`CUDA_VISIBLE_DEVICES` included).
    ///
    /// # Errors
    /// `Device` where there is no driver, no such GPU, or this process was forked from one that used CUDA.
    pub fn open(ordinal: i32) -> Result<Arc<Self>> {
        let name = format!("cuda:{ordinal}");
        let mut devices = devices();
        if let Some((_, device)) = devices.iter().find(|(opened, _)| *opened == ordinal) {
            return Ok(Arc::clone(device));
        }
        let driver = Driver::load().map_err(|error| error.object(&name))?;
        let count = driver.device_count().map_err(|error| error.object(&name))?;
        if ordinal < 0 || ordinal >= count {
            return Err(Error::new(
                ErrorKind::Device,
                format!("there is no such GPU: this process sees {count}"),
            )
            .object(name)
            .remedy("Check the device's number and CUDA_VISIBLE_DEVICES"));
        }
        let context = driver.primary_context(ordinal).map_err(|error| error.object(&name))?;
        let device = Arc::new(Self { name, driver, context, idle: Arc::default() });
        devices.push((ordinal, Arc::clone(&device)));
        Ok(device)
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn pinning(&self) -> Arc<dyn Pinning> {
        Arc::new(CudaPinning { driver: self.driver, context: self.context })
    }

    fn bind_thread(&self) -> Result<()> {
        self.driver.make_current(self.context).map_err(|error| error.on(&self.name))
    }

    fn stream(&self) -> Result<Box<dyn CopyStream>> {
        let stream = CudaStream::new(&self.name, self.driver, self.context, Arc::clone(&self.idle));
        Ok(Box::new(stream.map_err(|error| error.on(&self.name))?))
    }

    fn fence(&self, handle: u64) -> Result<Arc<dyn Fence>> {
        self.driver
            .enter(self.context, || {
                let event = self.driver.event_create()?;
                let fence = CudaFence { driver: self.driver, context: self.context, event };
                self.driver.event_record(event, StreamHandle::from_raw(handle))?;
                Ok(Arc::new(fence) as Arc<dyn Fence>)
            })
            .map_err(|error: Error| error.on(&self.name))
    }
}

struct CudaFence {
    driver: &'static Driver,
    context: Context,
    event: EventHandle,
}

impl Fence for CudaFence {
    fn handle(&self) -> u64 {
        self.event.to_raw()
    }
}

impl Drop for CudaFence {
    fn drop(&mut self) {
        // Streams that wait for the event keep waiting: the driver frees it when it has happened.
        let _ = self.driver.enter(self.context, || {
            self.driver.event_destroy(self.event);
            Ok(())
        });
    }
}

/// Registers memory with every CUDA context of the process (the "portable" flag).
struct CudaPinning {
    driver: &'static Driver,
    context: Context,
}

impl Pinning for CudaPinning {
    fn family(&self) -> &'static str {
        "cuda"
    }

    unsafe fn register(&self, ptr: *mut u8, len: usize) -> Result<()> {
        // SAFETY: the caller keeps the memory mapped until it is unregistered.
        self.driver.enter(self.context, || unsafe { self.driver.host_register(ptr, len) })
    }

    unsafe fn unregister(&self, ptr: *mut u8) {
        // SAFETY: the caller registered it and has no copy in flight.
        let _ = self.driver.enter(self.context, || unsafe { self.driver.host_unregister(ptr) });
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not fork")]
    fn a_child_does_not_wait_for_a_thread_of_its_parent_that_is_opening_a_gpu() {
        let held = devices();
        // SAFETY: the child ends without returning, and allocates, which the C library allows it.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // Whether there is a GPU does not matter here.
            drop(CudaDevice::open(0));
            // SAFETY: ends the process.
            unsafe { libc::_exit(0) };
        }
        drop(held);
        let (began, mut status) = (Instant::now(), -1);
        // SAFETY: our own child; writes one int.
        while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
            if began.elapsed() > Duration::from_secs(30) {
                // SAFETY: our own child.
                unsafe { libc::kill(child, libc::SIGKILL) };
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(status, 0, "the child failed or hung");
    }
}
