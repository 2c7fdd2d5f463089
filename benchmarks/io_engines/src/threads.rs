//! A thread that reads with `pread`, one request at a time, as Penstock's local store does.

use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crate::measure::{Work, Worker};

/// The number of a thread, which is that of its buffer.
pub struct Reader(usize);

impl Reader {
    pub fn new(number: usize) -> Self {
        Self(number)
    }
}

impl Worker for Reader {
    fn run(&mut self, work: &Work, took: &mut Vec<Duration>) -> io::Result<()> {
        let (began, bytes) = (Instant::now(), work.pattern.bytes as usize);
        let into = work.buffers.at(self.0);
        while let Some(request) = work.take(began) {
            let file = work.files[request.file].as_raw_fd();
            let start = Instant::now();
            let mut done = 0;
            while done < bytes {
                let at = request.offset + done as u64;
                // SAFETY: the buffer has `bytes` bytes, and no other worker uses it.
                let n = unsafe { libc::pread64(file, into.add(done).cast(), bytes - done, at.cast_signed()) };
                match usize::try_from(n) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(n) => done += n,
                    Err(_) => {
                        let error = io::Error::last_os_error();
                        if error.kind() != io::ErrorKind::Interrupted {
                            return Err(error);
                        }
                    }
                }
            }
            took.push(start.elapsed());
            work.check(request, work.buffers.first_word(self.0))?;
        }
        Ok(())
    }
}
