//! What a signature says of files, and making sure of a file by it.
//!
//! Whoever made sure of the signature gives names and digests; here files are compared with them while a checkpoint is
//! opened. A file that was made sure of is known by the hashes of its blocks, and what is loaded of it later is compared
//! with those: what happens to it in between cannot be handed out. There are two ways:
//!
//! * A manifest has it. Either it is signed by its BLAKE3 hash, and that is the manifest's root, so its blocks are the
//!   signed ones; or the manifest is a signed file itself. Nothing is read for that.
//! * Otherwise it is read once, from front to back. Its digest is compared, and its blocks are hashed from the same bytes.
//!
//! Nothing here knows keys, certificates, or the form that signatures have.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use sha2::{Digest, Sha256};

use super::verifying::{FoundManifest, file_name};
use crate::error::{Code, Error, ErrorKind, Result};
use crate::manifest::{BLOCK_BYTES, BlockHasher, FileHashes, MANIFEST_NAME};
use crate::memory::Window;
use crate::store::{Object, ReadContext, shown};

/// What is read at a time: whole blocks.
const READ_BYTES: u64 = 8 * BLOCK_BYTES;

/// How a file is hashed for a signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// SHA-256.
    Sha256,
    /// BLAKE3 with 32 bytes.
    Blake3,
}

/// What a signature says of one file: where each of its parts ends, and the part's digest. A file that is signed as a
/// whole is one part without an end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedFile {
    /// How it is hashed.
    pub algorithm: Algorithm,
    /// Its parts, from front to back.
    pub parts: Vec<(Option<u64>, [u8; 32])>,
}

impl SignedFile {
    /// Its BLAKE3 hash, where that is what is signed.
    fn root(&self) -> Option<&[u8; 32]> {
        match (self.algorithm, &self.parts[..]) {
            (Algorithm::Blake3, [(None, root)]) => Some(root),
            _ => None,
        }
    }
}

/// The files below some directories that are signed. Others are refused.
#[derive(Default)]
pub struct Signed {
    /// By the directory's location, then by the path in it.
    trees: Vec<(String, HashMap<String, SignedFile>)>,
    cancelled: AtomicBool,
}

impl fmt::Debug for Signed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Locations may carry secrets.
        f.debug_struct("Signed").field("trees", &self.trees.len()).finish_non_exhaustive()
    }
}

impl Signed {
    /// Of these directories, each with the paths of its files. A directory's location is one that stores take.
    pub fn new(trees: Vec<(String, HashMap<String, SignedFile>)>) -> Self {
        Self { trees, cancelled: AtomicBool::default() }
    }

    /// Has files that are being read, and those that would be, end with `Cancelled`.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// The directory that is signed with all below it, of which `directory` is one, and the path in there.
    ///
    /// # Errors
    /// `Signature` with the code `not_signed` where there is none.
    pub(super) fn tree_of<'a>(&self, directory: &'a str) -> Result<(&str, &'a str)> {
        self.find(directory).map(|(root, _, below)| (root, below))
    }

    fn find<'a>(&self, directory: &'a str) -> Result<(&str, &HashMap<String, SignedFile>, &'a str)> {
        let below = |root: &str| match directory.strip_prefix(root)? {
            "" => Some(""),
            below => below.strip_prefix('/'),
        };
        let found = self
            .trees
            .iter()
            .find_map(|(root, files)| below(root.trim_end_matches('/')).map(|below| (&**root, files, below)));
        found.ok_or_else(|| not_signed("it is in no directory that is signed"))
    }

    /// Makes sure of a manifest, where the signature has it as a file: then it is as good as the signature, which this says.
    ///
    /// # Errors
    /// `Signature` where it is not the signed one.
    pub(super) fn check_manifest(&self, directory: &str, manifest: &[u8]) -> Result<bool> {
        let (_, files, below) = self.find(directory)?;
        let Some(signed) = files.get(&path_of(below, MANIFEST_NAME)) else { return Ok(false) };
        let mut parts = Parts::new(manifest.len() as u64, signed);
        let is_signed = match signed.root() {
            Some(root) => blake3::hash(manifest).as_bytes() == root,
            None => {
                parts.update(manifest);
                signed.algorithm == Algorithm::Sha256 && parts.finish() == signed.parts
            }
        };
        if is_signed { Ok(true) } else { Err(mismatch("the manifest is not the signed one")) }
    }

    /// Reads the file at `location`, which is in `directory`, whole, and makes sure that it is the signed one.
    ///
    /// # Errors
    /// As [`Signed::hashes`].
    pub fn check(&self, location: &str, directory: &str, object: &dyn Object) -> Result<()> {
        self.hashes(location, directory, object, None).map(drop)
    }

    /// The hashes of a file's blocks, of which is made sure that they are those of the signed file.
    ///
    /// # Errors
    /// `Signature` where they are not; what reading fails with; `Cancelled`.
    pub(super) fn hashes(
        &self,
        location: &str,
        directory: &str,
        object: &dyn Object,
        manifest: Option<&FoundManifest>,
    ) -> Result<FileHashes> {
        let name = file_name(location);
        let made = self.find(directory).and_then(|(_, files, below)| {
            let Some(signed) = files.get(&path_of(below, &name)) else {
                return Err(not_signed("the signature does not have this file"));
            };
            let hashes = manifest.map(|found| found.manifest.file(&path_of(&found.below, &name)));
            match (hashes, signed.root()) {
                (Some(Some(hashes)), Some(root)) if hashes.root() == root => hashes.named(&name),
                (Some(Some(_)), Some(_)) => {
                    Err(mismatch("the manifest is not the signed one: it has another hash of this file"))
                }
                (Some(Some(hashes)), None) if manifest.is_some_and(|found| found.is_signed) => {
                    hashes.named(&name)
                }
                (Some(None), Some(_)) => {
                    Err(mismatch("the manifest does not have this file, and it is signed"))
                }
                (None | Some(_), _) => self.read(object, &name, signed),
            }
        });
        made.map_err(|error| error.object(shown(location)))
    }

    /// Reads a file whole.
    fn read(&self, object: &dyn Object, name: &str, signed: &SignedFile) -> Result<FileHashes> {
        let bytes = object.bytes();
        let mut blocks = Blocks::new(bytes);
        let mut digest = (signed.algorithm == Algorithm::Sha256).then(|| Parts::new(bytes, signed));
        let mut buffer = vec![0; usize::try_from(READ_BYTES.min(bytes)).unwrap_or_default()];
        let mut cx = ReadContext::default();
        let mut at = 0;
        while at < bytes {
            if self.cancelled.load(Ordering::Relaxed) {
                return Err(Error::new(
                    ErrorKind::Cancelled,
                    "the checkpoint was not opened: it was cancelled",
                ));
            }
            let len = usize::try_from(READ_BYTES.min(bytes - at)).unwrap_or_default();
            let read = &mut buffer[..len];
            object.read_into(at, Window::from_slice(read), &mut cx)?;
            blocks.update(read);
            if let Some(parts) = &mut digest {
                parts.update(read);
            }
            at += len as u64;
        }
        let hashes = FileHashes::new(name, bytes, BLOCK_BYTES, blocks.finish())?;
        let is_signed = match digest {
            Some(parts) => parts.finish() == signed.parts,
            None => signed.root() == Some(hashes.root()),
        };
        if !is_signed {
            return Err(mismatch("the file is not the signed one"));
        }
        object.verify_unchanged()?;
        Ok(hashes)
    }
}

/// The values of a file's blocks, hashed as it is read.
struct Blocks {
    bytes: u64,
    at: u64,
    hasher: BlockHasher,
    values: Vec<[u8; 32]>,
}

impl Blocks {
    fn new(bytes: u64) -> Self {
        Self { bytes, at: 0, hasher: BlockHasher::new(0, bytes <= BLOCK_BYTES), values: Vec::new() }
    }

    fn update(&mut self, mut read: &[u8]) {
        while !read.is_empty() {
            let left = BLOCK_BYTES - self.at % BLOCK_BYTES;
            let (now, rest) = read.split_at(usize::try_from(left).unwrap_or(usize::MAX).min(read.len()));
            self.hasher.update(now);
            self.at += now.len() as u64;
            if self.at.is_multiple_of(BLOCK_BYTES) && self.at < self.bytes {
                self.values.push(self.hasher.value());
                self.hasher = BlockHasher::new(self.at, false);
            }
            read = rest;
        }
    }

    fn finish(mut self) -> Vec<[u8; 32]> {
        self.values.push(self.hasher.value());
        self.values
    }
}

/// The SHA-256 of each of a file's parts.
struct Parts {
    at: u64,
    /// Where parts end, the next one last; the end of the file where there is none.
    ends: Vec<Option<u64>>,
    hasher: Sha256,
    done: Vec<(Option<u64>, [u8; 32])>,
}

impl Parts {
    fn new(bytes: u64, signed: &SignedFile) -> Self {
        let mut ends: Vec<_> = signed.parts.iter().map(|(end, _)| *end).collect();
        // What lies behind the last part that is signed is a part of its own, which is not.
        if ends.last().is_none_or(|end| end.is_some_and(|end| end < bytes)) {
            ends.push(Some(bytes));
        }
        ends.reverse();
        Self { at: 0, ends, hasher: Sha256::new(), done: Vec::new() }
    }

    fn update(&mut self, mut read: &[u8]) {
        while !read.is_empty() {
            let left =
                self.ends.last().copied().flatten().map_or(u64::MAX, |end| end.saturating_sub(self.at));
            let (now, rest) = read.split_at(usize::try_from(left).unwrap_or(usize::MAX).min(read.len()));
            self.hasher.update(now);
            self.at += now.len() as u64;
            if now.len() as u64 == left {
                self.end_part();
            }
            read = rest;
        }
    }

    fn end_part(&mut self) {
        let end = self.ends.pop().flatten();
        self.done.push((end, self.hasher.finalize_reset().into()));
    }

    /// The parts that the file has: one that would end behind it is none of them.
    fn finish(mut self) -> Vec<(Option<u64>, [u8; 32])> {
        if self.ends.last() == Some(&None) {
            self.end_part();
        }
        self.done
    }
}

/// A name in a directory, as signatures and manifests have it.
fn path_of(directory: &str, name: &str) -> String {
    if directory.is_empty() { name.to_owned() } else { format!("{directory}/{name}") }
}

fn not_signed(cause: &'static str) -> Error {
    Error::new(ErrorKind::Signature, cause)
        .code(Code::NotSigned)
        .remedy("Take away what does not belong there, or have the directory signed as it is")
}

fn mismatch(cause: &'static str) -> Error {
    Error::new(ErrorKind::Signature, cause).code(Code::SignatureMismatch).remedy(
        "Fetch the files, the manifest and the signature again from whoever published them: they are of one version",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of `bytes` bytes, in the pieces that it is read in.
    fn read(bytes: u64, mut each: impl FnMut(&[u8])) -> Vec<u8> {
        let whole: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
        whole.chunks(READ_BYTES as usize).for_each(&mut each);
        whole
    }

    #[test]
    fn the_values_of_blocks_that_are_read_fold_to_the_hash_of_the_file() {
        let block = BLOCK_BYTES;
        for bytes in [0, 1, block - 1, block, block + 1, 2 * block, READ_BYTES, READ_BYTES + 1, 9 * block + 5]
        {
            let mut blocks = Blocks::new(bytes);
            let whole = read(bytes, |piece| blocks.update(piece));
            let hashes = FileHashes::new("x", bytes, BLOCK_BYTES, blocks.finish()).unwrap();
            assert_eq!(hashes.root(), blake3::hash(&whole).as_bytes(), "{bytes} bytes");
        }
    }

    #[test]
    fn parts_are_signed_from_front_to_back_and_nothing_follows_the_last() {
        let bytes = READ_BYTES + 10;
        let digests = |whole: &[u8], ends: &[u64]| {
            let mut start = 0;
            let part = |end: &u64| {
                let digest =
                    Sha256::digest(&whole[std::mem::replace(&mut start, *end as usize)..*end as usize]);
                (Some(*end), digest.into())
            };
            ends.iter().map(part).collect()
        };
        let whole = read(bytes, |_| {});
        let is_signed = |parts| {
            let signed = SignedFile { algorithm: Algorithm::Sha256, parts };
            let mut found = Parts::new(bytes, &signed);
            read(bytes, |piece| found.update(piece));
            found.finish() == signed.parts
        };
        for ends in
            [&[bytes][..], &[3, 7, bytes], &[READ_BYTES, bytes], &[1, READ_BYTES - 1, READ_BYTES + 1, bytes]]
        {
            assert!(is_signed(digests(&whole, ends)), "{ends:?}");
        }
        assert!(is_signed(vec![(None, Sha256::digest(&whole).into())]));
        // What follows the last part is not signed; nor is a part that the file does not have, or none at all.
        assert!(!is_signed(digests(&whole, &[3, 7])));
        let mut longer = digests(&whole, &[bytes]);
        longer.push((Some(bytes + 1), Sha256::digest(b"").into()));
        assert!(!is_signed(longer));
        assert!(!is_signed(Vec::new()));
    }

    #[test]
    fn a_directory_is_found_below_the_one_that_is_signed_and_nowhere_else() {
        let signed = Signed::new(vec![("s3://b/model/".into(), HashMap::new())]);
        assert_eq!(signed.tree_of("s3://b/model").unwrap().1, "");
        assert_eq!(signed.tree_of("s3://b/model/unet/x").unwrap().1, "unet/x");
        for other in ["s3://b/model2", "s3://b", "s3://b/models/model", ""] {
            assert_eq!(signed.tree_of(other).unwrap_err().error_code(), Code::NotSigned, "{other}");
        }
    }
}
