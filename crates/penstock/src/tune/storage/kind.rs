//! File systems by name, in classes that want to be read alike.
//!
//! What is reached by URL is a class too, though no file system. Names are those of `/proc/self/mountinfo`.

/// Classes of storage that want to be read differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StorageKind {
    /// Memory: tmpfs, ramfs, hugetlbfs.
    Memory,
    /// A disk of this machine, or anything that nothing better is known of.
    Disk,
    /// A file server over NFS.
    Nfs,
    /// A file server over SMB.
    Smb,
    /// Many servers: Ceph, Lustre, GPFS, BeeGFS, `WekaFS` and their like.
    Parallel,
    /// A file system in a process of this machine, usually in front of an object store.
    Fuse,
    /// The host's files in a virtual machine, through virtio.
    Virtiofs,
    /// The host's files through the 9p protocol.
    NineP,
    /// A compressed, read-only image: squashfs, erofs.
    Image,
    /// An object store or an HTTP server, asked by this process itself.
    Remote,
}

impl StorageKind {
    /// Its name in figures: one of ten words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Disk => "disk",
            Self::Nfs => "nfs",
            Self::Smb => "smb",
            Self::Parallel => "parallel",
            Self::Fuse => "fuse",
            Self::Virtiofs => "virtiofs",
            Self::NineP => "9p",
            Self::Image => "image",
            Self::Remote => "remote",
        }
    }

    /// Whether the bytes come over a network.
    pub(super) fn is_network(self) -> bool {
        matches!(self, Self::Nfs | Self::Smb | Self::Parallel | Self::Remote)
    }

    /// The class of the file system called `fs_type`.
    pub(super) fn of_name(fs_type: &str) -> Self {
        match fs_type {
            "tmpfs" | "ramfs" | "hugetlbfs" | "devtmpfs" => Self::Memory,
            "nfs" | "nfs4" => Self::Nfs,
            "cifs" | "smb3" | "smbfs" => Self::Smb,
            "ceph" | "lustre" | "gpfs" | "beegfs" | "wekafs" | "panfs" | "pvfs2" | "orangefs" | "yrfs"
            | "cpfs" | "hf3fs" | "quobyte" | "afs" => Self::Parallel,
            "virtiofs" => Self::Virtiofs,
            "9p" => Self::NineP,
            "squashfs" | "erofs" | "cramfs" => Self::Image,
            "fuse" => Self::Fuse,
            _ => match fs_type.strip_prefix("fuse.") {
                Some(subtype) if PASS_THROUGH.contains(&subtype) => Self::Disk,
                Some(_) => Self::Fuse,
                // `fuseblk` is a driver of a local disk (ntfs-3g, exfat-fuse) that happens to be a process.
                None => Self::Disk,
            },
        }
    }
}

/// FUSE file systems that hand reads on to files of this machine, which may be read by many at once.
const PASS_THROUGH: [&str; 6] = ["fuse-overlayfs", "mergerfs", "bindfs", "ntfs-3g", "lxcfs", "encfs"];

/// FUSE programs that are mounted without a subtype, under their own name as the source.
const SOURCES: [&str; 6] = ["mountpoint-s3", "blobfuse2", "blobfuse", "s3fs", "alluxio-fuse", "geesefs"];

/// What a file system is called in statistics.
pub(super) fn shown(fs_type: &str, source: &str) -> String {
    match fs_type {
        "fuse" if SOURCES.contains(&source) => format!("fuse.{source}"),
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fuse_file_system_over_local_files_is_a_disk() {
        for (name, kind) in [
            ("fuseblk", StorageKind::Disk),
            ("fuse.fuse-overlayfs", StorageKind::Disk),
            ("fuse.gcsfuse", StorageKind::Fuse),
            ("fuse.something-new", StorageKind::Fuse),
            ("fuse", StorageKind::Fuse),
            ("fusectl", StorageKind::Disk),
        ] {
            assert_eq!(StorageKind::of_name(name), kind, "{name}");
        }
    }
}
