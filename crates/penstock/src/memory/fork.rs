//! Which process something was made by, so that a child after `fork` does not take its parent's things for its own.
//!
//! A process id alone does not tell: ids are reused, and the first process of a new PID namespace has the id of the
//! first process outside. So forks are counted too, by a handler that the C library runs in the child. (A bare
//! `clone` system call runs no handler; then the id has to do.)

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

static FORKS: AtomicU32 = AtomicU32::new(0);
static COUNTING: AtomicBool = AtomicBool::new(false);

/// The process that made something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    pid: u32,
    forks: u32,
}

impl Owner {
    /// The process that runs now.
    pub fn current() -> Self {
        if !COUNTING.load(Ordering::Relaxed) && !COUNTING.swap(true, Ordering::Relaxed) {
            // SAFETY: the handler stays loaded as long as this code, and only adds to an atomic integer, which is
            // allowed in a child of a process with threads.
            unsafe { libc::pthread_atfork(None, None, Some(count)) };
        }
        Self { pid: std::process::id(), forks: FORKS.load(Ordering::Relaxed) }
    }

    /// Whether it is still that process, not a child of it.
    pub fn is_current(self) -> bool {
        self == Self::current()
    }
}

unsafe extern "C" fn count() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}
