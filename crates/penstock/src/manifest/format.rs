//! The manifest's bytes. Parsing checks every count against the bytes that are there before it takes memory, and
//! accepts one form only: what [`Manifest::to_bytes`] writes.
//!
//! The format is described in `docs/architecture.md`.

use super::tree::{BlockHasher, root_of};
use crate::error::{Code, Error, ErrorKind, Result};

/// The longest manifest that is read: that of 8 TiB in blocks of 1 MiB.
pub const MAX_MANIFEST_BYTES: u64 = 256 << 20;
/// Binary logarithms of the block sizes that are accepted: a smaller block makes a large manifest, a larger one makes a
/// slice read much more than it wants.
const LEAST_LOG2: u32 = 16;
const MOST_LOG2: u32 = 24;
const MAX_NAME_BYTES: usize = 4096;

const MAGIC: &[u8; 16] = b"penstock-blake3\n";
const VERSION: u32 = 1;
const HASH: usize = 32;

/// What all files of a directory should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    block_log2: u32,
    /// By name.
    files: Vec<FileHashes>,
}

/// What one file should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileHashes {
    name: String,
    bytes: u64,
    block_bytes: u64,
    root: [u8; HASH],
    /// Of each block, where there are several.
    values: Vec<[u8; HASH]>,
}

impl FileHashes {
    /// Of a file whose blocks have these values: that of a file of one block is its hash.
    ///
    /// # Errors
    /// `Config` for a name or block size that no manifest may have, or another number of values than there are blocks.
    pub fn new(name: &str, bytes: u64, block_bytes: u64, mut values: Vec<[u8; HASH]>) -> Result<Self> {
        let refuse = |cause: String| Error::new(ErrorKind::Config, cause);
        if !block_bytes.is_power_of_two() || !(LEAST_LOG2..=MOST_LOG2).contains(&block_bytes.ilog2()) {
            return Err(refuse(format!(
                "blocks of {block_bytes} bytes are not a power of two of 64 KiB to 16 MiB"
            )));
        }
        if let Some(why) = name_fault(name) {
            return Err(refuse(format!("the name {name:?} cannot be in a manifest: it {why}")));
        }
        if values.len() as u64 != blocks_of(bytes, block_bytes) {
            return Err(refuse(format!("{} values are not those of {bytes} bytes", values.len())));
        }
        let root = match &values[..] {
            [root] => *root,
            _ => root_of(&values),
        };
        if values.len() == 1 {
            values.clear();
        }
        Ok(Self { name: name.to_owned(), bytes, block_bytes, root, values })
    }

    /// The same file under another name.
    ///
    /// # Errors
    /// `Config` for a name that no manifest may have.
    pub fn named(&self, name: &str) -> Result<Self> {
        match name_fault(name) {
            Some(why) => Err(Error::new(
                ErrorKind::Config,
                format!("the name {name:?} cannot be in a manifest: it {why}"),
            )),
            None => Ok(Self { name: name.to_owned(), ..self.clone() }),
        }
    }

    /// Its name: a path below the manifest's directory, with `/` between components.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of each of its blocks but the last.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// The BLAKE3 hash of the file.
    pub fn root(&self) -> &[u8; HASH] {
        &self.root
    }

    /// How many blocks it has; an empty file has one.
    pub fn blocks(&self) -> u64 {
        blocks_of(self.bytes, self.block_bytes)
    }

    /// What hashes the block with that number.
    pub fn hasher(&self, block: u64) -> BlockHasher {
        BlockHasher::new(block * self.block_bytes, self.values.is_empty())
    }

    /// The value that the block with that number should have; nothing where there is no such block.
    pub fn value(&self, block: u64) -> Option<&[u8; HASH]> {
        match self.values.is_empty() {
            true => (block == 0).then_some(&self.root),
            false => usize::try_from(block).ok().and_then(|block| self.values.get(block)),
        }
    }
}

impl Manifest {
    /// A manifest of these files.
    ///
    /// # Errors
    /// `Config` where two files have one name, block sizes differ, or there are more than a manifest may hold.
    pub fn new(mut files: Vec<FileHashes>) -> Result<Self> {
        let refuse = |cause: String| Error::new(ErrorKind::Config, cause);
        files.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        let block_bytes = files.first().map_or(super::BLOCK_BYTES, |file| file.block_bytes);
        if let Some(pair) = files.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(refuse(format!("{:?} is given twice", pair[0].name)));
        }
        if files.iter().any(|file| file.block_bytes != block_bytes) {
            return Err(refuse("files have different block sizes".into()));
        }
        let made = Self { block_log2: block_bytes.ilog2(), files };
        match made.encoded_len() {
            bytes if bytes <= MAX_MANIFEST_BYTES && u32::try_from(made.files.len()).is_ok() => Ok(made),
            bytes => {
                Err(refuse(format!("its manifest would have {bytes} bytes, more than {MAX_MANIFEST_BYTES}")))
            }
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> u64 {
        1 << self.block_log2
    }

    /// The files, by name.
    pub fn files(&self) -> &[FileHashes] {
        &self.files
    }

    /// The file of that name.
    pub fn file(&self, name: &str) -> Option<&FileHashes> {
        self.files.get(self.index_of(name)?)
    }

    /// The position of the file of that name among [`Manifest::files`].
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.files.binary_search_by(|file| file.name.as_str().cmp(name)).ok()
    }

    fn encoded_len(&self) -> u64 {
        let file = |file: &FileHashes| (2 + file.name.len() + 8 + HASH + HASH * file.values.len()) as u64;
        (MAGIC.len() + 16 + HASH) as u64 + self.files.iter().map(file).sum::<u64>()
    }

    /// The bytes of the manifest file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(usize::try_from(self.encoded_len()).unwrap_or_default());
        out.extend_from_slice(MAGIC);
        // Fits: `new` and `parse` saw to it.
        let files = u32::try_from(self.files.len()).unwrap_or(u32::MAX);
        for number in [VERSION, self.block_log2, files, 0] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        for file in &self.files {
            let name_bytes = u16::try_from(file.name.len()).unwrap_or(u16::MAX);
            out.extend_from_slice(&name_bytes.to_le_bytes());
            out.extend_from_slice(file.name.as_bytes());
            out.extend_from_slice(&file.bytes.to_le_bytes());
            out.extend_from_slice(&file.root);
            out.extend_from_slice(file.values.as_flattened());
        }
        let sum = blake3::hash(&out);
        out.extend_from_slice(sum.as_bytes());
        out
    }

    /// Parses a manifest file.
    ///
    /// # Errors
    /// `Integrity` with the code `bad_manifest` for anything but what [`Manifest::to_bytes`] makes.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if bytes.len() as u64 > MAX_MANIFEST_BYTES {
            return Err(bad(format!("it has {} bytes, more than {MAX_MANIFEST_BYTES}", bytes.len())));
        }
        if !bytes.starts_with(MAGIC) {
            return Err(bad("it does not begin as one"));
        }
        let Some((body, sum)) = bytes.split_last_chunk::<HASH>() else { return Err(bad("it is too short")) };
        let mut rest = Reader { bytes: body.get(MAGIC.len()..).unwrap_or_default() };
        let version = rest.u32()?;
        if version != VERSION {
            return Err(bad(format!("its version is {version}, and {VERSION} is known")));
        }
        if blake3::hash(body).as_bytes() != sum {
            return Err(bad("its own hash does not match: it is damaged or cut off"));
        }
        let (block_log2, count, zero) = (rest.u32()?, rest.u32()?, rest.u32()?);
        if !(LEAST_LOG2..=MOST_LOG2).contains(&block_log2) {
            return Err(bad(format!("its blocks would have 2^{block_log2} bytes, not 64 KiB to 16 MiB")));
        }
        if zero != 0 {
            return Err(bad("reserved bytes are not zero"));
        }
        let mut files: Vec<FileHashes> = Vec::new();
        for _ in 0..count {
            let file = rest.file(1 << block_log2)?;
            if files.last().is_some_and(|last| last.name >= file.name) {
                return Err(bad(format!("the name {:?} is given twice or out of order", file.name)));
            }
            files.push(file);
        }
        match rest.bytes {
            [] => Ok(Self { block_log2, files }),
            more => Err(bad(format!("{} bytes follow its last file", more.len()))),
        }
    }
}

/// What is left to parse.
struct Reader<'b> {
    bytes: &'b [u8],
}

impl<'b> Reader<'b> {
    fn take(&mut self, len: usize) -> Result<&'b [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(len).ok_or_else(|| bad("it ends too early"))?;
        self.bytes = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| bad("it ends too early"))
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn file(&mut self, block_bytes: u64) -> Result<FileHashes> {
        let name_bytes = usize::from(u16::from_le_bytes(self.array()?));
        let name = std::str::from_utf8(self.take(name_bytes)?).map_err(|_| bad("a name is not UTF-8"))?;
        if let Some(why) = name_fault(name) {
            return Err(bad(format!("the name {name:?} {why}")));
        }
        let bytes = u64::from_le_bytes(self.array()?);
        let root = self.array()?;
        let blocks = blocks_of(bytes, block_bytes);
        let mut values = Vec::new();
        if blocks > 1 {
            let len = usize::try_from(blocks).ok().and_then(|blocks| blocks.checked_mul(HASH));
            let (hashes, _) = self.take(len.ok_or_else(|| bad("it ends too early"))?)?.as_chunks::<HASH>();
            values = hashes.to_vec();
            if root_of(&values) != root {
                return Err(bad(format!("the values of {name:?} do not fold to its root")));
            }
        }
        Ok(FileHashes { name: name.to_owned(), bytes, block_bytes, root, values })
    }
}

fn blocks_of(bytes: u64, block_bytes: u64) -> u64 {
    bytes.div_ceil(block_bytes).max(1)
}

/// Why a name is none that a manifest may hold.
fn name_fault(name: &str) -> Option<&'static str> {
    if name.len() > MAX_NAME_BYTES {
        return Some("is too long");
    }
    name.split('/').find_map(|component| match component {
        "" => Some("is absolute or has an empty component"),
        "." | ".." => Some("has a component that leads elsewhere"),
        _ => None,
    })
}

/// What is wrong with a manifest.
fn bad(cause: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Integrity, format!("the manifest is refused: {cause}"))
        .code(Code::BadManifest)
        .remedy("Fetch the manifest again, or make a new one of files that you trust (penstock manifest)")
}

#[cfg(test)]
mod tests;
