//! Why a thread could not be started: the system says `EAGAIN` for every limit, people need to know which one.
//!
//! A thread's stack is mapped memory, so a limit of the address space stops threads as well as one of processes.

use std::io;

use rustix::process::{Resource, getrlimit};

use crate::error::{Error, ErrorKind};

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

#[cfg(test)]
mod tests {
    use super::*;

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
