//! Files that belong to someone else: newer kernels say what of them is cached only to their owner and to those who may
//! write to them.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use penstock::memory::Window;
use penstock::store::{LocalStore, Object, ReadContext, Store};
use rustix::fs::{Advice, fadvise};

use super::MIB;

const NOBODY: u32 = 65_534;

/// Reads all of it; the context says from where.
fn read(object: &Arc<dyn Object>, cached: Option<bool>) -> ReadContext {
    let mut bytes = vec![0; usize::try_from(object.bytes()).unwrap()];
    let mut cx = ReadContext::default();
    cx.cached = cached;
    object.read_into(0, Window::from_slice(&mut bytes), &mut cx).unwrap();
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == (at % 251) as u8));
    cx
}

fn evict(path: &Path) {
    let file = fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    fadvise(&file, 0, None, Advice::DontNeed).unwrap();
}

fn write(path: &Path) {
    fs::write(path, (0..4 * MIB + 5).map(|at| (at % 251) as u8).collect::<Vec<_>>()).unwrap();
    evict(path);
}

/// Runs `body` as an unprivileged user, in a child.
#[track_caller]
fn as_nobody(body: impl FnOnce()) {
    // SAFETY: the child ends without returning; the C library keeps its allocator usable there.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: gives up rights, in this process alone. (The raw calls: the C library's would ask threads that a child
        // does not have.)
        let done = unsafe {
            libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<u32>()) == 0
                && libc::syscall(libc::SYS_setgid, NOBODY) == 0
                && libc::syscall(libc::SYS_setuid, NOBODY) == 0
        };
        let went_well = done && std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_ok();
        // SAFETY: ends the process.
        unsafe { libc::_exit(i32::from(!went_well)) };
    }
    let mut status = 0;
    // SAFETY: our own child; writes one int.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child failed");
}

#[test]
fn a_file_of_another_user_is_read_directly_where_it_is_not_cached_and_says_nothing_about_other_files() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (theirs, own) = (dir.path().join("theirs"), dir.path().join("own"));
    for path in [&theirs, &own] {
        write(path);
    }
    std::os::unix::fs::chown(&own, Some(NOBODY), Some(NOBODY)).unwrap();
    // Opened before rights are given up, as the directories on the way may be root's alone.
    let store = LocalStore::default();
    let open = |path: &Path| store.open(path.to_str().unwrap()).unwrap();
    let probe = open(&theirs);
    if read(&probe, None).direct_bytes == 0 {
        println!("skipped: the file system has no direct reads");
        return;
    }
    let traverse = |path: &Path| {
        use std::os::unix::fs::PermissionsExt;
        path.ancestors().skip(1).all(|above| fs::metadata(above).unwrap().permissions().mode() & 1 == 1)
    };
    fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    if !traverse(&theirs) {
        println!("skipped: other users may not enter {}", dir.path().display());
        return;
    }
    evict(&theirs);
    let (theirs_open, own_open) = (open(&theirs), open(&own));
    let all = 0..theirs_open.bytes();
    as_nobody(|| {
        let bytes = all.end;
        assert_eq!(theirs_open.is_cached(&all), Some(false));
        let cx = read(&theirs_open, None);
        assert_eq!((cx.direct_bytes, cx.buffered_bytes), (bytes, 0), "{cx:?}");
        // What is not told of one file is known of another.
        assert_eq!(own_open.is_cached(&all), Some(false));
        assert_eq!(read(&own_open, None).direct_bytes, bytes);
        fs::read(&theirs).unwrap();
        assert_eq!(theirs_open.is_cached(&all), Some(true));
        assert_eq!(read(&theirs_open, None).cached_bytes, bytes);
        assert!(theirs_open.notes().is_empty() && own_open.notes().is_empty());
    });
}

#[test]
fn a_file_is_read_as_was_said_of_its_cached_pages_without_asking_again() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("file");
    write(&path);
    let object = LocalStore::default().open(path.to_str().unwrap()).unwrap();
    let cx = read(&object, Some(true));
    assert_eq!((cx.cached_bytes, cx.direct_bytes), (object.bytes(), 0));
    // It is cached by now.
    let cx = read(&object, Some(false));
    assert_eq!((cx.cached_bytes, cx.direct_bytes + cx.buffered_bytes), (0, object.bytes()));
}
