//! What a pull would do, without doing any of it: nothing is made, written or locked.
//!
//! Another pull that runs meanwhile may make it untrue.

use std::fs::File;
use std::path::Path;

use rustix::fs::{FileType, lstat};

use super::ledger::{Known, holds};
use super::partial_file::{can_resume, map_name};
use super::session::{How, PulledFile, check};
use super::source::Item;
use super::tree::{PARTS, STATE};
use crate::error::Result;
use crate::store::locked_file::LockedFile;
use crate::store::{RemoteStore, Store};

/// What would become of each item in the directory `destination`. An object is opened where its listing does not say
/// which version it is, and where something of it is there: listings name versions in other words than answers do.
///
/// # Errors
/// As `Pull::start`; what the store fails with.
pub fn preview(store: &RemoteStore, items: &[Item], destination: &Path) -> Result<Vec<PulledFile>> {
    check(items)?;
    let state = destination.join(STATE);
    let of = |item: &Item| -> Result<PulledFile> {
        let stat = lstat(destination.join(&item.path)).ok();
        let stat = stat.filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
        let pulled = || File::open(state.join(map_name(&item.path))).map(LockedFile::new).ok();
        let known = |item: &Item| Some(holds(pulled()?, item, &stat?));
        let is_kept = |item: &Item| !matches!(known(item), None | Some(Known::No));
        let done = |item: &Item, how| Ok(PulledFile { path: item.path.clone(), bytes: item.bytes, how });
        if is_kept(item) {
            return done(item, How::Kept);
        }
        let map = File::open(state.join(PARTS).join(map_name(&item.path))).ok();
        if !item.identity.0.is_empty() && map.is_none() && known(item).is_none() {
            return done(item, How::Pulled);
        }
        let object = store.open(&item.location)?;
        let opened = Item { bytes: object.bytes(), identity: object.identity(), ..item.clone() };
        let how = match map {
            _ if is_kept(&opened) => How::Kept,
            Some(map) if can_resume(&map, &opened) => How::Resumed,
            _ => How::Pulled,
        };
        done(&opened, how)
    };
    items.iter().map(of).collect()
}
