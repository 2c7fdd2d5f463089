//! What the bytes of a checkpoint should be: a small file beside it, with hashes of every block of every file.
//!
//! * [`Manifest`] (`format`): the file, parsed and written. Nothing in it is taken on trust.
//! * [`FileHashes`]: one file of it: its size, its BLAKE3 root, and what [`BlockHasher`] compares blocks with (`tree`).
//! * [`make`], [`hash_file`], [`write`] (`making`): a manifest of a directory, and putting it there, whole or not at all.
//! * [`Verify`]: when manifests are used.
//!
//! A block is an aligned subtree of BLAKE3's tree, so it is verified alone, from any place and in any order, and the
//! values of all blocks fold to the file's ordinary BLAKE3 hash. A manifest that parses is consistent: every file's values
//! fold to its root. It says nothing about who made it.
//!
//! Nothing here knows stores, checkpoints or tensors.

mod format;
mod making;
mod tree;

pub use format::{FileHashes, MAX_MANIFEST_BYTES, Manifest};
pub use making::{hash_file, make, write};
pub use tree::{BlockHasher, block_values};

/// The name of the manifest, in the directory of the files that it speaks of.
pub const MANIFEST_NAME: &str = "penstock-manifest.blake3";
/// Bytes of a block where nothing else is said.
pub const BLOCK_BYTES: u64 = 1 << 20;

/// When what is loaded is verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verify {
    /// Where there is a manifest.
    #[default]
    Auto,
    /// Always: without a manifest nothing is loaded.
    Require,
    /// Never.
    Off,
}

impl Verify {
    /// The mode of that name: `auto`, `require` or `off`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "auto" => Some(Self::Auto),
            "require" => Some(Self::Require),
            "off" => Some(Self::Off),
            _ => None,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Require => "require",
            Self::Off => "off",
        }
    }
}
