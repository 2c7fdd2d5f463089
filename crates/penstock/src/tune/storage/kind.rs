//! File systems by name and by number, in classes that want to be read alike.
//!
//! What is reached by URL is a class too, though no file system. Names are those of `/proc/self/mountinfo`, and preferred. Numbers are those of `statfs(2)`, for where there is no
//! usable mount table; they are written in linux/magic.h and in the file systems' own sources.

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
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Memory,
        Self::Disk,
        Self::Nfs,
        Self::Smb,
        Self::Parallel,
        Self::Fuse,
        Self::Virtiofs,
        Self::NineP,
        Self::Image,
        Self::Remote,
    ];

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

    /// The class and the name of the file system with that `statfs` number.
    pub(super) fn of_number(f_type: u64) -> Option<(Self, &'static str)> {
        let name = match f_type & 0xffff_ffff {
            0x0102_1994 => "tmpfs",
            0x8584_58f6 => "ramfs",
            0x9584_58f6 => "hugetlbfs",
            0xef53 => "ext4",
            0x5846_5342 => "xfs",
            0x9123_683e => "btrfs",
            0x2fc1_2fc1 => "zfs",
            0xf2f5_2010 => "f2fs",
            0xca45_1a4e => "bcachefs",
            0x794c_7630 => "overlay",
            0x6969 => "nfs",
            0x517b => "smbfs",
            0xff53_4d42 => "cifs",
            0xfe53_4d42 => "smb3",
            0x00c3_6400 => "ceph",
            0x0bd0_0bd0 => "lustre",
            0x4750_4653 => "gpfs",
            0x1983_0326 => "beegfs",
            0xaad7_aaea => "panfs",
            0x2003_0528 => "pvfs2",
            0x5346_414f | 0x6b41_4653 => "afs",
            0x6573_5546 => "fuse",
            0x6a65_6a63 => "virtiofs",
            0x0102_1997 => "9p",
            0x7371_7368 => "squashfs",
            0xe0f5_e1e2 => "erofs",
            0x28cd_3d45 => "cramfs",
            _ => return None,
        };
        Some((Self::of_name(name), name))
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
        "smb3" => "cifs".to_owned(),
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_agree() {
        for (number, kind) in [
            (0x0102_1994, StorageKind::Memory),
            (0xef53, StorageKind::Disk),
            (0x6969, StorageKind::Nfs),
            (0xff53_4d42, StorageKind::Smb),
            (0x0bd0_0bd0, StorageKind::Parallel),
            (0x6573_5546, StorageKind::Fuse),
            (0x0102_1997, StorageKind::NineP),
            (0x7371_7368, StorageKind::Image),
            // As a 64-bit kernel sign-extends it.
            (0xffff_ffff_ff53_4d42, StorageKind::Smb),
        ] {
            let (found, name) = StorageKind::of_number(number).unwrap();
            assert_eq!((found, StorageKind::of_name(name)), (kind, kind), "{name}");
        }
        assert_eq!(StorageKind::of_number(0x1234), None);
    }

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
