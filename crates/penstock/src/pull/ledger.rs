//! What was pulled before: of each file the map of its blocks, which says which version of the object it is, sealed with
//! the file's times when it got its name.
//!
//! A file that was written to since is pulled again. Where only its change time differs, it may be that it was written to
//! and its modification time put back, or that `chmod`, `chown` or a hard link was all: then its blocks are compared with
//! their checksums.

use rustix::fs::Stat;

use super::partial_file::BLOCK_BYTES;
use super::source::Item;
use crate::store::block_map::BlockMap;
use crate::store::locked_file::LockedFile;
use crate::store::{Identity, RemoteStore};

/// What is known of a file that is there.
pub(super) enum Known {
    /// It is the version that was found.
    Same,
    /// It is, if its blocks are those of this map.
    If(BlockMap),
    /// It is not, or nothing is known of it.
    No,
}

/// Whether a file that is like `stat`, and that `map` came with, is the version that was found.
pub(super) fn holds(map: LockedFile, item: &Item, stat: &Stat) -> Known {
    let found = || {
        let (label, bytes, block_bytes) = BlockMap::describe(&map)?;
        let version = Identity(label.strip_prefix(&*item.path)?.strip_prefix('\n')?.to_owned());
        let same_size = block_bytes == BLOCK_BYTES && u64::try_from(stat.st_size) == Ok(bytes);
        if !same_size || !RemoteStore::is_likely(&item.identity, &version) {
            return None;
        }
        let (map, _) = BlockMap::open(map, &label, bytes, block_bytes).ok()?;
        let (then, now) = (map.seal()?, times(stat));
        (then[..2] == now[..2]).then(|| if then == now { Known::Same } else { Known::If(map) })
    };
    found().unwrap_or(Known::No)
}

/// The modification time and the change time of a file.
pub(super) fn times(stat: &Stat) -> [i64; 4] {
    let nanos = |nanos| i64::try_from(nanos).unwrap_or(0);
    [stat.st_mtime, nanos(stat.st_mtime_nsec), stat.st_ctime, nanos(stat.st_ctime_nsec)]
}
