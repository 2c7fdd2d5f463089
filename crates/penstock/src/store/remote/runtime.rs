//! The process's share of the network: one runtime, its threads, its connections.
//!
//! Made at the first remote use, never at import. It is keyed by the process: a child after `fork` has none of its
//! parent's threads and must not write to its parent's connections, so it leaves both alone and makes its own. No lock
//! is held while a process could be forked away from it: what there is hangs on one atomic pointer.
//!
//! Worker threads move bytes from sockets and decrypt them; the pipeline's readers wait in [`Net::block_on`], and copy
//! what has come to where it belongs themselves. That costs no more than spawning tasks and waiting for their messages
//! (0.41 and 0.44 CPU-seconds per GB, ranges of 8 MiB over loopback), and memory is borrowed by the thread that waits,
//! not by a task that might outlive it. A runtime for each reader costs a tenth less (0.37), but every load would make
//! its connections anew.

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::runtime::{Builder, Runtime};

use super::backend::{Backend, BackendKey};
use super::transport::ClientKey;
use crate::error::{Error, ErrorKind, Result};

/// What one process has of the network. Lives as long as the process.
pub(super) struct Net {
    process: u32,
    runtime: Runtime,
    clients: Mutex<HashMap<ClientKey, reqwest::Client>>,
    backends: Mutex<HashMap<BackendKey, Arc<Backend>>>,
}

static NET: AtomicPtr<Net> = AtomicPtr::new(std::ptr::null_mut());

impl Net {
    /// This process's.
    ///
    /// # Errors
    /// `Memory` where its threads cannot be started.
    #[allow(unsafe_code)]
    pub(super) fn of_process() -> Result<&'static Self> {
        let process = std::process::id();
        let there = NET.load(Ordering::Acquire);
        // SAFETY: what is stored here came from `Box::leak` below and is never freed.
        if let Some(net) = unsafe { there.as_ref() }
            && net.process == process
        {
            return Ok(net);
        }
        let made = Box::new(Self {
            process,
            runtime: start()?,
            clients: Mutex::default(),
            backends: Mutex::default(),
        });
        let made = Box::into_raw(made);
        match NET.compare_exchange(there, made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: just leaked, and never freed from here on.
            Ok(_) => Ok(unsafe { &*made }),
            Err(other) => {
                // Another thread was first. It runs in this process, so what it made is this process's.
                // SAFETY: `made` was not given to anyone; `other` came from `Box::into_raw` here and is never freed.
                let (made, other) = unsafe { (Box::from_raw(made), &*other) };
                made.runtime.shutdown_background();
                Ok(other)
            }
        }
    }

    /// Runs `work` in this thread, which waits; sockets are served by the runtime's own.
    pub(super) fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// The client for `key`, made by `make` at the first request.
    pub(super) fn client(
        &self,
        key: &ClientKey,
        make: impl FnOnce() -> Result<reqwest::Client>,
    ) -> Result<reqwest::Client> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(key) {
            return Ok(client.clone());
        }
        let client = make()?;
        clients.insert(key.clone(), client.clone());
        Ok(client)
    }

    /// The backend for `key`, made by `make` if there is none.
    pub(super) fn backend(
        &self,
        key: BackendKey,
        make: impl FnOnce() -> Result<Backend>,
    ) -> Result<Arc<Backend>> {
        let there = self.backends.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(backend) = there {
            return Ok(backend);
        }
        // Making one may read files and wait for servers, so the lock is not held meanwhile.
        let made = Arc::new(make()?);
        let mut backends = self.backends.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(backends.entry(key).or_insert(made)))
    }

    /// Puts another backend in its place.
    pub(super) fn replace_backend(&self, key: BackendKey, backend: Arc<Backend>) {
        self.backends.lock().unwrap_or_else(PoisonError::into_inner).insert(key, backend);
    }
}

fn start() -> Result<Runtime> {
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZeroUsize::get);
    Builder::new_multi_thread()
        // Half the cores: the other half copies. A core moves 2 to 3 GB/s from its sockets, half that with TLS.
        .worker_threads((cores / 2).clamp(2, 16))
        .max_blocking_threads(4)
        .thread_name("net-penstock")
        .enable_all()
        .build()
        .map_err(|error| {
            Error::new(ErrorKind::Memory, format!("the network's threads could not be started: {error}"))
                .remedy("Raise the limit of processes (ulimit -u, cgroup pids.max)")
        })
}
