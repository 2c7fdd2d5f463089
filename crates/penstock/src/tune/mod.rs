//! Where a load begins: how many readers, how large a block, for the storage and the destination at hand.
//!
//! Start values only, and bounds. They come from what the kernel says of the file system, not from what a person set;
//! a setting in [`Config`](crate::config::Config) replaces them.

mod profile;
mod remote;
mod tuner;

use crate::config::Config;

pub use profile::{FileSystem, Profile};
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
    /// The largest gap between wanted bytes that is read rather than skipped.
    pub bridge_bytes: u64,
    /// Budget of the staging arena in bytes.
    pub staging_bytes: u64,
}

impl Settings {
    /// The settings for a load from `file_system` to host memory or a device.
    pub fn choose(config: &Config, file_system: FileSystem, to_device: bool) -> Self {
        let cores = std::thread::available_parallelism().map_or(4, std::num::NonZeroUsize::get);
        let found = Profile::of(file_system, cores);
        // Blocks are a few huge pages, so that readers do not fault the same one, and small enough to stay in the
        // processor's cache between the reading and the copying. Every copy to a device takes 3 us besides its bytes:
        // on PCIe 5, blocks of 2 MiB reach 0.92 of its rate, 4 MiB 0.95, and 8 MiB no more unless readers are few.
        let block_bytes = if to_device { 4 << 20 } else { 2 << 20 };
        // Copying is work for a core, and a dozen cores keep PCIe 5 or the memory busy.
        let copies = cores.clamp(2, 12);
        Self {
            readers: config.readers.map_or(
                Readers { copies, fetches: found.fetches, threads: copies + found.fetches.most },
                Readers::fixed,
            ),
            block_bytes: config.block_bytes.unwrap_or(block_bytes).next_multiple_of(4096),
            bridge_bytes: found.bridge_bytes,
            staging_bytes: config.staging_bytes.unwrap_or(STAGING_BYTES),
        }
    }
}
