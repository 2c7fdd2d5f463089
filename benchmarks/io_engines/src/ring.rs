//! A ring that keeps so many reads in flight, and whether there may be rings at all.

use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::squeue::{Entry, Flags};
use io_uring::{IoUring, opcode, types};

use crate::measure::{Work, Worker};
use crate::plan::{How, Request};

/// How long a polling kernel thread stays awake without work, in milliseconds.
const SQPOLL_IDLE: u32 = 50;

/// Why there can be no ring here, in words; `None` if there can.
pub fn refusal() -> Option<String> {
    let error = IoUring::new(2).err()?;
    let setting = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    Some(match (error.raw_os_error(), setting.trim()) {
        (Some(libc::ENOSYS), _) => "the kernel or the sandbox has no io_uring (ENOSYS)".to_owned(),
        (Some(libc::EPERM), setting @ ("1" | "2")) => {
            format!("kernel.io_uring_disabled is {setting} (EPERM)")
        }
        (Some(libc::EPERM | libc::EACCES), _) => {
            format!("a seccomp profile or security module forbids it, as containers' defaults do ({error})")
        }
        _ => format!("io_uring_setup failed: {error}"),
    })
}

/// A read on its way.
struct InFlight {
    request: Request,
    start: Instant,
    done: usize,
}

/// One ring, and what is in flight.
pub struct Driver {
    ring: IoUring,
    slots: Vec<Option<InFlight>>,
    /// The number of the first slot's buffer.
    first: usize,
    registered: bool,
    flags: Flags,
    /// Completions to wait for at once.
    wait: usize,
}

impl Driver {
    /// Makes a ring for the calling thread, which alone may drive it.
    pub fn new(work: &Work, number: usize, depth: usize, how: How) -> io::Result<Self> {
        let first = number * depth;
        let ring = named("io_uring_setup", build(depth, how))?;
        let registered = how != How::Unregistered;
        if registered {
            let files: Vec<_> = work.files.iter().map(AsRawFd::as_raw_fd).collect();
            named("registering files", ring.submitter().register_files(&files))?;
            // SAFETY: `work`, which has the buffers, outlives all workers.
            let outcome =
                unsafe { ring.submitter().register_buffers(&work.buffers.vectors(first..first + depth)) };
            named("registering buffers", outcome)?;
        }
        Ok(Self {
            ring,
            slots: (0..depth).map(|_| None).collect(),
            first,
            registered,
            flags: if how == How::Workers { Flags::ASYNC } else { Flags::empty() },
            wait: if how == How::Batched { depth / 4 } else { 1 },
        })
    }

    /// Puts what is left of a slot's request into the submission queue.
    fn push(&mut self, work: &Work, slot: usize) -> io::Result<()> {
        let Some(InFlight { request, done, .. }) = &self.slots[slot] else { return Ok(()) };
        let len = u32::try_from(work.pattern.bytes as usize - done).map_err(io::Error::other)?;
        let offset = request.offset + *done as u64;
        // SAFETY: `done` is below the length of the slot's buffer.
        let into = unsafe { work.buffers.at(self.first + slot).add(*done) };
        let entry: Entry = if self.registered {
            let (file, buffer) = (types::Fixed(request.file as u32), slot as u16);
            opcode::ReadFixed::new(file, into, len, buffer).offset(offset).build()
        } else {
            opcode::Read::new(types::Fd(work.files[request.file].as_raw_fd()), into, len)
                .offset(offset)
                .build()
        };
        let entry = entry.user_data(slot as u64).flags(self.flags);
        // SAFETY: the slot's buffer is the kernel's until the slot's completion has come; memory and files live as long
        // as `work`, and a read in flight after an error goes to pages that the kernel holds.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)
    }
}

fn build(depth: usize, how: How) -> io::Result<IoUring> {
    let entries = u32::try_from(depth).map_err(io::Error::other)?;
    let mut builder = IoUring::builder();
    match how {
        How::SqPoll => {
            builder.setup_sqpoll(SQPOLL_IDLE);
            return builder.build(entries);
        }
        How::IoPoll => {
            builder.setup_iopoll();
        }
        _ => {}
    }
    // The best that Linux 6.1 has for a ring with one thread; without it where it is not known.
    let plain = builder.clone();
    builder.setup_single_issuer().setup_defer_taskrun();
    match builder.build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => plain.build(entries),
        outcome => outcome,
    }
}

/// Says which step failed, and keeps the kind of failure.
fn named<T>(step: &str, outcome: io::Result<T>) -> io::Result<T> {
    outcome.map_err(|error| io::Error::new(error.kind(), format!("{step}: {error}")))
}

impl Worker for Driver {
    fn run(&mut self, work: &Work, took: &mut Vec<Duration>) -> io::Result<()> {
        let (began, bytes) = (Instant::now(), work.pattern.bytes as usize);
        let mut free: Vec<usize> = (0..self.slots.len()).rev().collect();
        let mut completed = Vec::with_capacity(self.slots.len());
        loop {
            while let Some(slot) = free.pop() {
                let Some(request) = work.take(began) else {
                    free.push(slot);
                    break;
                };
                self.slots[slot] = Some(InFlight { request, start: Instant::now(), done: 0 });
                self.push(work, slot)?;
            }
            let in_flight = self.slots.len() - free.len();
            if in_flight == 0 {
                return Ok(());
            }
            match self.ring.submit_and_wait(self.wait.clamp(1, in_flight)) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {
                    completed.extend(self.ring.completion().map(|entry| (entry.user_data(), entry.result())))
                }
            }
            for (slot, result) in completed.drain(..) {
                let slot = slot as usize;
                let Some(read) = &mut self.slots[slot] else { continue };
                match usize::try_from(result) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(n) => read.done += n,
                    Err(_) if result == -libc::EAGAIN || result == -libc::EINTR => {}
                    Err(_) => return named("a read", Err(io::Error::from_raw_os_error(-result))),
                }
                if read.done < bytes {
                    self.push(work, slot)?;
                    continue;
                }
                took.push(read.start.elapsed());
                work.check(read.request, work.buffers.first_word(self.first + slot))?;
                self.slots[slot] = None;
                free.push(slot);
            }
        }
    }
}
