//! Ending requests when someone says so: a load that is stopped must not wait for a server that is silent.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

use super::fetch::Stop;
use super::runtime::Net;
use crate::error::{Error, ErrorKind, Result};

/// Whether to stop, for whoever waits and whoever will.
#[derive(Debug, Default)]
pub(super) struct Interrupt {
    told: AtomicBool,
    notify: Notify,
}

impl Interrupt {
    /// Ends what waits now, and whatever begins later.
    pub(super) fn now(&self) {
        self.told.store(true, Ordering::Release);
        self.notify.notify_waiters();
    }

    async fn until_told(&self) {
        let notified = self.notify.notified();
        let mut notified = std::pin::pin!(notified);
        // Registered before looking, so that a word between the two is not missed.
        notified.as_mut().enable();
        if !self.told.load(Ordering::Acquire) {
            notified.await;
        }
    }

    /// Runs `work` in this thread, to its end or until told to stop.
    pub(super) fn block_on<T>(&self, work: impl Future<Output = Result<T, Stop>>) -> Result<T, Stop> {
        let net = Net::of_process().map_err(Stop::Tell)?;
        net.block_on(async {
            tokio::select! {
                biased;
                () = self.until_told() => {
                    Err(Stop::Tell(Error::new(ErrorKind::Cancelled, "the load was stopped")))
                }
                done = work => done,
            }
        })
    }
}
