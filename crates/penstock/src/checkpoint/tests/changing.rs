//! Files that change between opening a checkpoint and loading from it.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::sync::Arc;
use std::time::Duration;

use super::super::Checkpoint;
use super::super::testing::Files;
use crate::error::ErrorKind;
use crate::store::LocalStore;

fn open(path: &str) -> Checkpoint {
    let opened = Checkpoint::open(Arc::new(LocalStore::default()), &[path.to_owned()]).unwrap();
    // Times are as fine as the kernel's clock ticks.
    std::thread::sleep(Duration::from_millis(20));
    opened
}

/// Writes at an offset, and puts the modification time back.
fn write_unseen(path: &str, bytes: &[u8], at: u64) {
    let file = File::options().write(true).open(path).unwrap();
    let before = file.metadata().unwrap().modified().unwrap();
    file.write_all_at(bytes, at).unwrap();
    file.set_modified(before).unwrap();
}

fn notes(object: &dyn crate::store::Object) -> String {
    object.remarks().join("; ")
}

#[test]
fn a_file_whose_permissions_or_links_changed_is_loaded_and_said() {
    let files = Files::new();
    let path = files.weights("m.safetensors", &["a", "b"]);
    let checkpoint = open(&path);
    assert_eq!(notes(&*checkpoint.open_object(0).unwrap()), "");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::hard_link(&path, format!("{path}.link")).unwrap();
    let object = checkpoint.open_object(0).unwrap();
    object.verify_unchanged().unwrap();
    assert!(notes(&*object).contains("change time"));
}

#[test]
fn a_header_written_with_its_time_put_back_is_noticed() {
    let files = Files::new();
    let path = files.weights("m.safetensors", &["a", "b"]);
    let checkpoint = open(&path);
    let header = fs::read(&path).unwrap();
    let at = header.windows(3).position(|bytes| bytes == b"\"a\"").unwrap();
    write_unseen(&path, b"\"c\"", at as u64);
    let error = checkpoint.open_object(0).map(drop).unwrap_err();
    assert_eq!((error.kind(), error.object_name()), (ErrorKind::Changed, Some(&*path)), "{error}");
}

#[test]
fn a_write_during_a_load_with_the_time_put_back_is_noted() {
    let files = Files::new();
    let path = files.weights("m.safetensors", &["a", "b"]);
    let checkpoint = open(&path);
    let object = checkpoint.open_object(0).unwrap();
    write_unseen(&path, b"x", checkpoint.objects()[0].data_start);
    object.verify_unchanged().unwrap();
    assert!(notes(&*object).contains("put the time back"));
    // One that leaves its time is an error.
    let object = checkpoint.open_object(0).unwrap();
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .write_all_at(b"y", checkpoint.objects()[0].data_start)
        .unwrap();
    assert_eq!(object.verify_unchanged().unwrap_err().kind(), ErrorKind::Changed);
}
