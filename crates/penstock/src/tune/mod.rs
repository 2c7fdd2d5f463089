//! Where a load begins, and how it finds the rest: readers and blocks for the storage and the destination at hand.
//!
//! * [`Storage`] (`storage`): what a path lies on, as the kernel tells it. [`Survey`]: the same for the objects of a
//!   checkpoint.
//! * [`Profile`] (`profile`): start values and bounds for that storage. It holds no behaviour: the store and the
//!   pipeline read it.
//! * [`Tuner`] (`tuner`): finds the number of readers while a load runs, within the profile's bounds.
//! * [`Settings`]: a profile with what a person set in [`Config`] in place of what was found.
//!
//! Nothing here can fail a load. Where the kernel does not answer, or answers nonsense, storage is an unknown disk.

mod profile;
mod storage;
mod tuner;

use crate::config::Config;

pub use profile::Profile;
pub use storage::{Disk, Storage, StorageKind, Survey};
pub use tuner::{Bounds, Epoch, Readers, Trial, Tuner};

/// Host staging memory of a load where nothing is said.
const STAGING_BYTES: u64 = 512 << 20;

/// What a load runs with: its profile, with what a person set in place of what was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// How many readers do what.
    pub readers: Readers,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// What a block may shrink to in a load of few bytes.
    pub least_block_bytes: u64,
    /// The largest gap between wanted bytes that is read rather than skipped.
    pub coalesce_gap_bytes: u64,
    /// Whether reads that by-pass the page cache can gain anything.
    pub direct: bool,
    /// The most bytes that a reader asks of the storage at once.
    pub request_bytes: u64,
    /// Budget of the staging arena in bytes.
    pub staging_bytes: u64,
    /// Whether readers leave a core to who drives the load, even while all they do is copying from the page cache. What
    /// comes over a network is work for as many cores as there are.
    pub leaves_a_core: bool,
}

/// The cores that this process may use; 4 where nobody says.
pub(crate) fn available_cores() -> usize {
    std::thread::available_parallelism().map_or(4, std::num::NonZeroUsize::get)
}

impl Settings {
    /// The settings for a load from `storage` to host memory or a device.
    pub fn choose(config: &Config, storage: &Storage, to_device: bool) -> Self {
        let cores = available_cores();
        let found = Profile::of(storage, cores);
        // Every copy to a device takes 3 us besides its bytes: on PCIe 5, blocks of 2 MiB reach 0.92 of its rate, 4 MiB
        // 0.96, 8 MiB 0.97. But blocks that have fallen out of the processor's cache before they are copied are slower by
        // a third, and how much of that cache there is depends on who else uses it: 16 MiB reach 0.8 anywhere, 8 MiB 0.6
        // on a machine with busy neighbours. What is read in order is far slower than that, and looks ahead by requests of
        // its own size.
        let device_block = if to_device && !found.sequential { 4 << 20 } else { 0 };
        let staging_bytes = config.staging_bytes.unwrap_or(STAGING_BYTES);
        let shrinks = found.least_block_bytes < found.block_bytes;
        let block_bytes = match to_device && shrinks {
            // As many requests as there may ever be have a buffer each.
            true => {
                let buffer = staging_bytes / found.fetches.most as u64;
                buffer.clamp(found.least_block_bytes, found.block_bytes)
            }
            false => found.block_bytes.max(device_block),
        };
        let block_bytes = config.block_bytes.unwrap_or(block_bytes).next_multiple_of(4096);
        let shrinks = shrinks && config.block_bytes.is_none();
        let readers = config.readers.map_or(
            Readers {
                copies: found.copies,
                fetches: found.fetches,
                threads: found.copies + found.fetches.most,
                per_reader_ranges: found.per_reader_ranges,
            },
            |readers| Readers { per_reader_ranges: found.per_reader_ranges, ..Readers::fixed(readers) },
        );
        Self {
            readers,
            leaves_a_core: !storage.is_network() && readers.copies < cores,
            block_bytes,
            least_block_bytes: if shrinks { found.least_block_bytes } else { block_bytes },
            coalesce_gap_bytes: found.coalesce_gap_bytes,
            direct: found.direct,
            request_bytes: found.request_bytes,
            staging_bytes,
        }
    }

    /// These, for a load of so many bytes: what comes slowly over each of many connections is cut so that all of them
    /// have a part in it.
    #[must_use]
    pub fn for_bytes(self, bytes: u64) -> Self {
        let part = bytes.div_ceil(self.readers.fetches.start.max(1) as u64).next_multiple_of(4096);
        let block_bytes = part.max(self.least_block_bytes).min(self.block_bytes);
        Self { block_bytes, ..self }
    }

    /// The same for a load that is verified in blocks of `bytes`, a power of two: reads are cut at multiples of them and bridge
    /// the gaps inside them, so that no two reads of the load share one.
    #[must_use]
    pub fn for_verification(self, bytes: u64) -> Self {
        Self {
            block_bytes: self.block_bytes.next_multiple_of(bytes),
            least_block_bytes: self.least_block_bytes.next_multiple_of(bytes),
            coalesce_gap_bytes: self.coalesce_gap_bytes.max(bytes),
            request_bytes: self.request_bytes.checked_next_multiple_of(bytes).unwrap_or(u64::MAX),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(kind: StorageKind, to_device: bool) -> Settings {
        Settings::choose(&Config::default(), &Storage { kind, ..Storage::unknown() }, to_device)
    }

    #[test]
    fn readers_that_a_person_set_are_neither_raised_nor_lowered() {
        let config = Config { readers: Some(3), block_bytes: Some(10_000), ..Config::default() };
        let settings = Settings::choose(&config, &Storage::unknown(), false);
        assert_eq!(settings.readers, Readers::fixed(3));
        assert_eq!(settings.block_bytes, 12_288, "whole pages");
    }

    #[test]
    fn blocks_to_a_device_are_larger_unless_requests_are_to_stay_small() {
        assert_eq!(settings(StorageKind::Disk, false).block_bytes, 2 << 20);
        assert_eq!(settings(StorageKind::Disk, true).block_bytes, 4 << 20);
        assert_eq!(settings(StorageKind::Fuse, true).block_bytes, 2 << 20);
        let stripes = Storage { kind: StorageKind::Parallel, preferred_bytes: 8 << 20, ..Storage::unknown() };
        assert_eq!(Settings::choose(&Config::default(), &stripes, true).block_bytes, 8 << 20);
    }

    #[test]
    fn a_small_load_from_an_object_store_is_cut_for_all_requests_and_no_other_is() {
        let block = |kind, bytes| settings(kind, false).for_bytes(bytes).block_bytes;
        let requests = settings(StorageKind::Remote, false).readers.fetches.start as u64;
        assert_eq!(block(StorageKind::Remote, 1 << 40), 8 << 20);
        assert_eq!(block(StorageKind::Remote, requests * (3 << 20)), 3 << 20);
        assert_eq!(block(StorageKind::Remote, 10), 1 << 20);
        assert_eq!(block(StorageKind::Disk, 10), 2 << 20);
        // On the way to a device, every request that there may be has its place in the staging memory.
        assert_eq!(settings(StorageKind::Remote, true).for_bytes(1 << 40).block_bytes, 4 << 20);
        assert_eq!(settings(StorageKind::Remote, true).for_bytes(10).block_bytes, 1 << 20);
        let config = Config { block_bytes: Some(4 << 20), ..Config::default() };
        let asked = Settings::choose(&config, &Storage::of_url("s3://b/k"), false);
        assert_eq!(asked.for_bytes(10).block_bytes, 4 << 20);
    }

    #[test]
    fn cached_blocks_are_copied_by_several_readers_even_where_one_fetches() {
        let readers = settings(StorageKind::Fuse, false).readers;
        assert_eq!(readers.fetches.start, 1);
        assert!(readers.copies > 1 && readers.most() > readers.fetches.most);
    }
}
