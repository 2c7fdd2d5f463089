//! Which process something was made by, so that a child after `fork` does not take its parent's things for its own.
//!
//! A process id alone does not tell: ids are reused, and the first process of a new PID namespace has the id of the
//! first process outside. So forks are counted too, by a handler that the C library runs in the child. (A bare
//! `clone` system call runs no handler; then the id has to do.)

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

/// How often this process and those that it was forked from came out of a fork as its child.
static FORKS: AtomicU32 = AtomicU32::new(0);
static COUNTED: AtomicBool = AtomicBool::new(false);

/// The process that made something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    pid: u32,
    forks: u32,
}

impl Owner {
    /// The process that runs now.
    pub fn current() -> Self {
        count_forks();
        Self { pid: std::process::id(), forks: FORKS.load(Ordering::Relaxed) }
    }

    /// Whether it is still that process, not a child of it.
    pub fn is_current(self) -> bool {
        self == Self::current()
    }
}

/// Has forks counted from now on. Threads that come at once may each see to that, and then a fork counts several times,
/// which does no harm; a lock here could be held while another thread forks.
fn count_forks() {
    if !COUNTED.load(Ordering::Acquire) {
        // SAFETY: the handler stays loaded as long as this code, and only adds to an atomic integer, which is allowed in a
        // child of a process with threads.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        COUNTED.store(true, Ordering::Release);
    }
}

unsafe extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A value of which every process makes its own at the first use, to keep until its end. A child leaves alone what its
/// parent had, locks and threads included. It hangs on one atomic pointer, so that no fork can come at a wrong moment.
pub struct PerProcess<T: 'static>(AtomicPtr<(Owner, T)>);

impl<T> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> PerProcess<T> {
    /// None is made yet.
    pub const fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }
}

impl<T: Send + Sync> PerProcess<T> {
    /// As [`PerProcess::get_or_try_init`], where `make` cannot fail.
    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &'static T {
        match self.get_or_try_init(|| Ok::<_, Infallible>(make())) {
            Ok(value) => value,
            Err(never) => match never {},
        }
    }

    /// This process's value; `make` is called if there is none yet, and what several threads make at once is one's only.
    ///
    /// # Errors
    /// What `make` fails with.
    pub fn get_or_try_init<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&'static T, E> {
        let there = self.0.load(Ordering::Acquire);
        // SAFETY: either null or leaked below, and never freed.
        if let Some((owner, value)) = unsafe { there.as_ref() }
            && owner.is_current()
        {
            return Ok(value);
        }
        let made = Box::into_raw(Box::new((Owner::current(), make()?)));
        match self.0.compare_exchange(there, made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: leaked above and now published; never freed.
            Ok(_) => Ok(unsafe { &(*made).1 }),
            Err(winner) => {
                // SAFETY: `made` was not published, so this is its only owner; `winner` was, by another thread of this
                // process, and is never freed.
                unsafe {
                    drop(Box::from_raw(made));
                    Ok(&(*winner).1)
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_come_at_once_get_the_same_value() {
        static VALUE: PerProcess<usize> = PerProcess::new();
        assert_eq!(VALUE.get_or_try_init(|| Err("no")), Err("no"));
        let barrier = std::sync::Barrier::new(4);
        let got: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|number| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        barrier.wait();
                        VALUE.get_or_try_init(|| Ok::<_, ()>(number)).unwrap()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(got.iter().all(|value| std::ptr::eq(*value, got[0])));
    }
}
