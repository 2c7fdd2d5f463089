//! Where a load begins: how many readers, how large a block, for the storage and the destination at hand.
//!
//! Start values only, and bounds. They come from what the kernel says of the file system, not from what a person set;
//! a setting in [`Config`](crate::config::Config) replaces them.

mod profile;
mod tuner;

use crate::config::Config;

pub use profile::{FileSystem, Profile};
pub use tuner::{Bounds, Epoch, Trial, Tuner};

/// Host staging memory of a load where nothing is said.
const STAGING_BYTES: u64 = 512 << 20;

/// What a load runs with: its profile, with what a person set in place of what was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Reader threads, block and bridge sizes.
    pub profile: Profile,
    /// Budget of the staging arena in bytes.
    pub staging_bytes: u64,
}

impl Settings {
    /// The settings for a load from `file_system`.
    pub fn choose(config: &Config, file_system: FileSystem, to_device: bool) -> Self {
        let cores = std::thread::available_parallelism().map_or(4, std::num::NonZeroUsize::get);
        let found = Profile::start(file_system, cores, to_device);
        Self {
            profile: Profile {
                readers: config.readers.map_or(found.readers, Bounds::fixed),
                block_bytes: config.block_bytes.unwrap_or(found.block_bytes).next_multiple_of(4096),
                ..found
            },
            staging_bytes: config.staging_bytes.unwrap_or(STAGING_BYTES),
        }
    }
}
