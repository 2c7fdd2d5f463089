//! Files that a forked child does not inherit: what POSIX.1-2024 calls `O_CLOFORK`, which Linux does not have.
//!
//! A `flock` belongs to the open file description, and `fork` shares descriptions: a child keeps the lock of its parent
//! for as long as it lives. (POSIX record locks are per process, but end when *any* descriptor of the file is closed.
//! Open file description locks are shared as `flock` is.) So files that are locked are registered here. A handler that
//! the C library runs in the child replaces each by an empty event descriptor: the child's reference to the description
//! is gone, the descriptor's number stays valid, and reading or writing through it fails.
//!
//! Promises: a lock ends when the file is dropped, or when the process that opened it ends, whatever children do. A child
//! that drops its copy changes nothing for its parent. A child of a bare `clone` system call, for which no handler runs,
//! shares the description, but cannot unlock it.

use std::fs::File;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use rustix::fs::{FlockOperation, flock};

use super::fork::{Owner, forked_during};

const FREE: i32 = -1;
/// How often a file is opened anew because the process forks meanwhile.
const MOST_FORKS: usize = 100;

/// A place for the number of a registered descriptor. Places are leaked and used again.
struct Place {
    descriptor: AtomicI32,
    next: *const Place,
}

static PLACES: AtomicPtr<Place> = AtomicPtr::new(std::ptr::null_mut());

/// An open file that belongs to this process, without its forked children.
#[derive(Debug)]
pub(crate) struct CloseOnForkFile {
    file: File,
    place: &'static AtomicI32,
    owner: Owner,
}

impl CloseOnForkFile {
    /// The file that `open` opens, which must not lock it. A child that is forked before it is registered would share it,
    /// so it is opened again then.
    ///
    /// # Errors
    /// What `open` fails with.
    pub(crate) fn open<E>(mut open: impl FnMut() -> Result<File, E>) -> Result<Self, E> {
        for _ in 1..MOST_FORKS {
            let (file, forked) = forked_during(|| open().map(Self::register));
            if !forked {
                return file;
            }
            drop(file);
            std::thread::yield_now();
        }
        // A process that does nothing but fork. Its children may keep a lock of one that is killed.
        open().map(Self::register)
    }

    fn register(file: File) -> Self {
        let owner = Owner::current();
        let place = register(file.as_raw_fd());
        Self { file, place, owner }
    }
}

impl Deref for CloseOnForkFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for CloseOnForkFile {
    fn drop(&mut self) {
        // In a child, the place may hold a descriptor of the child's own by now, and the lock is the parent's.
        if !self.owner.is_current() {
            return;
        }
        // Unlocked explicitly: a child that is forked between the next line and the closing has the description too.
        let _ = flock(&self.file, FlockOperation::Unlock);
        self.place.store(FREE, Ordering::Release);
    }
}

fn register(descriptor: i32) -> &'static AtomicI32 {
    let mut head = PLACES.load(Ordering::Acquire);
    // SAFETY: null, or leaked below and never freed; `next` is written before the place is published.
    let mut at = unsafe { head.cast_const().as_ref() };
    while let Some(place) = at {
        let taken = place.descriptor.compare_exchange(FREE, descriptor, Ordering::AcqRel, Ordering::Relaxed);
        if taken.is_ok() {
            return &place.descriptor;
        }
        // SAFETY: as above.
        at = unsafe { place.next.as_ref() };
    }
    let made = Box::leak(Box::new(Place { descriptor: AtomicI32::new(descriptor), next: head }));
    let made: *mut Place = made;
    while let Err(now) = PLACES.compare_exchange(head, made, Ordering::AcqRel, Ordering::Acquire) {
        head = now;
        // SAFETY: not published yet, so this thread is the only one that knows of it.
        unsafe { (*made).next = head };
    }
    // SAFETY: leaked above and never freed; nothing writes to it but through atomics from now on.
    unsafe { &(*made).descriptor }
}

/// Takes every registered file from a child that has just been forked.
///
/// Async-signal-safe: it reads and writes atomic integers, and makes system calls.
pub(super) fn release_in_child() {
    // SAFETY: as in `register`.
    let mut at = unsafe { PLACES.load(Ordering::Acquire).cast_const().as_ref() };
    while let Some(place) = at {
        let descriptor = place.descriptor.swap(FREE, Ordering::AcqRel);
        if descriptor != FREE {
            replace(descriptor);
        }
        // SAFETY: as in `register`.
        at = unsafe { place.next.as_ref() };
    }
}

fn replace(descriptor: i32) {
    // SAFETY: system calls on numbers only. `descriptor` is open, as its owner frees its place before closing it; who owns
    // it in this process goes on owning a valid descriptor.
    unsafe {
        let empty = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
        // Where no descriptor is to be had, the child keeps its share of the file: the number must not become free.
        if empty >= 0 {
            libc::dup3(empty, descriptor, libc::O_CLOEXEC);
            libc::close(empty);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::FileExt;
    use std::time::{Duration, Instant};

    use super::*;

    fn locked(path: &std::path::Path) -> CloseOnForkFile {
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(path);
        let file = CloseOnForkFile::open(open).unwrap();
        flock(&*file, FlockOperation::NonBlockingLockExclusive).unwrap();
        file
    }

    fn is_free(path: &std::path::Path) -> bool {
        flock(File::open(path).unwrap(), FlockOperation::NonBlockingLockExclusive).is_ok()
    }

    /// Whether the lock is free, or will be once the programs that other tests start have begun: between the system call
    /// and `exec`, each has a copy of every descriptor, and no handler runs in it.
    fn becomes_free(path: &std::path::Path) -> bool {
        let end = Instant::now() + Duration::from_secs(30);
        while !is_free(path) {
            if Instant::now() > end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// A child that does `work`, answers with a byte, and waits until it is killed.
    fn forked(work: impl FnOnce() -> u8) -> (i32, u8) {
        let (mut reader, writer) = std::io::pipe().unwrap();
        // SAFETY: the child touches what was made before the fork and makes system calls; it allocates nothing.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let byte = work();
            // SAFETY: a byte of this stack.
            unsafe { libc::write(writer.as_raw_fd(), (&raw const byte).cast(), 1) };
            loop {
                // SAFETY: waits for a signal.
                unsafe { libc::pause() };
            }
        }
        drop(writer);
        let mut byte = [0];
        reader.read_exact(&mut byte).unwrap();
        (child, byte[0])
    }

    fn end(child: i32) {
        // SAFETY: the child that was forked above.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
    }

    #[test]
    fn a_forked_child_does_not_keep_the_lock() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let file = locked(&path);
        let (child, _) = forked(|| 0);
        assert!(!is_free(&path), "the parent's lock ended with the fork");
        // As if the parent had been killed: its description goes, without unlocking.
        let CloseOnForkFile { file: ref description, .. } = file;
        let raw = description.as_raw_fd();
        // SAFETY: replaces the descriptor of a file that this test owns.
        unsafe {
            let empty = libc::eventfd(0, libc::EFD_CLOEXEC);
            libc::dup3(empty, raw, libc::O_CLOEXEC);
            libc::close(empty);
        }
        assert!(becomes_free(&path), "the child keeps the lock");
        end(child);
        drop(file);
    }

    #[test]
    fn a_child_that_drops_its_copy_leaves_the_parents_lock() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let mut file = Some(locked(&path));
        let (child, read) = forked(|| {
            let failed = file.as_ref().unwrap().read_at(&mut [0], 0).is_err();
            drop(file.take());
            failed.into()
        });
        assert_eq!(read, 1, "the child reads its parent's file");
        assert!(!is_free(&path));
        end(child);
        drop(file);
        assert!(is_free(&path), "dropping the file does not unlock it");
    }

    #[test]
    fn a_child_that_is_forked_while_a_file_is_opened_does_not_share_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let mut children = Vec::new();
        let open = || {
            let file = File::options().read(true).write(true).create(true).truncate(false).open(&path);
            if children.len() < 2 {
                children.push(forked(|| 0).0);
            }
            file
        };
        let file = CloseOnForkFile::open(open).unwrap();
        flock(&*file, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert_eq!(children.len(), 2, "it was not opened again");
        // As if the parent had been killed.
        let raw = file.as_raw_fd();
        // SAFETY: replaces the descriptor of a file that this test owns.
        unsafe {
            let empty = libc::eventfd(0, libc::EFD_CLOEXEC);
            libc::dup3(empty, raw, libc::O_CLOEXEC);
            libc::close(empty);
        }
        assert!(becomes_free(&path), "a child keeps the lock");
        children.into_iter().for_each(end);
    }

    #[test]
    fn places_are_used_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let count = || {
            // SAFETY: as in `register`.
            let first = unsafe { PLACES.load(Ordering::Acquire).cast_const().as_ref() };
            // SAFETY: as in `register`.
            std::iter::successors(first, |place| unsafe { place.next.as_ref() }).count()
        };
        drop(locked(&path));
        let before = count();
        (0..100).for_each(|_| drop(locked(&path)));
        // Other tests of this process may register some meanwhile.
        assert!(count() < before + 50);
    }
}
