//! A few threads for many items, and why a thread could not be started.
//!
//! The system says `EAGAIN` for every limit, people need to know which one. A thread's stack is mapped memory, so a limit of
//! the address space stops threads as well as one of processes.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::process::{Resource, getrlimit};

use crate::error::{Error, ErrorKind, Result};

/// What starting a thread takes of the address space: its stack, guard pages, and some scratch memory.
const THREAD_BYTES: u64 = 16 << 20;

/// The failure to start a thread.
pub fn not_started(error: &io::Error) -> Error {
    Error::new(ErrorKind::Memory, format!("a thread could not be started: {error}")).remedy(remedy())
}

/// What to do about it: raise the limit that is nearest.
pub(crate) fn remedy() -> &'static str {
    let limit = getrlimit(Resource::As).current;
    if limit.zip(address_space()).is_some_and(|(limit, used)| used.saturating_add(THREAD_BYTES) > limit) {
        return "Raise the limit of the address space (ulimit -v): it leaves no room for a thread's stack";
    }
    "Raise the limit of processes (ulimit -u, cgroup pids.max)"
}

/// Bytes of the process's mappings.
fn address_space() -> Option<u64> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    pages.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(rustix::param::page_size() as u64)
}

/// What `work` makes of each item, in their order, by at most `most` threads that take items one after the other; or the
/// first failure and the number of its item. After a failure no new item is taken, but those taken before it are finished,
/// so it is the same on every run. The calling thread works too: a machine that grants no more threads is only slower.
///
/// # Errors
/// That failure.
pub fn in_order<T: Sync, R: Send>(
    items: &[T],
    most: usize,
    name: &str,
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>, (usize, Error)> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let take = || {
        let mut done = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(number) else { break };
            let made = work(item);
            failed.fetch_or(made.is_err(), Ordering::Relaxed);
            done.push((number, made));
        }
        done
    };
    let mut done = std::thread::scope(|scope| {
        let spawn = |_| std::thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, take).ok();
        let helpers: Vec<_> = (1..items.len().min(most)).map_while(spawn).collect();
        let mut done = take();
        for helper in helpers {
            done.extend(helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_unstable_by_key(|(number, _)| *number);
    done.into_iter().map(|(number, made)| made.map_err(|error| (number, error))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_items_and_the_first_failure_is_the_one_that_counts() {
        let numbers: Vec<usize> = (0..100).collect();
        let double = |number: &usize| Ok(2 * number);
        assert_eq!(in_order(&numbers, 8, "test", double).unwrap(), (0..200).step_by(2).collect::<Vec<_>>());
        assert!(in_order(&[], 8, "test", double).unwrap().is_empty());
        let from_30 = |number: &usize| match number {
            0..30 => Ok(()),
            _ => Err(Error::new(ErrorKind::Format, format!("number {number}"))),
        };
        for most in [1, 2, 16] {
            let (number, error) = in_order(&numbers, most, "test", from_30).unwrap_err();
            assert_eq!((number, error.cause().to_string()), (30, "number 30".to_owned()));
        }
    }

    #[test]
    fn without_a_limit_of_memory_it_is_that_of_processes() {
        assert!(address_space().unwrap() > 1 << 20);
        if getrlimit(Resource::As).current.is_none() {
            assert!(
                not_started(&io::Error::from_raw_os_error(libc::EAGAIN)).to_string().contains("ulimit -u")
            );
        }
    }
}
