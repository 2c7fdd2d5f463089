//! What the requests of one load share: its failures are counted together, its latency is learnt together, and they are
//! stopped together. Opening a checkpoint is a context of its own.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;

use super::connections::ConnectionPool;
use crate::error::{Error, ErrorKind, Result};
use crate::store::remote::request::latency::LatencyTracker;
use crate::store::remote::request::outcome::Stop;
use crate::store::remote::request::retry::Budget;

/// What the requests of one load share.
#[derive(Default)]
pub(crate) struct LoadContext {
    pub(crate) budget: Budget,
    pub(crate) latency: LatencyTracker,
    interrupted: watch::Sender<bool>,
    /// Whether it was logged that a server is waited for.
    warned: AtomicBool,
    /// Whether it is a load, at whose end connections that no other load can use are closed.
    load: Option<&'static ConnectionPool>,
}

impl LoadContext {
    pub(crate) fn of_load() -> Self {
        let pool = ConnectionPool::global();
        pool.begin_load();
        let mut context = Self::default();
        context.load = Some(pool);
        context
    }

    /// Whether nobody has been told yet that a server is waited for.
    pub(crate) fn is_first_warning(&self) -> bool {
        !self.warned.swap(true, Ordering::Relaxed)
    }

    /// Ends what waits in [`LoadContext::block_on`], now and from now on.
    pub(crate) fn interrupt(&self) {
        self.interrupted.send_replace(true);
    }

    /// Does `work` in this thread. `whole` says of what it came to whether every answer was read to its end.
    ///
    /// # Errors
    /// `Cancelled` after [`LoadContext::interrupt`], `Memory` where the process may open no more files.
    pub(crate) fn block_on<T>(
        &self,
        work: impl Future<Output = T>,
        whole: impl FnOnce(&T) -> bool,
    ) -> Result<T> {
        let pool = ConnectionPool::global();
        let runtime = pool.take()?;
        let mut interrupted = self.interrupted.subscribe();
        let done = runtime.block_on(async {
            tokio::select! {
                biased;
                _ = interrupted.wait_for(|interrupted| *interrupted) => None,
                done = work => Some(done),
            }
        });
        match done.as_ref().is_some_and(whole) {
            true => pool.keep(runtime),
            false => runtime.close(),
        }
        done.ok_or_else(|| Error::new(ErrorKind::Cancelled, "the load was stopped"))
    }

    /// As [`LoadContext::block_on`], for work that may be stopped short.
    pub(crate) fn run<T>(&self, work: impl Future<Output = Result<T, Stop>>) -> Result<T, Stop> {
        self.block_on(work, Result::is_ok).map_err(Stop::Tell)?
    }
}

impl Drop for LoadContext {
    fn drop(&mut self) {
        // In a child after `fork`, the load is its parent's.
        if let Some(pool) = self.load.filter(|pool| std::ptr::eq(*pool, ConnectionPool::global())) {
            pool.end_load();
        }
    }
}
