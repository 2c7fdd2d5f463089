//! Waiting for servers without keeping signals waiting.

use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, bounded};
use penstock::{Error, ErrorKind, threads};
use pyo3::prelude::*;

use crate::errors::Failure;
use crate::logging;

/// How long a wait goes on before it looks for signals (Ctrl-C).
pub const SIGNAL_CHECK: Duration = Duration::from_millis(50);

/// Does `work` in a thread of its own and looks for signals meanwhile. Where one raises, or what a log handler does,
/// `interrupt` ends the work, and what was raised is returned once the thread is gone.
pub fn interruptibly<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> penstock::Result<T> + Send,
    interrupt: impl Fn(),
) -> PyResult<T> {
    std::thread::scope(|scope| {
        let (sender, done) = bounded(1);
        let thread = std::thread::Builder::new().name("penstock-open".into());
        let working = thread.spawn_scoped(scope, move || drop(sender.send(work())));
        let working = working.map_err(|error| Failure(threads::not_started(&error)))?;
        loop {
            let waited = py.detach(|| done.recv_timeout(SIGNAL_CHECK));
            let logged = logging::emit(py);
            match waited {
                Ok(done) => return logged.and_then(|()| done.map_err(|error| Failure(error).into())),
                Err(RecvTimeoutError::Timeout) => {
                    logged.and_then(|()| py.check_signals()).inspect_err(|_| {
                        interrupt();
                        // It returns the failure that the interrupt makes of it, which nobody needs.
                        let _ = py.detach(|| done.recv());
                    })?;
                }
                // The work panicked, which is a bug; what it said is on the standard error.
                Err(RecvTimeoutError::Disconnected) => {
                    drop(working.join());
                    let cause = "opening panicked; this is a bug of Penstock";
                    return Err(Failure(Error::new(ErrorKind::Storage, cause)).into());
                }
            }
        }
    })
}
