//! What was pulled before: for each file the version of the object that it is, and what the file was like then.
//!
//! A line of JSON for each file, added after the file got its name. A line that was cut off, or is of a file that was
//! written to since, says nothing; then the file is pulled again. Where only the change time of a file differs, it may be
//! that it was written to and its modification time put back, or that `chmod`, `chown` or a hard link was all: then its
//! bytes are compared with the checksum that the line holds.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};

use rustix::fs::Stat;
use serde::{Deserialize, Serialize};

use super::source::Item;
use super::tree::Tree;
use crate::error::{Error, Result};
use crate::store::{Identity, RemoteStore};

/// Its name in the directory of pulls' own files.
pub(super) const NAME: &str = "pulled.jsonl";

#[derive(Serialize, Deserialize)]
struct Line {
    path: String,
    version: String,
    bytes: u64,
    modified: (i64, i64),
    /// Lines of earlier versions have neither this nor a checksum.
    #[serde(default)]
    changed: Option<(i64, i64)>,
    /// CRC-64/NVME of the file.
    #[serde(default)]
    checksum: Option<u64>,
}

/// What the ledger says of a file that is there.
pub(super) enum Known {
    /// It is the version that was found.
    Same,
    /// It is, if its bytes have this checksum.
    If(u64),
    /// It is not, or nothing is known of it.
    No,
}

/// What a ledger says of each path.
#[derive(Default)]
pub(super) struct Lines(HashMap<String, Line>);

impl Lines {
    /// The lines of a ledger's file, and how many it has in all.
    pub(super) fn read(file: File) -> (Self, usize) {
        let (mut known, mut lines) = (HashMap::new(), 0);
        // As bytes: a line may have been cut off in the middle of a character.
        for line in BufReader::new(file).split(b'\n').map_while(std::result::Result::ok) {
            lines += 1;
            if let Ok(line) = serde_json::from_slice::<Line>(&line) {
                known.insert(line.path.clone(), line);
            }
        }
        (Self(known), lines)
    }

    /// Whether a file was pulled to the item's path before.
    pub(super) fn names(&self, item: &Item) -> bool {
        self.0.contains_key(&item.path)
    }

    /// Whether the file that is there is the version that was found.
    pub(super) fn holds(&self, item: &Item, stat: &Stat) -> Known {
        let line = self.0.get(&item.path).filter(|line| {
            let same_file = line.modified == modified(stat) && u64::try_from(stat.st_size) == Ok(line.bytes);
            same_file && RemoteStore::is_likely(&item.identity, &Identity(line.version.clone()))
        });
        match line {
            None => Known::No,
            Some(line) if line.changed.is_none_or(|then| then == changed(stat)) => Known::Same,
            Some(line) => line.checksum.map_or(Known::No, Known::If),
        }
    }
}

/// The ledger of one destination.
pub(super) struct Ledger {
    file: File,
    known: Lines,
}

impl Ledger {
    /// Reads the ledger, and rewrites it where most of it is of the past.
    pub(super) fn open(tree: &Tree) -> Result<Self> {
        let (known, lines) = Lines::read(tree.state_file(NAME)?);
        let mut file = tree.state_file(NAME)?;
        let failed = |error: std::io::Error| Error::from_io("writing the ledger", &error);
        if lines > 2 * known.0.len() + 100 {
            let name = format!("{NAME}.new");
            file = tree.state_file(&name)?;
            file.set_len(0).map_err(failed)?;
            let all: String = known.0.values().map(written).collect();
            file.write_all(all.as_bytes()).map_err(failed)?;
            tree.replace_state_file(&name, NAME)?;
        }
        // After a line that was cut off, a new one begins.
        std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0)).map_err(failed)?;
        if lines > 0 {
            file.write_all(b"\n").map_err(failed)?;
        }
        Ok(Self { file, known })
    }

    /// Whether the file that is there is the version that was found.
    pub(super) fn holds(&self, item: &Item, stat: &Stat) -> Known {
        self.known.holds(item, stat)
    }

    /// Writes down a file that has got its name.
    pub(super) fn add(&mut self, path: &str, version: &Identity, stat: &Stat, checksum: u64) {
        let line = Line {
            path: path.to_owned(),
            version: version.0.clone(),
            bytes: u64::try_from(stat.st_size).unwrap_or(0),
            modified: modified(stat),
            changed: Some(changed(stat)),
            checksum: Some(checksum),
        };
        // A ledger that cannot be written costs the next pull time, not this one its success.
        if let Err(error) = self.file.write_all(written(&line).as_bytes()) {
            tracing::warn!(%error, "the ledger of pulled files could not be written");
        }
    }
}

fn written(line: &Line) -> String {
    let mut text = serde_json::to_string(line).unwrap_or_default();
    text.push('\n');
    text
}

fn modified(stat: &Stat) -> (i64, i64) {
    (stat.st_mtime, i64::try_from(stat.st_mtime_nsec).unwrap_or(0))
}

pub(super) fn changed(stat: &Stat) -> (i64, i64) {
    (stat.st_ctime, i64::try_from(stat.st_ctime_nsec).unwrap_or(0))
}
