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

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use super::{CopyStream, Device, Fence};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Pinning, node_of_pci_device};

use driver::{Context, Driver, EventHandle, StreamHandle};
use stream::{CudaStream, Idle};

/// One GPU.
pub struct CudaDevice {
    name: String,
    driver: &'static Driver,
    context: Context,
    /// The memory node it is attached to, where the machine says so.
    node: Option<u32>,
    idle: Arc<Idle>,
}

static DEVICES: Mutex<Vec<(u32, i32, Arc<CudaDevice>)>> = Mutex::new(Vec::new());

impl CudaDevice {
    /// The GPU with that ordinal, as CUDA numbers them (`CUDA_VISIBLE_DEVICES` included).
    ///
    /// # Errors
    /// `Device` where there is no driver, no such GPU, or this process was forked from one that used CUDA.
    pub fn open(ordinal: i32) -> Result<Arc<Self>> {
        let name = format!("cuda:{ordinal}");
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        let pid = std::process::id();
        if let Some((_, _, device)) = devices.iter().find(|(p, o, _)| (*p, *o) == (pid, ordinal)) {
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
        let id = driver.pci_bus_id(ordinal).ok();
        let node = id.and_then(|id| node_of_pci_device(Path::new("/"), &id));
        let device = Arc::new(Self { name, driver, context, node, idle: Arc::default() });
        devices.push((pid, ordinal, Arc::clone(&device)));
        Ok(device)
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn pinning(&self) -> Arc<dyn Pinning> {
        Arc::new(CudaPinning { driver: self.driver, context: self.context, node: self.node })
    }

    fn stream(&self) -> Result<Box<dyn CopyStream>> {
        Ok(Box::new(CudaStream::new(self.driver, self.context, Arc::clone(&self.idle))?))
    }

    fn fence(&self, handle: u64) -> Result<Arc<dyn Fence>> {
        self.driver.enter(self.context, || {
            let event = self.driver.event_create()?;
            let fence = CudaFence { driver: self.driver, context: self.context, event };
            self.driver.event_record(event, StreamHandle::from_raw(handle))?;
            Ok(Arc::new(fence) as Arc<dyn Fence>)
        })
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
    node: Option<u32>,
}

impl Pinning for CudaPinning {
    fn family(&self) -> &'static str {
        "cuda"
    }

    fn numa_node(&self) -> Option<u32> {
        self.node
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
