//! What a path lies on: which file system, and on which disks.
//!
//! * `mounts`: the mount that holds a file. `kind`: file systems by name, in classes.
//! * `disk`: the block devices below. `survey`: where most of the bytes of a load are.
//!
//! Promises: no answer of the kernel, missing or absurd, is an error; what cannot be told is an unknown disk. Nothing is
//! asked of a file server: `statx` is answered from what the kernel has.

mod disk;
mod kind;
mod mounts;
mod survey;
#[cfg(test)]
mod tests;

use std::path::Path;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use mounts::Mount;

pub use disk::Disk;
pub use kind::StorageKind;
pub use survey::Survey;

/// What was found out about the storage of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Storage {
    /// Its class.
    pub kind: StorageKind,
    /// A few words for statistics: `ext4 on nvme0n1p2`, `nfs4`, `tmpfs`, `fuse.gcsfuse`, `overlay`, `s3`.
    pub name: String,
    /// The block devices below, where they can be told.
    pub disk: Option<Disk>,
    /// The request that the file system says it prefers, in bytes (`st_blksize`).
    pub preferred_bytes: u64,
    /// Whether a load has bytes elsewhere, too; only a [`Survey`] knows.
    pub mixed: bool,
    /// Where those are.
    pub notes: Vec<String>,
}

impl Storage {
    /// The storage of the file or directory at `path`; [`Storage::unknown`] where nothing can be told.
    pub fn of(path: &Path) -> Self {
        Self::look(path).unwrap_or_else(Self::unknown)
    }

    /// The object store or HTTP server that a URL leads to, which is told by its scheme. Nobody is asked.
    pub fn of_url(url: &str) -> Self {
        let scheme = url.split_once("://").map_or(url, |(scheme, _)| scheme);
        Self { kind: StorageKind::Remote, name: scheme.to_ascii_lowercase(), ..Self::unknown() }
    }

    /// Whether the bytes come over a network.
    pub fn is_network(&self) -> bool {
        self.kind.is_network()
    }

    /// A disk of which nothing is known.
    pub fn unknown() -> Self {
        Self {
            kind: StorageKind::Disk,
            name: "unknown".to_owned(),
            disk: None,
            preferred_bytes: 4096,
            mixed: false,
            notes: Vec::new(),
        }
    }

    fn look(path: &Path) -> Option<Self> {
        let file = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::MNT_ID).ok()?;
        let mount_id = (file.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(file.stx_mnt_id);
        let device = (file.stx_dev_major, file.stx_dev_minor);
        let table = std::fs::read("/proc/self/mountinfo").ok()?;
        let mut storage = Self::on(&mounts::holding(&table, mount_id, device)?);
        storage.preferred_bytes = file.stx_blksize.into();
        if storage.kind == StorageKind::Disk {
            storage.disk = Disk::find(Path::new("/sys"), device);
        }
        if let Some(disk) = &storage.disk {
            storage.name = format!("{} on {}", storage.name, disk.name);
        }
        Some(storage)
    }

    /// The storage of a file of which only the mount is known.
    fn on(mount: &Mount) -> Self {
        let kind = StorageKind::of_name(&mount.fs_type);
        Self { kind, name: kind::shown(&mount.fs_type, &mount.source), ..Self::unknown() }
    }
}
