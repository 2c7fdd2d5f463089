//! What a path lies on: which file system, over which wire or on which disks, with which options.
//!
//! * `mounts`: the mount table, and the mount that holds a file. `kind`: file systems by name, in classes.
//! * `options`: what a mount's options mean for its speed, and the notes that are worth making.
//! * `disk`: the block devices below. `overlay`: the layer that a container's file really lies in.
//! * `survey`: where most of the bytes of a load are.
//!
//! Promises: no answer of the kernel, missing or absurd, is an error; what cannot be told is an unknown disk. Nothing is
//! asked of a file server: `statx` is answered from what the kernel has, and `statfs`, which would go there, is only
//! asked where the mount table is of no use.

mod disk;
mod kind;
mod mounts;
mod options;
mod overlay;
mod survey;
#[cfg(test)]
mod tests;

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, major, minor, statx};

use mounts::{Mount, MountLookup};

pub use disk::Disk;
pub use kind::StorageKind;
pub use survey::Survey;

/// What was found out about the storage of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Storage {
    /// Its class.
    pub kind: StorageKind,
    /// A few words for statistics: `ext4 on nvme`, `nfs4 (nconnect missing)`, `tmpfs`, `fuse.gcsfuse`, `s3`.
    pub name: String,
    /// The block devices below, where they can be told.
    pub disk: Option<Disk>,
    /// Connections to a file server; 1 where nothing is said.
    pub connections: usize,
    /// The request that the file system says it prefers, in bytes (`st_blksize`).
    pub preferred_bytes: u64,
    /// Whether a load has bytes elsewhere, too; only a [`Survey`] knows.
    pub mixed: bool,
    /// What could be done to make it faster.
    pub notes: Vec<String>,
}

impl Storage {
    /// The storage of the file or directory at `path`; [`Storage::unknown`] where nothing can be told.
    pub fn of(path: &Path) -> Self {
        System::default().storage_of(path)
    }

    /// The object store or HTTP server that a URL leads to, which is told by its scheme. Nobody is asked.
    pub fn of_url(url: &str) -> Self {
        let scheme = url.split_once("://").map_or(url, |(scheme, _)| scheme);
        Self { kind: StorageKind::Remote, name: scheme.to_ascii_lowercase(), ..Self::unknown() }
    }

    /// Whether the bytes come over a network.
    pub fn is_network(&self) -> bool {
        self.kind.is_network() || self.disk.as_ref().is_some_and(|disk| disk.network)
    }

    /// A disk of which nothing is known.
    pub fn unknown() -> Self {
        Self {
            kind: StorageKind::Disk,
            name: "unknown".to_owned(),
            disk: None,
            connections: 1,
            preferred_bytes: 4096,
            mixed: false,
            notes: Vec::new(),
        }
    }

    fn lying_on(mut self, disk: Option<Disk>) -> Self {
        if let Some(disk) = &disk {
            self.name = format!("{} on {}", self.name, disk.shown());
        }
        self.disk = disk;
        self
    }
}

/// Where the kernel's answers are read from.
#[derive(Debug, Clone)]
pub struct System {
    /// The mount table.
    pub mountinfo: PathBuf,
    /// The root of sysfs.
    pub sys: PathBuf,
}

impl Default for System {
    fn default() -> Self {
        Self { mountinfo: "/proc/self/mountinfo".into(), sys: "/sys".into() }
    }
}

/// How many overlays are looked through: containers in containers.
const OVERLAYS: usize = 3;

impl System {
    /// The storage of the file or directory at `path`.
    pub fn storage_of(&self, path: &Path) -> Storage {
        self.look(path, &self.mounts())
    }

    fn mounts(&self) -> Vec<Mount> {
        std::fs::read(&self.mountinfo).map(|table| mounts::parse(&table)).unwrap_or_default()
    }

    fn look(&self, path: &Path, mounts: &[Mount]) -> Storage {
        self.look_below(path, mounts, OVERLAYS).unwrap_or_else(Storage::unknown)
    }

    fn look_below(&self, path: &Path, mounts: &[Mount], overlays: usize) -> Option<Storage> {
        let file = Seen::at(path)?;
        // Links are resolved only where a path is needed.
        let known = mounts.iter().find(|mount| Some(mount.id) == file.mount_id);
        let real = match known {
            Some(mount) if mount.fs_type != "overlay" => None,
            _ => path.canonicalize().ok(),
        };
        let place = MountLookup {
            mount_id: file.mount_id,
            device: file.device,
            path: real.as_deref().unwrap_or(path),
        };
        let Some(mount) = mounts::holding(mounts, &place) else {
            return self.by_number(path, &file);
        };
        if mount.fs_type != "overlay" {
            return Some(self.on(mount, &file));
        }
        let below = overlays
            .checked_sub(1)
            .and_then(|left| self.look_below(&overlay::look_through(mount, place.path)?, mounts, left));
        Some(match below {
            Some(below) => Storage { name: format!("overlay on {}", below.name), ..below },
            None => Storage { name: "overlay".to_owned(), ..Storage::unknown() },
        })
    }

    /// A file on a mount that is no overlay.
    fn on(&self, mount: &Mount, file: &Seen) -> Storage {
        let kind = StorageKind::of_name(&mount.fs_type);
        let options::Described { name, connections, notes } = options::describe(mount, kind);
        let disk = (kind == StorageKind::Disk).then(|| self.disk(mount, file)).flatten();
        let preferred_bytes = file.preferred_bytes;
        Storage { kind, name, disk: None, connections, preferred_bytes, mixed: false, notes }.lying_on(disk)
    }

    /// A file that the mount table says nothing of.
    fn by_number(&self, path: &Path, file: &Seen) -> Option<Storage> {
        let answer = rustix::fs::statfs(path).ok()?;
        let (kind, name) = StorageKind::of_number(answer.f_type.cast_unsigned())?;
        let disk = (kind == StorageKind::Disk).then(|| Disk::find(&self.sys, file.device)).flatten();
        let (name, preferred_bytes) = (name.to_owned(), file.preferred_bytes);
        Some(Storage { kind, name, preferred_bytes, ..Storage::unknown() }.lying_on(disk))
    }

    fn disk(&self, mount: &Mount, file: &Seen) -> Option<Disk> {
        if file.device.0 != 0 {
            return Disk::find(&self.sys, file.device);
        }
        // File systems over several disks (btrfs) have a number of their own; their source is one of the disks.
        let source = std::fs::metadata(&mount.source).ok().filter(|it| it.file_type().is_block_device())?;
        Disk::find(&self.sys, (major(source.rdev()), minor(source.rdev())))
    }
}

/// What the kernel says of a file without asking anyone else.
struct Seen {
    mount_id: Option<u64>,
    device: (u32, u32),
    preferred_bytes: u64,
}

impl Seen {
    fn at(path: &Path) -> Option<Self> {
        let asked = StatxFlags::MNT_ID;
        match statx(CWD, path, AtFlags::STATX_DONT_SYNC, asked) {
            Ok(answer) => Some(Self {
                mount_id: (answer.stx_mask & asked.bits() != 0).then_some(answer.stx_mnt_id),
                device: (answer.stx_dev_major, answer.stx_dev_minor),
                preferred_bytes: answer.stx_blksize.into(),
            }),
            // Before Linux 4.11, or forbidden by a seccomp profile.
            Err(rustix::io::Errno::NOSYS | rustix::io::Errno::PERM) => {
                let metadata = std::fs::metadata(path).ok()?;
                Some(Self {
                    mount_id: None,
                    device: (major(metadata.dev()), minor(metadata.dev())),
                    preferred_bytes: metadata.blksize(),
                })
            }
            Err(_) => None,
        }
    }
}
