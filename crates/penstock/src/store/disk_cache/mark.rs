//! The file that says of an entry that all of it is there, and what its data was like then.
//!
//! It is written by whoever holds the exclusive lock on the data, and taken away by whoever finds the data damaged, after
//! the map says so.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use super::files::{FILE, open};

const NAME: &str = "complete";
/// More than any mark has.
const MOST_BYTES: u64 = 256;

/// Whether `entry` is marked as complete, with `data` as it is now.
pub(super) fn is_set(entry: &Path, data: &fs::Metadata) -> bool {
    let mut said = String::new();
    let read = |said: &mut String| {
        open(&entry.join(NAME), OpenOptions::new().read(true))?.take(MOST_BYTES).read_to_string(said)
    };
    read(&mut said).is_ok() && said == described(data)
}

/// Marks `entry` as complete, with `data` as it was. In one step: a mark is there whole, or not.
pub(super) fn set(entry: &Path, data: &fs::Metadata) -> io::Result<()> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let new = entry.join(format!(".{NAME}-{}-{number}", std::process::id()));
    let mut how = OpenOptions::new();
    let written = open(&new, how.write(true).create(true).truncate(true).mode(FILE))
        .and_then(|mut file| file.write_all(described(data).as_bytes()));
    written.and_then(|()| fs::rename(&new, entry.join(NAME))).inspect_err(|_| drop(fs::remove_file(&new)))
}

/// Has the bytes of `entry` compared with their checksums by whoever uses it next.
pub(super) fn clear(entry: &Path) {
    let _ = fs::remove_file(entry.join(NAME));
}

/// What tells whether a file was written to. Its change time too, which no one can put back; `chmod` and copying alter it
/// as well, and then bytes are compared with their checksums once more.
fn described(is: &fs::Metadata) -> String {
    let (modified, changed) = ((is.mtime(), is.mtime_nsec()), (is.ctime(), is.ctime_nsec()));
    format!("{} {}.{:09} {}.{:09}\n", is.len(), modified.0, modified.1, changed.0, changed.1)
}
