//! CPU time: of the process, of a thread of ours, of the kernel threads that io_uring made, of the whole machine.

use std::fs;
use std::time::{Duration, Instant};

use crate::machine;

/// CPU time of this process; the kernel's threads for its rings are threads of it.
pub fn process() -> Duration {
    usage(libc::RUSAGE_SELF)
}

/// CPU time of the calling thread.
pub fn thread() -> Duration {
    usage(libc::RUSAGE_THREAD)
}

fn usage(who: libc::c_int) -> Duration {
    // SAFETY: all zeros is a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is writable and lives through the call.
    unsafe { libc::getrusage(who, &raw mut usage) };
    let span = |time: libc::timeval| {
        Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_usec).unwrap_or(0) * 1000)
    };
    span(usage.ru_utime) + span(usage.ru_stime)
}

/// How many kernel threads io_uring has made for this process (`iou-wrk-…`, `iou-sqp-…`), and their CPU time.
pub fn kernel_threads() -> (usize, Duration) {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else { return (0, Duration::ZERO) };
    let mut found = (0, Duration::ZERO);
    for task in tasks.flatten() {
        let read = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        if read("comm").starts_with("iou-") {
            // Nanoseconds on a processor, then two other figures.
            let nanos = read("schedstat").split(' ').next().and_then(|nanos| nanos.parse().ok());
            found = (found.0 + 1, found.1 + Duration::from_nanos(nanos.unwrap_or(0)));
        }
    }
    found
}

/// Time that the machine's processors were not idle, interrupts included. In ticks of 10 ms, and of everybody.
pub fn everybody() -> Duration {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks: Vec<u64> = stat
        .lines()
        .next()
        .into_iter()
        .flat_map(|line| line.split_whitespace().skip(1))
        .filter_map(|ticks| ticks.parse().ok())
        .collect();
    // user, nice, system, idle, iowait, irq, softirq
    let busy: u64 = [0, 1, 2, 5, 6].iter().filter_map(|index| ticks.get(*index)).sum();
    Duration::from_millis(busy * 10)
}

/// A machine is busy with others when they take more of its processors than this.
const BUSY: f64 = 0.2;

/// Whether `others` (CPU time) in `seconds` is more than a measurement bears. A tick for each processor is not known.
pub fn is_busy(others: Duration, seconds: f64) -> bool {
    let cores = machine::cores() as f64;
    others.as_secs_f64() > cores * (BUSY * seconds + 0.01)
}

/// Waits until nobody uses the processors, but no longer than `most`.
pub fn wait_for_quiet(most: Duration) {
    let (began, look) = (Instant::now(), Duration::from_millis(100));
    while began.elapsed() < most {
        let before = everybody();
        std::thread::sleep(look);
        if !is_busy(everybody().saturating_sub(before), look.as_secs_f64()) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_of_this_process_is_counted_and_that_of_all_processors_is_busy() {
        let (process_before, thread_before) = (process(), thread());
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(50) {
            std::hint::black_box(began);
        }
        assert!(thread() > thread_before && process() - process_before >= thread() - thread_before);
        let all = Duration::from_secs(machine::cores() as u64);
        assert!(is_busy(all, 1.0) && !is_busy(all / 10, 1.0) && !is_busy(Duration::ZERO, 0.0));
    }
}
