//! What kind of storage a path leads to, and what a load from there begins with.

use std::path::Path;

use super::Bounds;

/// Classes of file systems that want to be read differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileSystem {
    /// Memory: tmpfs, ramfs.
    Memory,
    /// A disk of this machine.
    Disk,
    /// A file server: NFS, SMB, Ceph, Lustre and their like.
    Network,
    /// A user-space file system.
    Fuse,
}

impl FileSystem {
    /// The class of the file system that holds `path`; [`FileSystem::Disk`] where the kernel does not say.
    pub fn of(path: &Path) -> Self {
        // Magic numbers of statfs(2) and of the file systems' own sources.
        match rustix::fs::statfs(path).map(|answer| answer.f_type.cast_unsigned() & 0xffff_ffff) {
            Ok(0x0102_1994 | 0x8584_58f6 | 0x9584_58f6) => Self::Memory,
            Ok(
                0x6969 | 0x517b | 0xff53_4d42 | 0xfe53_4d42 | 0x00c3_6400 | 0x0bd0_0bd0 | 0x4750_4653
                | 0x7461_636c,
            ) => Self::Network,
            Ok(0x6573_5546) => Self::Fuse,
            _ => Self::Disk,
        }
    }

    /// A word for statistics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Disk => "disk",
            Self::Network => "network",
            Self::Fuse => "fuse",
        }
    }
}

/// How a kind of storage is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// Readers that wait for it at once.
    pub fetches: Bounds,
    /// The largest gap between wanted bytes that is read rather than skipped.
    pub bridge_bytes: u64,
}

impl Profile {
    /// The profile for reading from `file_system` with `cores` processors.
    pub fn of(file_system: FileSystem, cores: usize) -> Self {
        let fetches = match file_system {
            // What is not in memory after all is in swap.
            FileSystem::Memory => Bounds { start: cores.clamp(2, 8), least: 1, most: cores.clamp(2, 16) },
            // A disk wants several requests in flight, however few the cores.
            FileSystem::Disk => Bounds { start: 8, least: 2, most: 32 },
            FileSystem::Network => Bounds { start: 16, least: 4, most: 64 },
            FileSystem::Fuse => Bounds { start: 4, least: 1, most: 16 },
        };
        Self { fetches, bridge_bytes: 64 << 10 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_memory_and_what_is_not_there_is_taken_for_a_disk() {
        assert_eq!(FileSystem::of(Path::new("/dev/shm")), FileSystem::Memory);
        assert_eq!(FileSystem::of(Path::new("/no/such/path")), FileSystem::Disk);
    }

    #[test]
    fn a_disk_gets_several_readers_on_one_core() {
        assert_eq!(Profile::of(FileSystem::Disk, 1).fetches.start, 8);
    }
}
