//! Storage that fails for real: a daemon that errs, hangs or dies, a disk that loses its sectors. What is said of it, and
//! that nothing is left behind.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use penstock::ErrorKind;
use penstock::checkpoint::Checkpoint;
use penstock::pipeline::Mapped;
use rustix::fs::{Advice, fadvise};

use super::{FILE, MIB, file_of, load, open, try_load};
use crate::mounted::{Mounted, or_skip};
use crate::recording_fuse::RecordingFuse;

/// Eight tensors of 3 MiB, and a byte in the middle of the sixth.
fn a_file() -> (Vec<u8>, u64) {
    let file = file_of(&[3 * MIB; 8]);
    let bad = file.len() - 3 * MIB * 5 / 2;
    (file, bad as u64)
}

/// Waits until no thread of ours and no file below `folder` is open in this process.
#[track_caller]
fn nothing_remains(folder: &Path) {
    let of_process = |what: &str| fs::read_dir(format!("/proc/self/{what}")).unwrap().filter_map(Result::ok);
    let clean = || {
        let open = of_process("fd").any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to.starts_with(folder)));
        let mapped = fs::read_to_string("/proc/self/maps").unwrap().contains(folder.to_str().unwrap());
        !open && !mapped
    };
    // A thread that was joined, of this test or of another's load, leaves its things a moment later.
    for _ in 0..1000 {
        if clean() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("files of {} are still open or mapped", folder.display());
}

fn prefault(checkpoint: &Arc<Checkpoint>) -> penstock::Result<()> {
    let all: Vec<_> = (0..checkpoint.tensors().len()).collect();
    Mapped::new(Arc::clone(checkpoint), &all)?.prefault(&all, 4)
}

#[test]
fn a_daemon_that_cannot_read_a_place_fails_the_load_of_the_tensor_there_and_no_other() {
    let (file, bad) = a_file();
    let Some(fuse) = or_skip("failing fuse", RecordingFuse::mount(FILE, file.clone(), &[])) else { return };
    let checkpoint = open(&fuse.file(FILE));
    fuse.fail_at(Some(bad));
    let error = try_load(&checkpoint, &file).unwrap_err();
    assert_eq!((error.kind(), error.os_error()), (ErrorKind::Storage, Some(libc::EIO)), "{error}");
    assert_eq!(error.tensor_name(), Some("t005"), "{error}");
    nothing_remains(fuse.path());
    fuse.fail_at(None);
    try_load(&checkpoint, &file).unwrap();
}

#[test]
fn views_of_a_file_that_cannot_be_read_are_an_error_when_prefaulted_and_no_signal() {
    let (file, bad) = a_file();
    let Some(fuse) = or_skip("failing fuse", RecordingFuse::mount(FILE, file, &[])) else { return };
    fuse.fail_at(Some(bad));
    let said = prefault_elsewhere(&fuse.file(FILE));
    for part in ["Storage", "model.safetensors: tensor \"t005\": reading a page", "dmesg"] {
        assert!(said.contains(part), "{said}");
    }
    fuse.fail_at(None);
    assert!(prefault_elsewhere(&fuse.file(FILE)).contains("all is well"));
}

const PREFAULTED: &str = "PENSTOCK_TEST_PREFAULTED";

/// Prefaults in another process and returns what that said. While pages of a mapping are made present, the kernel keeps
/// the process from changing its mappings, so a daemon of the same process that needs memory would wait for itself.
fn prefault_elsewhere(path: &Path) -> String {
    let done = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "failing::prefaults_for_another_process", "--ignored", "--nocapture"])
        .env(PREFAULTED, path)
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    String::from_utf8(done.stdout).unwrap()
}

#[test]
#[ignore = "a part of other tests, which run it in a process of its own"]
fn prefaults_for_another_process() {
    let Some(path) = std::env::var_os(PREFAULTED) else { return };
    match prefault(&open(Path::new(&path))) {
        Ok(()) => println!("all is well"),
        Err(error) => println!("{:?}: {error}", error.kind()),
    }
}

#[test]
fn a_mount_that_vanishes_during_the_load_is_an_error_that_says_what_to_do() {
    let (file, _) = a_file();
    let Some(fuse) = or_skip("vanishing fuse", RecordingFuse::mount(FILE, file.clone(), &[])) else { return };
    let path = fuse.file(FILE);
    let checkpoint = open(&path);
    let reads = fuse.reads().len();
    fuse.hang(true);
    let error = std::thread::scope(|scope| {
        let loading = scope.spawn(|| try_load(&checkpoint, &file));
        while fuse.reads().len() == reads {
            std::thread::sleep(Duration::from_millis(1));
        }
        fuse.vanish();
        fuse.hang(false);
        loading.join().unwrap().unwrap_err()
    });
    assert_eq!(error.kind(), ErrorKind::Storage, "{error}");
    assert!(matches!(error.os_error(), Some(libc::ECONNABORTED | libc::ENOTCONN)), "{error}");
    assert!(error.remedy_text().unwrap().contains("fusermount"), "{error}");
    // And so it stays, until someone mounts it again.
    let error = try_load(&checkpoint, &file).unwrap_err();
    assert_eq!(error.object_name(), path.to_str(), "{error}");
    nothing_remains(fuse.path());
}

#[test]
fn a_load_that_is_dropped_while_the_daemon_hangs_ends_when_the_daemon_goes_on() {
    let (file, _) = a_file();
    let Some(fuse) = or_skip("hanging fuse", RecordingFuse::mount(FILE, file.clone(), &[])) else { return };
    let checkpoint = open(&fuse.file(FILE));
    let reads = fuse.reads().len();
    fuse.hang(true);
    std::thread::scope(|scope| {
        let loading = scope.spawn(|| {
            let mut session = super::begin(&checkpoint, &super::Config::default()).0;
            while fuse.reads().len() == reads {
                assert!(session.next(Duration::from_millis(1)).is_ok());
            }
            drop(session);
        });
        while fuse.reads().len() == reads {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(100));
        assert!(!loading.is_finished(), "the kernel may still write to the load's memory");
        fuse.hang(false);
        loading.join().unwrap();
    });
    nothing_remains(fuse.path());
    load(&fuse.file(FILE), &file);
}

#[test]
fn a_disk_that_loses_its_sectors_is_an_error_for_loads_and_for_views() {
    let image = Mounted::image(&["mkfs.ext4", "-q", "-F", "-O", "^has_journal"]);
    let Some(image) = or_skip("failing disk", image) else { return };
    let (file, _) = a_file();
    let path = image.path().join(FILE);
    fs::write(&path, &file).unwrap();
    let opened = fs::File::open(&path).unwrap();
    opened.sync_all().unwrap();
    let checkpoint = open(&path);
    load(&path, &file);
    fadvise(&opened, 0, None, Advice::DontNeed).unwrap();
    drop(opened);
    // The disk ends before the file's data begins.
    fs::File::options().write(true).open(image.image_file()).unwrap().set_len(1 << 20).unwrap();
    let error = try_load(&checkpoint, &file).unwrap_err();
    assert_eq!((error.kind(), error.os_error()), (ErrorKind::Storage, Some(libc::EIO)), "{error}");
    assert_eq!(error.object_name(), path.to_str(), "{error}");
    // Several readers meet the loss; whichever is first says of which tensor.
    assert!(error.tensor_name().is_some_and(|name| name.starts_with('t')), "{error}");
    let error = prefault(&checkpoint).unwrap_err();
    assert_eq!((error.kind(), error.object_name()), (ErrorKind::Storage, path.to_str()), "{error}");
    nothing_remains(image.path());
}
