//! Which blocks of a partial copy of an object are there, and what their bytes should be.
//!
//! A copy that is still being made, or was cut off, is a sparse file with a map beside it: a header that says of which
//! version of which object it is, then one word for each block: the CRC-64 of its bytes, or zero where it is missing.
//! A word is written after its block. Whatever happens in between (a killed process, a lost power supply that kept the
//! map and not the bytes, a file of someone else's in that place), bytes that do not have the checksum are not taken:
//! who reads a block from a partial copy compares first.
//!
//! Several processes may share a map: a block's word is the same whoever writes it, and is looked up in the file each
//! time.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crc_fast::CrcAlgorithm;
use rustix::fs::{Advice, fadvise};

use super::locked_file::LockedFile;

const MAGIC: &[u8; 8] = b"PSTKMAP1";
const WORD: u64 = 8;
/// Magic, bytes of a block, bytes of the object, bytes of the name.
const FIXED: u64 = 4 * WORD;

/// Lengths here are lengths of memory that exists, so they fit.
pub(crate) fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// The checksum of a block's bytes. Never zero, which stands for a missing block.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes).max(1)
}

/// The map of one partial copy.
#[derive(Debug)]
pub(crate) struct BlockMap {
    file: LockedFile,
    first_word: u64,
    block_bytes: u64,
    bytes: u64,
}

impl BlockMap {
    /// Whether `file` is the map of an object called `name` of so many bytes, in such blocks.
    pub(crate) fn is_of(file: &File, name: &str, bytes: u64, block_bytes: u64) -> bool {
        let header = header(name, bytes, block_bytes);
        let mut there = vec![0; header.len()];
        file.read_exact_at(&mut there, 0).is_ok() && there == header
    }

    /// The name of the object that `file` is the map of, its bytes, and those of a block; `None` where it is no map.
    pub(crate) fn describe(file: &File) -> Option<(String, u64, u64)> {
        let mut fixed = [0; FIXED as usize];
        file.read_exact_at(&mut fixed, 0).ok()?;
        let number = |at: usize| Some(u64::from_le_bytes(fixed[at * 8..at * 8 + 8].try_into().ok()?));
        let (block_bytes, bytes, len) = (number(1)?, number(2)?, number(3)?);
        // The file says how long the name is: no more is read than there is.
        let is_map = fixed.starts_with(MAGIC) && block_bytes > 0 && len <= file.metadata().ok()?.len();
        let mut name = vec![0; usize::try_from(len).ok().filter(|_| is_map)?];
        file.read_exact_at(&mut name, FIXED).ok()?;
        Some((String::from_utf8(name).ok()?, bytes, block_bytes))
    }

    /// The map in `file`, which is open for writing unless it is known to be the right one, if it is that of an object
    /// called `name` of so many bytes; else an empty one in its place. Says whether it was there.
    ///
    /// # Errors
    /// What the file system fails with.
    pub(crate) fn open(
        file: LockedFile,
        name: &str,
        bytes: u64,
        block_bytes: u64,
    ) -> io::Result<(Self, bool)> {
        let known = Self::is_of(&file, name, bytes, block_bytes);
        if !known {
            file.set_len(0)?;
            file.write_all_at(&header(name, bytes, block_bytes), 0)?;
        }
        let first_word = (FIXED + name.len() as u64).next_multiple_of(WORD);
        Ok((Self { file, first_word, block_bytes, bytes }, known))
    }

    /// The map's own file.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// How many blocks the object has.
    pub(crate) fn blocks(&self) -> usize {
        to_usize(self.bytes.div_ceil(self.block_bytes))
    }

    /// The bytes of a block: all are equally long but the last.
    pub(crate) fn range(&self, block: usize) -> Range<u64> {
        let start = block as u64 * self.block_bytes;
        start..self.bytes.min(start + self.block_bytes)
    }

    /// The checksum of a block that is there by now, whoever wrote it.
    pub(crate) fn get(&self, block: usize) -> Option<u64> {
        let mut word = [0; WORD as usize];
        // The file ends with the last block that was written.
        self.file.read_exact_at(&mut word, self.place(block)).ok()?;
        Some(u64::from_le_bytes(word)).filter(|word| *word != 0)
    }

    /// Says that a block is there, or with zero that it is not.
    pub(crate) fn set(&self, block: usize, checksum: u64) -> io::Result<()> {
        self.file.write_all_at(&checksum.to_le_bytes(), self.place(block))
    }

    fn place(&self, block: usize) -> u64 {
        self.first_word + block as u64 * WORD
    }

    /// What was said of the whole copy once it was complete.
    pub(crate) fn seal(&self) -> Option<[i64; 4]> {
        let mut seal = [0; 4];
        for (number, part) in seal.iter_mut().enumerate() {
            let mut word = [0; WORD as usize];
            self.file.read_exact_at(&mut word, self.place(self.blocks() + number)).ok()?;
            *part = i64::from_le_bytes(word);
        }
        Some(seal)
    }

    /// Says something of the whole copy, behind the last block's word.
    ///
    /// # Errors
    /// What writing fails with.
    pub(crate) fn set_seal(&self, seal: [i64; 4]) -> io::Result<()> {
        self.file.write_all_at(&seal.map(i64::to_le_bytes).concat(), self.place(self.blocks()))
    }

    /// Reads a block from `data` to `buffer`; `None` where it is not there. If its bytes are not those that were written,
    /// or cannot be read, it is not there from now on.
    ///
    /// # Errors
    /// What reading fails with.
    pub(crate) fn read<'a>(
        &self,
        data: &File,
        block: usize,
        buffer: &'a mut [u8],
    ) -> io::Result<Option<&'a [u8]>> {
        let Some(expected) = self.get(block) else { return Ok(None) };
        let Range { start, end } = self.range(block);
        let bytes = &mut buffer[..to_usize(end - start)];
        let read = data.read_exact_at(bytes, start);
        if read.is_ok() && checksum(bytes) == expected {
            return Ok(Some(bytes));
        }
        // Where the map cannot be written to, the block is compared again by whoever reads it next.
        let _ = self.set(block, 0);
        read.map(|()| None)
    }

    /// Writes a block to `data`, then to the map that it is there.
    ///
    /// # Errors
    /// What writing fails with.
    pub(crate) fn write(&self, data: &File, block: usize, bytes: &[u8]) -> io::Result<()> {
        let start = self.range(block).start;
        data.write_all_at(bytes, start)?;
        // For pages just written this means: begin to write them out. Then the end has little left to wait for.
        let _ = fadvise(data, start, NonZeroU64::new(bytes.len() as u64), Advice::DontNeed);
        self.set(block, checksum(bytes))
    }
}

fn header(name: &str, bytes: u64, block_bytes: u64) -> Vec<u8> {
    let mut header = Vec::from(MAGIC);
    for number in [block_bytes, bytes, name.len() as u64] {
        header.extend_from_slice(&number.to_le_bytes());
    }
    header.extend_from_slice(name.as_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(path: &std::path::Path, name: &str, bytes: u64) -> (BlockMap, bool) {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap();
        BlockMap::open(LockedFile::new(file), name, bytes, 1000).unwrap()
    }

    #[test]
    fn a_map_is_found_again_and_only_for_the_same_object() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("map");
        let (map, known) = opened(&path, "a\nv1", 2500);
        assert!(!known && map.blocks() == 3);
        assert_eq!((map.range(0), map.range(2)), (0..1000, 2000..2500));
        map.set(1, 77).unwrap();
        let (again, known) = opened(&path, "a\nv1", 2500);
        assert!(known);
        assert_eq!((again.get(0), again.get(1), again.get(2)), (None, Some(77), None));
        // Written by another process meanwhile.
        map.set(2, 88).unwrap();
        assert_eq!(again.get(2), Some(88));
        assert_eq!(BlockMap::describe(&File::open(&path).unwrap()), Some(("a\nv1".to_owned(), 2500, 1000)));
        for (name, bytes) in [("a\nv2", 2500), ("a\nv1", 2501)] {
            let (other, known) = opened(&path, name, bytes);
            assert!(!known && (0..3).all(|block| other.get(block).is_none()), "{name} {bytes}");
            other.set(0, 5).unwrap();
        }
    }

    #[test]
    fn what_is_no_map_is_an_empty_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("map");
        for content in [&b""[..], b"PSTK", &[0xff; 500]] {
            std::fs::write(&path, content).unwrap();
            assert_eq!(BlockMap::describe(&File::open(&path).unwrap()), None);
            let (map, known) = opened(&path, "a", 1);
            assert!(!known && map.get(0).is_none());
        }
        let (none, _) = opened(&path, "empty", 0);
        assert_eq!(none.blocks(), 0);
    }

    #[test]
    fn a_checksum_is_never_that_of_a_missing_block() {
        assert_ne!(checksum(b""), 0);
        assert_ne!(checksum(&[0; 100]), 0);
        assert_ne!(checksum(b"a"), checksum(b"b"));
    }
}
