//! Entries as forked children, killed processes and odd disks leave them.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Barrier};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::super::directory::Directory;
use super::super::{CachingStore, DiskCache};
use super::*;
use crate::store::{CachePolicy, Identity, RemoteStore};

/// What a forked child's `work` says. It may allocate: the C library sees to that.
fn in_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child leaves by `_exit`, whatever happens.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        // SAFETY: ends this process.
        unsafe { libc::_exit(i32::from(!done.unwrap_or(false))) };
    }
    let mut status = -1;
    // SAFETY: waits for the child that was forked above.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    status == 0
}

fn key(bytes: usize) -> Key {
    let label = "an object".to_owned();
    Key { name: name_of(&label), label, identity: Identity(String::new()), bytes: bytes as u64 }
}

fn made(root: &Path, bytes: usize) -> PathBuf {
    let key = key(bytes);
    let path = root.join(&key.name);
    Entry::make(&path, &key).unwrap();
    path
}

fn filled(root: &Path, bytes: &[u8]) -> PathBuf {
    let path = made(root, bytes.len());
    Entry::open(&path).unwrap().write(0, bytes);
    path
}

#[test]
fn a_forked_child_completes_and_writes_nothing_of_its_parents_but_fills_what_it_opens_itself() {
    let root = tempfile::tempdir().unwrap();
    let bytes = vec![7; 3 * BLOCK_BYTES as usize + 5];
    let path = filled(root.path(), &bytes);
    let is_complete = || path.join("complete").exists();
    let mut entry = Some(Entry::open(&path).unwrap());
    let damaged = 1;
    entry.as_ref().unwrap().map.set(damaged, 0).unwrap();
    assert!(in_child(|| {
        let inherited = entry.take().unwrap();
        inherited.write(0, &bytes);
        assert!(!inherited.has(damaged) && !inherited.is_writable());
        let own = Entry::open(&path).unwrap();
        own.write(0, &bytes);
        inherited.close();
        // The parent holds it still, and is done with it last.
        own.close();
        !is_complete() && lock(&File::open(path.join("data")).unwrap(), FlockOperation::NonBlockingLockShared)
    }));
    let others = |how| lock(&File::open(path.join("map")).unwrap(), how);
    assert!(
        !is_complete() && !others(FlockOperation::NonBlockingLockExclusive),
        "a child ended its parent's lock"
    );
    entry.take().unwrap().close();
    assert!(is_complete() && others(FlockOperation::NonBlockingLockExclusive));
}

#[test]
fn what_is_killed_on_the_way_to_the_mark_is_compared_by_who_comes_next() {
    let root = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..2 * BLOCK_BYTES as usize + 5).map(|at| (at % 251) as u8).collect();
    let path = filled(root.path(), &bytes);
    for mark in ["", "1048581 0.0", "of another version"] {
        fs::write(path.join("complete"), mark).unwrap();
        let next = Entry::open(&path).unwrap();
        assert!(!next.is_complete() && next.compare() == (bytes.len() as u64, 0));
        next.close();
        assert!(Entry::open(&path).unwrap().is_complete(), "{mark:?}");
    }
}

#[test]
fn what_cannot_be_written_past_the_page_cache_is_written_through_it() {
    let root = tempfile::tempdir().unwrap();
    let bytes = vec![7; BLOCK_BYTES as usize + 5];
    let path = filled(root.path(), &bytes);
    let mut entry = Entry::open(&path).unwrap();
    (0..2).for_each(|block| entry.map.set(block, 0).unwrap());
    // Refuses every write.
    entry.direct = Some(File::open(path.join("data")).unwrap());
    entry.write(0, &bytes);
    assert_eq!((entry.compare(), entry.said()), ((bytes.len() as u64, 0), None));
}

#[test]
fn a_link_to_an_entry_is_none() {
    let root = tempfile::tempdir().unwrap();
    let path = filled(root.path(), b"theirs");
    let moved = root.path().join("elsewhere");
    fs::rename(&path, &moved).unwrap();
    std::os::unix::fs::symlink(&moved, &path).unwrap();
    assert!(Entry::open(&path).is_none());
    fs::remove_file(&path).unwrap();
    fs::rename(&moved, &path).unwrap();
    assert!(Entry::open(&path).is_some());
    fs::rename(path.join("data"), root.path().join("data")).unwrap();
    std::os::unix::fs::symlink(root.path().join("data"), path.join("data")).unwrap();
    assert!(Entry::open(&path).is_none());
}

#[test]
fn an_object_of_no_bytes_is_complete_once_it_was_opened() {
    let root = tempfile::tempdir().unwrap();
    let path = filled(root.path(), &[]);
    Entry::open(&path).unwrap().close();
    assert!(Entry::open(&path).unwrap().is_complete());
}

#[test]
fn users_that_are_done_at_the_same_time_leave_a_complete_entry() {
    let root = tempfile::tempdir().unwrap();
    let bytes = vec![7; BLOCK_BYTES as usize];
    for _ in 0..300 {
        let path = made(root.path(), 4 * bytes.len());
        let entries: Vec<_> = (0..4).map(|_| Entry::open(&path).unwrap()).collect();
        let together = Barrier::new(entries.len());
        std::thread::scope(|scope| {
            for (block, entry) in entries.into_iter().enumerate() {
                let (together, bytes) = (&together, &bytes);
                scope.spawn(move || {
                    together.wait();
                    entry.write(block, bytes);
                    entry.close();
                });
            }
        });
        assert!(path.join("complete").exists());
        fs::remove_dir_all(path).unwrap();
    }
}

#[test]
fn an_entry_that_cannot_be_opened_for_want_of_descriptors_is_not_removed() {
    let root = tempfile::tempdir().unwrap();
    let directory = Directory::new(DiskCache { directory: root.path().to_owned(), bytes: None });
    let entry = directory.entry(&key(10)).unwrap();
    for descriptors in 0..6 {
        assert!(in_child(|| {
            let next = u64::from(File::open("/dev/null").unwrap().as_raw_fd().cast_unsigned());
            let limit = Rlimit { current: Some(next + descriptors), ..getrlimit(Resource::Nofile) };
            setrlimit(Resource::Nofile, limit).unwrap();
            let _ = directory.entry(&key(10));
            entry.data_path().exists()
        }));
    }
}

#[test]
fn a_file_that_has_taken_the_place_of_an_entrys_is_not_read_for_it() {
    let root = tempfile::tempdir().unwrap();
    let path = filled(root.path(), b"theirs");
    Entry::open(&path).unwrap().close();
    let entry = Arc::new(Entry::open(&path).unwrap());
    let store = CachingStore::new(RemoteStore::default(), None, CachePolicy::Auto);
    let local = || store.local(("https://h/a", "https://h/a"), &Identity(String::new()), Arc::clone(&entry));
    assert!(entry.is_complete() && local().is_some());
    // By someone who takes no locks.
    fs::rename(&path, root.path().join("elsewhere")).unwrap();
    made(root.path(), 6);
    assert!(local().is_none());
}
