//! What the requests of one load share: its failures are counted together, its pace is learnt together, and they are
//! stopped together. Opening a checkpoint is a course of its own.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use super::outcome::Stop;
use super::pace::Pace;
use super::retry::{Budget, Patience};
use super::runtime::Net;
use crate::error::{Error, ErrorKind, Result};

/// See the module.
#[derive(Default)]
pub(super) struct Course {
    pub(super) budget: Budget,
    pub(super) pace: Pace,
    interrupted: AtomicBool,
    interrupt: Notify,
    is_hasty: bool,
    /// Whether it was logged that a server is waited for.
    warned: AtomicBool,
    /// Whether it is a load, at whose end connections that no other load can use are closed.
    load: Option<&'static Net>,
}

impl Course {
    pub(super) fn of_load() -> Self {
        let net = Net::of_process();
        net.begin_load();
        let mut course = Self::default();
        course.load = Some(net);
        course
    }

    /// One that nobody can interrupt, so that outages are not waited for.
    pub(super) fn hasty() -> Self {
        let mut course = Self::default();
        course.is_hasty = true;
        course
    }

    /// How long this course waits, for a backend that waits so long.
    pub(super) fn patience(&self, patience: Patience) -> Patience {
        let outage = if self.is_hasty { Duration::ZERO } else { patience.outage };
        Patience { outage, ..patience }
    }

    /// Whether nobody has been told yet that a server is waited for.
    pub(super) fn is_first_warning(&self) -> bool {
        !self.warned.swap(true, Ordering::Relaxed)
    }

    /// Ends what waits in [`Course::block_on`], now and from now on.
    pub(super) fn interrupt(&self) {
        self.interrupted.store(true, Ordering::Release);
        self.interrupt.notify_waiters();
    }

    /// Does `work` in this thread. `whole` says of what it came to whether every answer was read to its end.
    ///
    /// # Errors
    /// `Cancelled` after [`Course::interrupt`], `Memory` where the process may open no more files.
    pub(super) fn block_on<T>(
        &self,
        work: impl Future<Output = T>,
        whole: impl FnOnce(&T) -> bool,
    ) -> Result<T> {
        let net = Net::of_process();
        let mut lane = net.lane()?;
        let done = lane.block_on(async {
            tokio::select! {
                biased;
                () = self.until_interrupted() => None,
                done = work => Some(done),
            }
        });
        match done.as_ref().is_some_and(whole) {
            true => net.keep(lane),
            false => lane.close(),
        }
        done.ok_or_else(|| Error::new(ErrorKind::Cancelled, "the load was stopped"))
    }

    /// As [`Course::block_on`], for work that may be stopped short.
    pub(super) fn run<T>(&self, work: impl Future<Output = Result<T, Stop>>) -> Result<T, Stop> {
        self.block_on(work, Result::is_ok).map_err(Stop::Tell)?
    }

    /// Waits for [`Course::interrupt`].
    async fn until_interrupted(&self) {
        let notified = self.interrupt.notified();
        let mut notified = std::pin::pin!(notified);
        // Registered before looking, so that an interrupt between the two is not missed.
        notified.as_mut().enable();
        if !self.interrupted.load(Ordering::Acquire) {
            notified.await;
        }
    }
}

impl Drop for Course {
    fn drop(&mut self) {
        // In a child after `fork`, the load is its parent's.
        if let Some(net) = self.load.filter(|net| std::ptr::eq(*net, Net::of_process())) {
            net.end_load();
        }
    }
}
