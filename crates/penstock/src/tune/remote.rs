//! How object stores and HTTP servers are read.
//!
//! Every request waits tens of milliseconds for its first byte, and a connection brings tens of megabytes a second
//! however fast the network is. So many requests are in flight, each large enough that the wait is a small part of it
//! and small enough that a slow one does not hold up the end of the load.

use super::{Bounds, Profile, Readers, STAGING_BYTES, Settings};
use crate::config::Config;

/// Bytes of a request: 8 MiB, as the clients of the stores themselves use.
const BLOCK_BYTES: u64 = 8 << 20;
/// A gap that is read rather than skipped: what comes in the time that another request waits.
const BRIDGE_BYTES: u64 = 1 << 20;

impl Profile {
    /// The profile for reading over the network from an object store.
    pub fn remote() -> Self {
        Self { fetches: Bounds { start: 32, least: 4, most: 64 }, bridge_bytes: BRIDGE_BYTES }
    }
}

impl Settings {
    /// The settings for a load from an object store or HTTP server.
    pub fn remote(config: &Config) -> Self {
        let found = Profile::remote();
        Self {
            readers: config.readers.map_or(
                // Nothing is ever copied from a page cache, but the queue wants room for both kinds of work.
                Readers { copies: 1, fetches: found.fetches, threads: found.fetches.most },
                Readers::fixed,
            ),
            block_bytes: config.block_bytes.unwrap_or(BLOCK_BYTES).next_multiple_of(4096),
            bridge_bytes: found.bridge_bytes,
            staging_bytes: config.staging_bytes.unwrap_or(STAGING_BYTES),
        }
    }
}
