//! A file that locks are taken of (`flock`), by the process that opened it and not by children that are forked from it.
//!
//! `fork` shares open file descriptions, and a `flock` belongs to the description. So a child's copy does nothing when it is
//! dropped, and the owner unlocks explicitly, which counts whoever else has the description. (POSIX record locks are not
//! inherited, but end when *any* descriptor of the file is closed. Open file description locks are as `flock` is.)
//!
//! Not promised: where the owner is killed, its lock lasts until children that it forked while it had the lock end too.

use std::fs::File;
use std::ops::Deref;

use rustix::fs::{FlockOperation, flock};

use crate::memory::Owner;

/// An open file whose lock ends when it is dropped by the process that opened it.
#[derive(Debug)]
pub(crate) struct LockedFile {
    file: File,
    owner: Owner,
}

impl LockedFile {
    /// `file`, which this process has just opened, and may lock from now on.
    pub(crate) fn new(file: File) -> Self {
        Self { file, owner: Owner::current() }
    }

    /// Whether this process opened it, so that its lock is this process's.
    pub(crate) fn is_own(&self) -> bool {
        self.owner.is_current()
    }
}

impl Deref for LockedFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        if self.is_own() {
            let _ = flock(&self.file, FlockOperation::Unlock);
        }
    }
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::path::Path;

    use super::*;

    fn is_free(path: &Path) -> bool {
        flock(File::open(path).unwrap(), FlockOperation::NonBlockingLockExclusive).is_ok()
    }

    /// A child that does `work`, says so, and waits until it is killed.
    fn forked(work: impl FnOnce()) -> i32 {
        let (mut reader, writer) = std::io::pipe().unwrap();
        // SAFETY: the child touches what was made before the fork and makes system calls; it allocates nothing.
        let child = unsafe { libc::fork() };
        if child == 0 {
            work();
            // SAFETY: a byte of this stack.
            unsafe { libc::write(writer.as_raw_fd(), (&raw const child).cast(), 1) };
            loop {
                // SAFETY: waits for a signal.
                unsafe { libc::pause() };
            }
        }
        drop(writer);
        reader.read_exact(&mut [0]).unwrap();
        child
    }

    #[test]
    fn a_child_that_drops_its_copy_leaves_the_parents_lock_and_one_that_keeps_it_does_not_hold_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let mut file = Some(LockedFile::new(File::create(&path).unwrap()));
        flock(&**file.as_ref().unwrap(), FlockOperation::NonBlockingLockExclusive).unwrap();
        let keeps = forked(|| ());
        let drops = forked(|| drop(file.take()));
        assert!(!is_free(&path), "the parent's lock ended with its child's copy");
        drop(file);
        assert!(is_free(&path), "dropping the file does not unlock it");
        for child in [keeps, drops] {
            // SAFETY: a child that was forked above.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
        }
    }
}
