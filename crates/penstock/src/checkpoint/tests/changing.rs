//! Files that change between opening a checkpoint and loading from it.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::sync::Arc;
use std::time::Duration;

use super::super::Checkpoint;
use super::super::testing::Files;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Window;
use crate::store::{Entry, Identity, LocalStore, Object, ReadContext, Store};

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
    object.notes().join("; ")
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

/// A local file that is of another version whenever it is looked at again, and cannot be read then.
struct Failing(std::sync::atomic::AtomicBool, ErrorKind);

struct Unreadable(Arc<dyn Object>, ErrorKind);

impl Store for Failing {
    fn open(&self, location: &str) -> Result<Arc<dyn Object>> {
        let object = LocalStore::default().open(location)?;
        let first = !self.0.swap(true, std::sync::atomic::Ordering::SeqCst);
        Ok(if first { object } else { Arc::new(Unreadable(object, self.1)) })
    }

    fn reopen(&self, location: &str, _: &Identity) -> Result<Arc<dyn Object>> {
        self.open(location)
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        LocalStore::default().list(prefix)
    }

    fn directories(&self, prefix: &str) -> Vec<String> {
        LocalStore::default().directories(prefix)
    }
}

impl Object for Unreadable {
    fn location(&self) -> &str {
        self.0.location()
    }

    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn identity(&self) -> Identity {
        Identity("another".into())
    }

    fn read_into(&self, _: u64, _: Window<'_>, _: &mut ReadContext) -> Result<()> {
        Err(Error::new(self.1, "as it is told to").object(self.location()))
    }

    fn read_to_staging(&self, _: Range<u64>, _: Window<'_>, _: &mut ReadContext) -> Result<usize> {
        Err(Error::new(self.1, "as it is told to").object(self.location()))
    }

    fn verify_unchanged(&self) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_header_that_cannot_be_read_again_is_told_with_what_reading_failed_with() {
    for kind in [ErrorKind::Storage, ErrorKind::Cancelled, ErrorKind::Access, ErrorKind::Memory] {
        let files = Files::new();
        let path = files.weights("m.safetensors", &["a", "b"]);
        let checkpoint = Checkpoint::open(Arc::new(Failing(false.into(), kind)), &[path]).unwrap();
        let error = checkpoint.open_object(0).map(drop).unwrap_err();
        assert_eq!((error.kind(), error.cause()), (kind, "as it is told to"), "{error}");
    }
}

#[test]
fn a_file_that_is_no_checkpoint_any_more_has_changed() {
    let files = Files::new();
    let path = files.weights("m.safetensors", &["a", "b"]);
    let checkpoint = open(&path);
    write_unseen(&path, &[b'x'; 40], 0);
    let error = checkpoint.open_object(0).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Changed, "{error}");
}
