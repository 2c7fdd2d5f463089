//! Where a load begins: how many readers, how large a block, for the storage and the destination at hand.
//!
//! Start values only, and bounds. They come from what the kernel says of the file system, not from what a person set;
//! a setting in [`Config`](crate::config::Config) replaces them.

mod profile;

pub use profile::{FileSystem, Profile};
