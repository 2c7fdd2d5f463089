//! The process's connections: idle runtimes, each with connections of its own, and what all of them share.
//!
//! Whoever waits for the network takes an [`IoRuntime`], drives it in its own thread, and gives it back: so a byte is
//! received, decrypted and copied to where it belongs by one thread, while it is in that core's cache, and the network
//! has no threads. (Over loopback, beside object_store's own stream with as many requests: 0.81 of its CPU time this way,
//! 1.09 where one runtime's threads served all sockets and woke the readers.) What runtimes share is what is expensive:
//! certificates and TLS sessions.
//!
//! Nobody drives a runtime that nobody waits in, so its connections are not kept for long: those that opening a
//! checkpoint made serve its load, and the end of the last load that runs closes what is left. A request that was not
//! read to its end takes its runtime with it.
//!
//! Made at the first remote use, never at import. A child after `fork` must not write to its parent's connections, so it
//! leaves them alone and makes its own.

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};

use super::client_key::ClientKey;
use super::tls::{self, CaBundle};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::PerProcess;

/// How long an unused runtime is worth anything: servers close idle connections after 5 to 60 seconds.
const KEPT: Duration = Duration::from_secs(20);

/// What one process has of the network. Lives as long as the process.
#[derive(Default)]
pub(crate) struct ConnectionPool {
    idle: Mutex<Vec<(Instant, IoRuntime)>>,
    /// Loads that have not ended.
    loads: AtomicUsize,
    /// By the file that certificates come from, if it is not the system's.
    tls: Mutex<HashMap<Option<CaBundle>, rustls::ClientConfig>>,
}

static POOL: PerProcess<ConnectionPool> = PerProcess::new();

type Clients = Arc<Mutex<HashMap<ClientKey, reqwest::Client>>>;

tokio::task_local! {
    /// The clients of the runtime that drives the task.
    static CLIENTS: Clients;
}

impl ConnectionPool {
    /// This process's.
    pub(crate) fn global() -> &'static Self {
        POOL.get_or_init(Self::default)
    }

    /// A runtime that nobody else has.
    ///
    /// # Errors
    /// `Memory` where there is none, and none can be made.
    pub(crate) fn take(&self) -> Result<IoRuntime> {
        let mut idle = lock(&self.idle);
        idle.retain(|(since, _)| since.elapsed() < KEPT);
        match idle.pop() {
            Some((_, runtime)) => Ok(runtime),
            None => {
                drop(idle);
                IoRuntime::new()
            }
        }
    }

    /// Takes back a runtime in which nothing is under way.
    pub(crate) fn keep(&self, runtime: IoRuntime) {
        lock(&self.idle).push((Instant::now(), runtime));
    }

    /// Counts a load.
    pub(crate) fn begin_load(&self) {
        self.loads.fetch_add(1, Ordering::Relaxed);
    }

    /// A load has ended. Closes the connections that nobody uses now, unless another load runs, which would have to make
    /// them again; that one closes those that have been idle for long whenever it takes a runtime, and the rest at its end.
    pub(crate) fn end_load(&self) {
        if self.loads.fetch_sub(1, Ordering::Relaxed) == 1 {
            let idle = std::mem::take(&mut *lock(&self.idle));
            drop(idle);
        }
    }

    /// The settings of TLS for connections that trust these certificates, which are read at the first.
    pub(crate) fn tls(&self, bundle: &Option<CaBundle>) -> Result<rustls::ClientConfig> {
        // Held meanwhile: of many runtimes that begin together, one reads the certificates.
        let mut known = lock(&self.tls);
        if let Some(config) = known.get(bundle) {
            return Ok(config.clone());
        }
        let config = tls::tls(bundle.as_ref())?;
        known.insert(bundle.clone(), config.clone());
        Ok(config)
    }
}

/// A runtime of one thread. Its connections end with it.
pub(crate) struct IoRuntime {
    runtime: Runtime,
    clients: Clients,
}

impl IoRuntime {
    fn new() -> Result<Self> {
        let runtime = Builder::new_current_thread()
            // Threads that ask for the addresses of names.
            .max_blocking_threads(1)
            .thread_keep_alive(Duration::from_millis(1))
            .thread_name("penstock-names")
            .enable_all()
            .build()
            .map_err(|error| {
                Error::new(
                    ErrorKind::Memory,
                    format!("a queue for network events could not be made: {error}"),
                )
                .remedy("Raise the limit of open files (ulimit -n)")
            })?;
        Ok(Self { runtime, clients: Clients::default() })
    }

    /// Does `work` in this thread.
    pub(crate) fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(CLIENTS.scope(Arc::clone(&self.clients), work))
    }

    /// Ends its connections. A thread that still asks for a name is not waited for.
    pub(crate) fn close(self) {
        self.runtime.shutdown_background();
    }
}

/// The client for `key` of the runtime that drives the task, made by `make` at its first request.
pub(crate) fn client(
    key: &ClientKey,
    make: impl FnOnce() -> Result<reqwest::Client>,
) -> Result<reqwest::Client> {
    // Where none drives it, nothing is sent with it.
    let clients = CLIENTS.try_with(Arc::clone).unwrap_or_default();
    let mut clients = lock(&clients);
    match clients.get(key) {
        Some(client) => Ok(client.clone()),
        None => make().inspect(|client| drop(clients.insert(key.clone(), client.clone()))),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half done under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_load_leaves_connections_to_the_loads_that_run() {
        let pool = ConnectionPool::default();
        let idle = || lock(&pool.idle).len();
        pool.begin_load();
        pool.begin_load();
        pool.keep(IoRuntime::new().unwrap());
        pool.end_load();
        assert_eq!(idle(), 1);
        let runtime = pool.take().unwrap();
        assert_eq!(idle(), 0);
        pool.keep(runtime);
        pool.end_load();
        assert_eq!(idle(), 0);
    }
}
