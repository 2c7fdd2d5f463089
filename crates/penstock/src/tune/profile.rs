//! What a load from some storage begins with, and how far a tuner may go from there.
//!
//! The numbers are of three origins: measured (memory, local disks: benchmarks/NOTEBOOK.md), reported by operators (NFS over
//! several connections, one sequential reader for FUSE, object stores), and guessed with wide bounds (everything else). The tuner
//! finds the rest.

use super::storage::{Storage, StorageKind};
use super::tuner::Bounds;

/// More readers than this have not been seen to help anywhere but with an object store.
const MOST: usize = 64;
/// There, connections of some 90 MB/s each have to fill networks of many GB/s.
const MOST_REQUESTS: usize = 128;

/// What a load begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// Readers that copy from the page cache at once.
    pub copies: usize,
    /// Readers that wait for the storage at once.
    pub fetches: Bounds,
    /// Bytes of a block: a power of two, 2 to 8 MiB.
    pub block_bytes: u64,
    /// The most bytes that a reader asks of the storage at once: less than a block where many requests that are not large
    /// are faster, [`u64::MAX`] where a block is one request.
    pub request_bytes: u64,
    /// What a block may shrink to where a load has too few bytes for as many blocks as there are readers.
    pub least_block_bytes: u64,
    /// The largest gap between wanted bytes that is read rather than skipped.
    pub coalesce_gap_bytes: u64,
    /// Whether reads that by-pass the page cache can gain anything. Not from memory, nor from what is stored compressed.
    pub direct: bool,
    /// Whether the storage is at its best when each file is read from front to back by one reader: it looks ahead, or
    /// moves a head. More readers than `fetches.start` are worth a try only where throughput rises with them.
    pub sequential: bool,
    /// Whether several readers have a run of blocks each, through open files of their own: each open file is served from
    /// front to back, and perhaps no faster than one connection brings.
    pub per_reader_ranges: bool,
}

/// What a block may grow to for storage that asks for large requests.
const LARGEST_BLOCK: u64 = 8 << 20;

/// A huge page, so that readers do not fault the same one; small enough to stay in the processor's cache between the
/// reading and the copying; and the request that FUSE daemons look ahead by.
const BLOCK: u64 = 2 << 20;
/// What one direct read of a disk asks for. Measured with 16 readers of a virtual disk that gave 5.4 GB/s with 1 MiB: 512
/// KiB 5.0, 2 MiB 4.0; on days when it gave half of that, 1 MiB took 1.1 of the time of 512 KiB, and 2 MiB 1.2.
const DISK_REQUEST: u64 = 512 << 10;
/// Cheaper to read than a second request, on storage whose requests take well under a millisecond.
const BRIDGE: u64 = 64 << 10;
/// The same where a request crosses a network or moves a head.
const FAR_BRIDGE: u64 = 512 << 10;
/// The same where it waits tens of milliseconds for its first byte.
const REMOTE_BRIDGE: u64 = 1 << 20;
/// Comes in the time that its first byte is waited for.
const LEAST_REMOTE_BLOCK: u64 = 1 << 20;

impl Profile {
    /// The profile for reading from `storage` with `cores` processors.
    pub fn of(storage: &Storage, cores: usize) -> Self {
        let found = Self::alone(storage, cores);
        // What is not worth it here may be where the other bytes are.
        Self { direct: found.direct || storage.mixed, ..found }
    }

    fn alone(storage: &Storage, cores: usize) -> Self {
        let solid = Self {
            // Copying is work for a core, and a dozen keep PCIe 5 busy on any machine met so far.
            copies: cores.clamp(2, 12),
            fetches: solid_state(1),
            block_bytes: BLOCK,
            request_bytes: DISK_REQUEST,
            least_block_bytes: BLOCK,
            coalesce_gap_bytes: BRIDGE,
            direct: true,
            sequential: false,
            per_reader_ranges: false,
        };
        let far = Self { coalesce_gap_bytes: FAR_BRIDGE, request_bytes: u64::MAX, ..solid };
        match storage.kind {
            // What is not in memory after all is in swap.
            StorageKind::Memory => {
                Self { fetches: bounds(cores.clamp(2, 8), 1, solid.copies), direct: false, ..solid }
            }
            StorageKind::Disk => match &storage.disk {
                None => solid,
                Some(disk) if disk.rotational => Self {
                    // One stream for each arm; a second one makes them seek.
                    fetches: bounds(disk.members, 1, disk.members.saturating_mul(4)),
                    coalesce_gap_bytes: FAR_BRIDGE,
                    request_bytes: u64::MAX,
                    sequential: true,
                    ..solid
                },
                Some(disk) => Self { fetches: solid_state(disk.members), ..solid },
            },
            // Threads share the mount's connections: where it has one, a few fill it.
            StorageKind::Nfs => Self { fetches: bounds(16, 2, MOST), ..far },
            StorageKind::Smb => Self { fetches: bounds(8, 2, 32), ..far },
            // Files are striped over servers, and the preferred request is a stripe.
            StorageKind::Parallel => {
                Self { fetches: bounds(16, 4, MOST), block_bytes: request(storage.preferred_bytes), ..far }
            }
            // The daemon looks ahead of a reader that goes from front to back, and loses that with every jump.
            StorageKind::Fuse => {
                Self { fetches: bounds(1, 1, 16), sequential: true, per_reader_ranges: true, ..far }
            }
            // The host's page cache behind one or a few queues.
            StorageKind::Virtiofs => Self { fetches: bounds(8, 1, 32), ..solid },
            StorageKind::NineP => Self { fetches: bounds(4, 1, 16), ..solid },
            // Every request waits tens of milliseconds for its first byte, and a connection brings tens of megabytes a
            // second however fast the network is. So many are in flight, each large enough that the wait is a small part
            // of it and small enough that a slow one does not hold up the end of the load.
            StorageKind::Remote => Self {
                // Nothing is copied from a page cache.
                copies: 1,
                fetches: requests(cores),
                block_bytes: LARGEST_BLOCK,
                least_block_bytes: LEAST_REMOTE_BLOCK,
                coalesce_gap_bytes: REMOTE_BRIDGE,
                direct: false,
                ..far
            },
            // The readers decompress.
            StorageKind::Image => Self { fetches: bounds(cores, 1, 2 * cores), direct: false, ..solid },
        }
    }
}

/// Readers for a solid-state disk, or `members` of them. It wants many requests in flight, however few the cores, but not
/// as many as it would take: a virtual disk was at its best with 8 to 16 MiB under way on a day of 5 GB/s, and gave 0.8 to
/// 0.9 of that with 32 MiB, and 0.7 with 64; on days of half that rate with 4 to 8 MiB.
fn solid_state(members: usize) -> Bounds {
    const START: usize = 12;
    const MOST_OF_ONE: usize = 32;
    let start = members.saturating_mul(8).clamp(START, MOST_OF_ONE);
    bounds(start, 2, members.saturating_mul(MOST_OF_ONE))
}

/// Requests to an object store: 24 and more, for connections are slow as a rule. Where the network is fast, few cores have
/// enough to do with two requests each: so they begin with these until it is known which it is. Measured on two cores:
/// over loopback 4 requests took 0.92 of the CPU time of 24; over connections of 90 MB/s a load that began with 8 and
/// searched upwards took 1.25 of the time of one that went on with 24, and one that began with 4 so 1.56.
fn requests(cores: usize) -> Bounds {
    const LEAST: usize = 4;
    let start = (2 * cores).clamp(24, 64);
    Bounds { initial: start.min(2 * cores).max(LEAST), start, least: LEAST, most: MOST_REQUESTS }
}

/// A range that holds its start and goes no higher than [`MOST`], whatever is given.
fn bounds(start: usize, least: usize, most: usize) -> Bounds {
    let least = least.clamp(1, MOST);
    let most = most.clamp(least, MOST);
    let start = start.clamp(least, most);
    Bounds { initial: start, start, least, most }
}

/// The request that storage prefers, as a block.
fn request(preferred: u64) -> u64 {
    preferred.clamp(BLOCK, LARGEST_BLOCK).next_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::Disk;

    fn on(kind: StorageKind) -> Storage {
        Storage { kind, ..Storage::unknown() }
    }

    const ALL: [StorageKind; 10] = [
        StorageKind::Memory,
        StorageKind::Disk,
        StorageKind::Nfs,
        StorageKind::Smb,
        StorageKind::Parallel,
        StorageKind::Fuse,
        StorageKind::Virtiofs,
        StorageKind::NineP,
        StorageKind::Image,
        StorageKind::Remote,
    ];

    fn disks(members: usize, rotational: bool) -> Storage {
        let disk = Disk { name: "md0".to_owned(), members, rotational };
        Storage { disk: Some(disk), ..Storage::unknown() }
    }

    #[test]
    fn every_start_lies_within_its_bounds_on_one_core_and_on_many() {
        let disks = [1, 4, 200].into_iter().flat_map(|members| [true, false].map(|it| disks(members, it)));
        for storage in ALL.into_iter().map(on).chain(disks) {
            for cores in [1, 2, 8, 256] {
                let Profile { fetches, block_bytes, .. } = Profile::of(&storage, cores);
                assert!(1 <= fetches.least && fetches.least <= fetches.start, "{storage:?} {fetches:?}");
                assert!(fetches.start <= fetches.most, "{storage:?} {fetches:?}");
                let most = if storage.kind == StorageKind::Remote { MOST_REQUESTS } else { MOST };
                assert!(fetches.most <= most, "{storage:?} {fetches:?}");
                assert!(block_bytes.is_power_of_two() && (BLOCK..=LARGEST_BLOCK).contains(&block_bytes));
            }
        }
    }

    #[test]
    fn requests_over_a_network_begin_with_two_for_each_core_where_cores_are_few() {
        let fetches = |cores| Profile::of(&on(StorageKind::Remote), cores).fetches;
        assert_eq!([1, 2, 6, 12, 16, 256].map(|cores| fetches(cores).initial), [4, 4, 12, 24, 32, 64]);
        assert_eq!([1, 2, 6, 12, 16, 256].map(|cores| fetches(cores).start), [24, 24, 24, 24, 32, 64]);
    }

    #[test]
    fn a_disk_gets_several_readers_on_one_core_and_a_raid_more() {
        let readers = |members| Profile::of(&disks(members, false), 1).fetches.start;
        assert_eq!((readers(1), readers(4), readers(100)), (12, 32, 32));
    }

    #[test]
    fn spinning_disks_are_read_in_order_by_one_reader_each() {
        let profile = Profile::of(&disks(3, true), 16);
        assert_eq!((profile.fetches.start, profile.sequential), (3, true));
    }

    #[test]
    fn fuse_begins_with_one_direct_reader_in_order_and_blocks_of_2_mib() {
        let profile = Profile::of(&on(StorageKind::Fuse), 16);
        assert_eq!(profile.fetches, Bounds { initial: 1, start: 1, least: 1, most: 16 });
        assert!(profile.direct && profile.sequential && profile.per_reader_ranges);
        assert_eq!(profile.block_bytes, 2 << 20);
    }

    #[test]
    fn stripes_make_larger_blocks_within_limits() {
        for (preferred, block) in
            [(4096, 2 << 20), (4 << 20, 4 << 20), (5 << 20, 8 << 20), (64 << 20, 8 << 20)]
        {
            let storage = Storage { preferred_bytes: preferred, ..on(StorageKind::Parallel) };
            assert_eq!(Profile::of(&storage, 16).block_bytes, block);
        }
    }

    #[test]
    fn only_what_this_machine_reads_itself_is_asked_for_less_than_a_block() {
        for kind in [StorageKind::Nfs, StorageKind::Parallel, StorageKind::Fuse, StorageKind::Remote] {
            assert_eq!(Profile::of(&on(kind), 16).request_bytes, u64::MAX, "{kind:?}");
        }
        assert_eq!(Profile::of(&on(StorageKind::Disk), 16).request_bytes, 512 << 10);
    }

    #[test]
    fn memory_and_compressed_images_are_not_read_directly() {
        assert!(!Profile::of(&on(StorageKind::Memory), 4).direct);
        assert!(!Profile::of(&on(StorageKind::Image), 4).direct);
    }
}
