//! BLAKE3's tree, cut into blocks.
//!
//! A file of one block is hashed as a whole: its hash is the root. Of a longer one each block has a chaining value, which
//! depends on the block's place in the file, and the values fold to the root.

use blake3::Hasher;
use blake3::hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};

/// The BLAKE3 hash of a file whose blocks have these chaining values: at least two.
pub(super) fn root_of(values: &[ChainingValue]) -> [u8; 32] {
    let (left, right) = values.split_at(left_blocks(values.len()));
    *merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash).as_bytes()
}

fn subtree(values: &[ChainingValue]) -> ChainingValue {
    match values {
        [value] => *value,
        _ => {
            let (left, right) = values.split_at(left_blocks(values.len()));
            merge_subtrees_non_root(&subtree(left), &subtree(right), Mode::Hash)
        }
    }
}

/// How many of `blocks` are in the left subtree: the largest power of two that leaves one. The depth of the tree, and so of
/// the recursion, is that of a binary logarithm.
fn left_blocks(blocks: usize) -> usize {
    blocks.div_ceil(2).next_power_of_two()
}

/// Hashes one block, which may come in several pieces.
#[derive(Debug, Clone)]
pub struct BlockHasher {
    hasher: Hasher,
    is_whole_file: bool,
}

impl BlockHasher {
    /// For the block that begins at `offset` of a file, a multiple of the block size; and whether it is the whole file.
    pub(crate) fn new(offset: u64, is_whole_file: bool) -> Self {
        let mut hasher = Hasher::new();
        hasher.set_input_offset(offset);
        Self { hasher, is_whole_file }
    }

    /// Adds the next bytes of the block.
    pub fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
    }

    /// The block's value: what [`super::FileHashes::value`] should be.
    pub fn value(&self) -> [u8; 32] {
        match self.is_whole_file {
            true => *self.hasher.finalize().as_bytes(),
            false => self.hasher.finalize_non_root(),
        }
    }
}

/// The values of the blocks of bytes that lie in these pieces, and begin at `offset` of a file (a multiple of the block size)
/// of `of` bytes. Of no bytes there is one block.
pub fn block_values<'b>(
    pieces: impl IntoIterator<Item = &'b [u8]>,
    offset: u64,
    of: u64,
    block_bytes: u64,
) -> Vec<[u8; 32]> {
    let block = usize::try_from(block_bytes).unwrap_or(usize::MAX);
    let (mut values, mut start, mut filled) = (Vec::new(), offset, 0);
    let mut hasher = BlockHasher::new(offset, of <= block_bytes);
    for mut piece in pieces {
        while !piece.is_empty() {
            if filled == block {
                values.push(hasher.value());
                start += block_bytes;
                (hasher, filled) = (BlockHasher::new(start, of <= block_bytes), 0);
            }
            let (of_block, rest) = piece.split_at(piece.len().min(block - filled));
            hasher.update(of_block);
            filled += of_block.len();
            piece = rest;
        }
    }
    values.push(hasher.value());
    values
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_left_subtree_is_the_largest_power_of_two_that_leaves_something() {
        let left: Vec<_> = [2, 3, 4, 5, 8, 9, 1 << 20, (1 << 20) + 1].map(left_blocks).into();
        assert_eq!(left, [1, 2, 2, 4, 4, 8, 1 << 19, 1 << 20]);
    }

    #[test]
    fn values_of_blocks_do_not_depend_on_how_their_bytes_are_cut_into_pieces() {
        let bytes: Vec<u8> = (0..5 * 1024 + 7u32).map(|i| (i * 13 % 251) as u8).collect();
        let of = bytes.len() as u64;
        let whole = block_values([&bytes[..]], 0, of, 1024);
        assert_eq!((whole.len(), root_of(&whole)), (6, *blake3::hash(&bytes).as_bytes()));
        for cuts in [[0, 1, 1024], [1023, 1025, 3000], [1024, 2048, 5120]] {
            let [a, b, c] = cuts;
            let pieces = [&bytes[..a], &bytes[a..b], &bytes[b..c], &bytes[c..]];
            assert_eq!(block_values(pieces, 0, of, 1024), whole, "{cuts:?}");
        }
        let later = block_values([&bytes[2048..3000], &bytes[3000..4096]], 2048, of, 1024);
        assert_eq!(later, whole[2..4]);
        assert_eq!(block_values([], 0, 0, 1024), [*blake3::hash(b"").as_bytes()]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

        #[test]
        fn the_values_of_blocks_fold_to_the_hash_of_the_file(
            blocks in 2usize..70, last in 1usize..=1024, seed: u8, cuts in prop::collection::vec(0usize..=1024, 0..4),
        ) {
            // Blocks of one chunk, the smallest subtree there is: the tree above them is the same.
            let bytes: Vec<u8> = (0..(blocks - 1) * 1024 + last).map(|i| (i * 31 % 251) as u8 ^ seed).collect();
            let values: Vec<_> = bytes.chunks(1024).enumerate().map(|(number, block)| {
                let mut hasher = BlockHasher::new(number as u64 * 1024, false);
                let mut at = 0;
                let mut cuts: Vec<_> = cuts.iter().map(|cut| *cut.min(&block.len())).collect();
                cuts.sort_unstable();
                for cut in cuts {
                    hasher.update(&block[at..cut]);
                    at = cut;
                }
                hasher.update(&block[at..]);
                hasher.value()
            }).collect();
            prop_assert_eq!(root_of(&values), *blake3::hash(&bytes).as_bytes());
        }
    }
}
