//! What the requests of one load share: its failures are counted together, its pace is learnt together, and they are
//! stopped together. Opening a checkpoint is a course of its own.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

use super::fetch::Stop;
use super::pace::Pace;
use super::retry::Budget;
use super::runtime::Net;
use crate::error::{Error, ErrorKind, Result};

/// See the module.
#[derive(Default)]
pub(super) struct Course {
    pub(super) budget: Budget,
    pub(super) pace: Pace,
    interrupted: AtomicBool,
    interrupt: Notify,
}

impl Course {
    /// Ends what waits in [`Course::block_on`], now and from now on.
    pub(super) fn interrupt(&self) {
        self.interrupted.store(true, Ordering::Release);
        self.interrupt.notify_waiters();
    }

    /// Runs `work` in this thread until it is done.
    ///
    /// # Errors
    /// `Cancelled` after [`Course::interrupt`], `Memory` where the network's threads cannot be started.
    pub(super) fn block_on<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        let net = Net::of_process()?;
        let done = net.block_on(async {
            tokio::select! {
                biased;
                () = self.until_interrupted() => None,
                done = work => Some(done),
            }
        });
        done.ok_or_else(|| Error::new(ErrorKind::Cancelled, "the load was stopped"))
    }

    /// As [`Course::block_on`], for work that may itself be stopped short.
    pub(super) fn run<T>(&self, work: impl Future<Output = Result<T, Stop>>) -> Result<T, Stop> {
        self.block_on(work).map_err(Stop::Tell)?
    }

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
