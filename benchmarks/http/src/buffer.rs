//! The memory that plain clients fill, and what a client reports.

use std::sync::Mutex;
use std::time::Instant;

use crate::Wish;

/// One buffer in huge pages, cut into parts that are taken in order.
pub struct Buffer {
    start: *mut u8,
    pub len: usize,
}

// SAFETY: it owns its mapping.
unsafe impl Send for Buffer {}

impl Buffer {
    pub fn new(len: usize, ready: bool) -> std::io::Result<Self> {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, nobody's until it is returned.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: the mapping made above.
        unsafe { libc::madvise(start, len, libc::MADV_HUGEPAGE) };
        let buffer = Self { start: start.cast(), len };
        if ready {
            // SAFETY: all of the mapping, which nobody else knows of.
            unsafe { std::ptr::write_bytes(buffer.start, 1, len) };
        }
        Ok(buffer)
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is `len` bytes of zeros or ones, and borrowed as long as this is.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping, which ends here.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

/// Parts of a buffer with their offsets, for whoever is free.
pub struct Parts<'a>(Mutex<Left<'a>>);

type Left<'a> = Box<dyn Iterator<Item = (u64, &'a mut [u8])> + Send + 'a>;

impl<'a> Parts<'a> {
    pub fn take(&self) -> Option<(u64, &'a mut [u8])> {
        self.0.lock().ok()?.next()
    }
}

/// Times `fill`, and says what it cost.
pub fn measure(
    wish: &Wish,
    size: u64,
    fill: impl FnOnce(&Parts<'_>) -> Result<(), crate::Failure>,
) -> Result<serde_json::Value, crate::Failure> {
    let mut buffer = Buffer::new(usize::try_from(size)?, wish.ready)?;
    let (began, cpu) = (Instant::now(), cpu_seconds());
    let part = wish.part;
    let parts = buffer.bytes().chunks_mut(part).enumerate();
    fill(&Parts(Mutex::new(Box::new(
        parts.map(move |(number, part_of)| ((number * part) as u64, part_of)),
    ))))?;
    let (seconds, cpu) = (began.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let words = buffer.bytes().chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
    let sum = words.fold(0u64, u64::wrapping_add);
    Ok(serde_json::json!({
        "bytes": size, "seconds": seconds, "cpu_seconds": cpu, "sum": sum.to_string(),
        "requests": wish.requests, "part": part, "ready": wish.ready,
    }))
}

/// User and system time of this process so far.
fn cpu_seconds() -> f64 {
    // SAFETY: all zeros is a valid `rusage`, which the call fills.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
