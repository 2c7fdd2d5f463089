//! A manifest of a directory of this machine: its files hashed by many threads, and the manifest put beside them.
//!
//! A file that changes while it is hashed is an error, not a manifest of two versions. The manifest appears whole or not at
//! all: it is written beside its place and renamed.

use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{BLOCK_BYTES, FileHashes, MANIFEST_NAME, Manifest};
use crate::error::{Error, ErrorKind, Result};
use crate::manifest::tree::BlockHasher;
use crate::threads::in_order;

/// Blocks that one thread hashes at a time.
const BLOCKS_AT_ONCE: u64 = 16;
/// What a signature of the directory is called, which may have the manifest among its files, so that the manifest cannot
/// have it.
const SIGNATURE_NAME: &str = "model.sig";
/// Attempts at a name for the file that becomes the manifest.
const ATTEMPTS: u64 = 100;

/// A file that is to be hashed.
struct Found {
    name: String,
    path: PathBuf,
    version: Version,
}

/// What changes when a file is written to or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

impl Version {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// The manifest of all files in `directory` and below, hashed by at most `threads` threads. Names that begin with a dot and
/// signatures (`model.sig`) are left out, links to files are followed, links to directories are not. `name_of` is how a relative path is written in a
/// location. Ends with `Cancelled` soon after `cancelled` is set.
///
/// # Errors
/// `NotFound` or `Access` where something cannot be read, `Config` where `directory` is none or holds what no manifest can
/// name, `Changed` where a file is written to meanwhile, `Storage`.
pub fn make(
    directory: &Path,
    threads: usize,
    name_of: impl Fn(&Path) -> String + Sync,
    cancelled: &AtomicBool,
) -> Result<Manifest> {
    let metadata = fs::metadata(directory).map_err(|error| failed("opening", &error, &name_of(directory)))?;
    if !metadata.is_dir() {
        return Err(Error::new(ErrorKind::Config, "a manifest is made of a directory")
            .object(name_of(directory))
            .remedy("Name the directory that the file is in"));
    }
    let files = find(directory, &name_of)?;
    let mut parts = Vec::new();
    for file in &files {
        let blocks = file.version.bytes.div_ceil(BLOCK_BYTES).max(1);
        let mut first = 0;
        while first < blocks {
            let end = blocks.min(first + BLOCKS_AT_ONCE);
            parts.push((file, first..end));
            first = end;
        }
    }
    let hash = |(file, blocks): &(&Found, Range<u64>)| match cancelled.load(Ordering::Relaxed) {
        true => Err(Error::new(ErrorKind::Cancelled, "the manifest was not made: it was cancelled")),
        false => hash(file, blocks.clone()).map_err(|error| error.object(name_of(&file.path))),
    };
    let mut hashed =
        in_order(&parts, threads, "penstock-hash", hash).map_err(|(_, error)| error)?.into_iter();
    let mut made = Vec::with_capacity(files.len());
    for file in &files {
        let blocks = file.version.bytes.div_ceil(BLOCK_BYTES).max(1);
        let parts = usize::try_from(blocks.div_ceil(BLOCKS_AT_ONCE)).unwrap_or(usize::MAX);
        let values = hashed.by_ref().take(parts).flatten().collect();
        let hashes = FileHashes::new(&file.name, file.version.bytes, BLOCK_BYTES, values);
        made.push(hashes.map_err(|error| error.object(name_of(&file.path)))?);
    }
    Manifest::new(made).map_err(|error| error.object(name_of(directory)))
}

/// The files of `directory` and below.
fn find(directory: &Path, name_of: &impl Fn(&Path) -> String) -> Result<Vec<Found>> {
    let mut files = Vec::new();
    let mut left = vec![directory.to_owned()];
    while let Some(inside) = left.pop() {
        let refused = |error: io::Error| failed("listing", &error, &name_of(&inside));
        for entry in fs::read_dir(&inside).map_err(refused)? {
            let entry = entry.map_err(refused)?;
            let (path, name) = (entry.path(), entry.file_name());
            if name.as_encoded_bytes().starts_with(b".") || name == MANIFEST_NAME || name == SIGNATURE_NAME {
                continue;
            }
            let is_link = entry.file_type().map_err(refused)?.is_symlink();
            let metadata = fs::metadata(&path).map_err(|error| failed("opening", &error, &name_of(&path)))?;
            if metadata.is_dir() {
                left.extend((!is_link).then_some(path));
            } else if metadata.is_file() {
                let name = name_of(path.strip_prefix(directory).unwrap_or(&path));
                files.push(Found { name, path, version: Version::of(&metadata) });
            } else {
                return Err(Error::new(ErrorKind::Access, "neither a regular file nor a directory")
                    .object(name_of(&path))
                    .remedy("Remove it: what a manifest speaks of can be read twice"));
            }
        }
    }
    Ok(files)
}

/// The hashes of one file, which is called `name` in the manifest.
///
/// # Errors
/// As [`make`].
pub fn hash_file(path: &Path, name: &str) -> Result<FileHashes> {
    let shown = name.to_owned();
    let metadata = fs::metadata(path).map_err(|error| failed("opening", &error, &shown))?;
    let found = Found { name: name.to_owned(), path: path.to_owned(), version: Version::of(&metadata) };
    let blocks = found.version.bytes.div_ceil(BLOCK_BYTES).max(1);
    let values = hash(&found, 0..blocks).map_err(|error| error.object(&*shown))?;
    FileHashes::new(name, found.version.bytes, BLOCK_BYTES, values).map_err(|error| error.object(shown))
}

/// The values of these blocks of a file.
fn hash(found: &Found, blocks: Range<u64>) -> Result<Vec<[u8; 32]>> {
    let changed = || {
        Error::new(ErrorKind::Changed, "the file was written to or replaced while its manifest was made")
            .remedy("Make the manifest when nobody writes to the directory")
    };
    let is_same = |file: &File| Ok(Version::of(&file.metadata()?) == found.version);
    let reading = |error: io::Error| match error.kind() {
        // Shorter by now.
        io::ErrorKind::UnexpectedEof => changed(),
        _ => Error::from_io("reading", &error),
    };
    let file = File::open(&found.path).map_err(|error| Error::from_io("opening", &error))?;
    if !is_same(&file).map_err(reading)? {
        return Err(changed());
    }
    let whole = found.version.bytes <= BLOCK_BYTES;
    let mut buffer = vec![0; usize::try_from(BLOCK_BYTES.min(found.version.bytes)).unwrap_or_default()];
    let mut values = Vec::new();
    for block in blocks {
        let start = block * BLOCK_BYTES;
        let len = usize::try_from(BLOCK_BYTES.min(found.version.bytes - start)).unwrap_or_default();
        file.read_exact_at(&mut buffer[..len], start).map_err(reading)?;
        let mut hasher = BlockHasher::new(start, whole);
        hasher.update(&buffer[..len]);
        values.push(hasher.value());
    }
    if is_same(&file).map_err(reading)? { Ok(values) } else { Err(changed()) }
}

/// Puts `manifest` into `directory`, in place of one that is there, and returns its path.
///
/// # Errors
/// `NotFound`, `Access` or `Storage` where the directory cannot be written to; what was there before is left then.
pub fn write(directory: &Path, manifest: &Manifest) -> io::Result<PathBuf> {
    let place = directory.join(MANIFEST_NAME);
    let (path, mut file) = beside(directory)?;
    let written = file
        .write_all(&manifest.to_bytes())
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&path, &place))
        .and_then(|()| File::open(directory)?.sync_all());
    if written.is_err() {
        // It is there no more where only the last step failed.
        let _ = fs::remove_file(&path);
    }
    written.map(|()| place)
}

/// A new file in `directory`, of which nobody knows.
fn beside(directory: &Path) -> io::Result<(PathBuf, File)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut taken = io::Error::from(io::ErrorKind::AlreadyExists);
    for _ in 0..ATTEMPTS {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!(".{MANIFEST_NAME}.{}-{number}", std::process::id()));
        match File::options().write(true).create_new(true).open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => taken = error,
            Err(error) => return Err(error),
        }
    }
    Err(taken)
}

fn failed(action: &str, error: &io::Error, location: &str) -> Error {
    Error::from_io(action, error).object(location)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(directory: &Path) -> Result<Manifest> {
        make(directory, 2, |path| path.display().to_string(), &AtomicBool::new(false))
    }

    #[test]
    fn a_manifest_has_the_hash_of_every_file_below_a_directory() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let long: Vec<u8> = (0..(37 << 20) + 5u32).map(|i| (i * 7 % 253) as u8).collect();
        fs::create_dir(at("unet")).unwrap();
        fs::create_dir(at(".cache")).unwrap();
        for (name, bytes) in [
            ("a.safetensors", &long[..]),
            ("unet/b.safetensors", &long[..1 << 20]),
            ("empty", b""),
            (".cache/x", b"not covered"),
            (".hidden", b"not covered"),
        ] {
            fs::write(at(name), bytes).unwrap();
        }
        std::os::unix::fs::symlink("a.safetensors", at("link.safetensors")).unwrap();
        std::os::unix::fs::symlink("unet", at("linked")).unwrap();
        let manifest = made(directory.path()).unwrap();
        let names: Vec<_> = manifest.files().iter().map(FileHashes::name).collect();
        assert_eq!(names, ["a.safetensors", "empty", "link.safetensors", "unet/b.safetensors"]);
        assert_eq!(manifest.file("a.safetensors").unwrap().root(), blake3::hash(&long).as_bytes());
        assert_eq!(manifest.file("link.safetensors").unwrap().root(), blake3::hash(&long).as_bytes());
        assert_eq!(
            manifest.file("unet/b.safetensors").unwrap().root(),
            blake3::hash(&long[..1 << 20]).as_bytes()
        );
        assert_eq!(manifest.file("empty").unwrap().root(), blake3::hash(b"").as_bytes());

        // Written over what was there, and no part of the next one; nothing else is left.
        let path = write(directory.path(), &manifest).unwrap();
        assert_eq!(write(directory.path(), &manifest).unwrap(), path);
        assert_eq!(Manifest::parse(&fs::read(path).unwrap()).unwrap(), manifest);
        assert_eq!(made(directory.path()).unwrap(), manifest);
        let hidden = fs::read_dir(directory.path())
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().file_name().as_encoded_bytes().starts_with(b".penstock"));
        assert_eq!(hidden.count(), 0);
    }

    #[test]
    fn what_cannot_be_hashed_is_an_error_that_names_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a");
        fs::write(&file, b"x").unwrap();
        assert_eq!(made(&file).unwrap_err().kind(), ErrorKind::Config);
        assert_eq!(made(&directory.path().join("missing")).unwrap_err().kind(), ErrorKind::NotFound);
        std::os::unix::fs::symlink("nowhere", directory.path().join("broken")).unwrap();
        let error = made(directory.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.object_name().unwrap().ends_with("broken"), "{error}");
        fs::remove_file(directory.path().join("broken")).unwrap();
        let cancelled = make(directory.path(), 1, |path| path.display().to_string(), &AtomicBool::new(true));
        assert_eq!(cancelled.unwrap_err().kind(), ErrorKind::Cancelled);
    }

    #[test]
    fn a_manifest_that_cannot_be_written_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("a"), b"x").unwrap();
        let manifest = made(directory.path()).unwrap();
        // A directory of its name cannot be renamed over.
        fs::create_dir(directory.path().join(MANIFEST_NAME)).unwrap();
        write(directory.path(), &manifest).unwrap_err();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_file_that_changed_since_it_was_found_is_no_part_of_a_manifest() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        fs::write(&path, b"first").unwrap();
        let found = find(directory.path(), &|path: &Path| path.display().to_string()).unwrap().remove(0);
        fs::write(&path, b"second version").unwrap();
        assert_eq!(hash(&found, 0..1).unwrap_err().kind(), ErrorKind::Changed);
    }
}
