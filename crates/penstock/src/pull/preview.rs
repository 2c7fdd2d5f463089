//! What a pull would do, without doing any of it: nothing is made, written or locked.
//!
//! Another pull that runs meanwhile may make it untrue.

use std::fs::File;
use std::path::Path;

use rustix::fs::{FileType, lstat};

use super::ledger::{self, Known, Lines};
use super::partial_file::{can_resume, map_name};
use super::session::{How, PulledFile, check};
use super::source::Item;
use super::tree::{PARTS, STATE};
use crate::error::Result;
use crate::store::{RemoteStore, Store};

/// What would become of each item in the directory `destination`. Objects that no listing describes are opened for it.
///
/// # Errors
/// As `Pull::start`; what the store fails with.
pub fn preview(store: &RemoteStore, items: &[Item], destination: &Path) -> Result<Vec<PulledFile>> {
    check(items)?;
    let state = destination.join(STATE);
    let known = File::open(state.join(ledger::NAME)).map(|file| Lines::read(file).0).unwrap_or_default();
    let of = |item: &Item| -> Result<PulledFile> {
        let item = match item.identity.0.is_empty() {
            true => {
                let object = store.open(&item.location)?;
                Item { bytes: object.bytes(), identity: object.identity(), ..item.clone() }
            }
            false => item.clone(),
        };
        let stat = lstat(destination.join(&item.path)).ok();
        let stat = stat.filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
        let is_there = stat.is_some_and(|stat| !matches!(known.holds(&item, &stat), Known::No));
        let map = || File::open(state.join(PARTS).join(map_name(&item.path)));
        let how = match is_there {
            true => How::Kept,
            false if map().is_ok_and(|map| can_resume(&map, &item)) => How::Resumed,
            false => How::Pulled,
        };
        Ok(PulledFile { path: item.path, bytes: item.bytes, how })
    };
    items.iter().map(of).collect()
}
