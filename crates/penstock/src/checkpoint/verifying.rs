//! Which manifest speaks of an object, and the store that has every object verified by it.
//!
//! While a checkpoint is opened, [`Discovery`] looks for the manifest of each directory that something is opened in, before
//! it is opened. What was found then serves the checkpoint's loads ([`Manifests`]): a manifest that is put there or taken
//! away later changes nothing. Where a directory has a manifest, all that is opened in it has to be in that.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use percent_encoding::percent_decode_str;

use super::location::{beside, is_http, is_url, join, name, parent, shown};
use super::signed::Signed;
use crate::error::{Code, Error, ErrorKind, Result};
use crate::manifest::{FileHashes, MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, Verify};
use crate::memory::Window;
use crate::store::{Entry, Identity, Object, ReadContext, Store, VerifiedObject, location_of, path_of};

/// How what is opened is verified.
#[derive(Debug, Clone, Default)]
pub struct Verification {
    /// When manifests are used.
    pub verify: Verify,
    /// What has to be signed, if anything has: then all that is opened.
    pub signed: Option<Arc<Signed>>,
}

impl From<Verify> for Verification {
    fn from(verify: Verify) -> Self {
        Self { verify, signed: None }
    }
}

/// The manifests of some directories, by their locations; nothing for those that have none.
#[derive(Debug, Default)]
pub(super) struct Manifests {
    of: HashMap<String, Option<Arc<Manifest>>>,
    /// Whether all that is in them is signed.
    are_signed: bool,
}

impl Manifests {
    /// Whether all that is in them is signed: then no load may do without.
    pub(super) fn are_signed(&self) -> bool {
        self.are_signed
    }

    /// Whether every directory has a manifest.
    pub(super) fn cover_all(&self) -> bool {
        self.of.values().all(Option::is_some)
    }

    /// Bytes of the largest blocks, if there is a manifest.
    pub(super) fn block_bytes(&self) -> Option<u64> {
        self.of.values().flatten().map(|manifest| manifest.block_bytes()).max()
    }

    /// A store like `inner`, whose objects are verified; `inner` itself where there is no manifest.
    pub(super) fn over(self: &Arc<Self>, inner: Arc<dyn Store>) -> Arc<dyn Store> {
        match self.block_bytes() {
            Some(_) => Arc::new(VerifyingStore { inner, manifests: Arc::clone(self) }),
            None => inner,
        }
    }

    fn verified(&self, location: &str, object: Arc<dyn Object>) -> Result<Arc<dyn Object>> {
        match self.of.get(parent(location)) {
            Some(manifest) => verified(location, object, manifest.as_ref()),
            None => {
                let cause =
                    "it is in none of the directories that were looked at when the checkpoint was opened";
                Err(Error::new(ErrorKind::Integrity, cause).object(shown(location)))
            }
        }
    }
}

fn verified(
    location: &str,
    object: Arc<dyn Object>,
    manifest: Option<&Arc<Manifest>>,
) -> Result<Arc<dyn Object>> {
    let Some(manifest) = manifest else { return Ok(object) };
    Ok(Arc::new(VerifiedObject::new(object, manifest, &file_name(location))?))
}

/// What the file at `location` is called in its directory.
pub(super) fn file_name(location: &str) -> Cow<'_, str> {
    let name = name(location);
    if is_http(location) { percent_decode_str(name).decode_utf8_lossy() } else { name.into() }
}

/// A store whose objects are verified by manifests that were found before.
struct VerifyingStore {
    inner: Arc<dyn Store>,
    manifests: Arc<Manifests>,
}

impl Store for VerifyingStore {
    fn open(&self, location: &str) -> Result<Arc<dyn Object>> {
        self.manifests.verified(location, self.inner.open(location)?)
    }

    fn reopen(&self, location: &str, identity: &Identity) -> Result<Arc<dyn Object>> {
        self.manifests.verified(location, self.inner.reopen(location, identity)?)
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        self.inner.list(prefix)
    }

    fn directories(&self, prefix: &str) -> Vec<String> {
        self.inner.directories(prefix)
    }

    fn file_of(&self, location: &str, identity: &Identity) -> Option<PathBuf> {
        self.inner.file_of(location, identity)
    }

    fn for_load(&self) -> Option<Arc<dyn Store>> {
        Some(self.manifests.over(self.inner.for_load()?))
    }

    fn interrupt(&self) {
        self.inner.interrupt();
    }
}

/// A manifest that was found.
#[derive(Debug, Clone)]
pub(super) struct FoundManifest {
    pub(super) manifest: Arc<Manifest>,
    /// Whether it is a file of the signature, where there is one.
    pub(super) is_signed: bool,
    /// Where the directory that is looked at lies below the manifest's.
    pub(super) below: String,
}

type Found = Arc<OnceLock<Result<Option<FoundManifest>>>>;
type Checked = Arc<OnceLock<Result<Arc<Manifest>>>>;

/// The store in which a checkpoint is opened: looks for manifests.
pub(super) struct Discovery {
    inner: Arc<dyn Store>,
    is_required: bool,
    /// By directory.
    found: Mutex<HashMap<String, Found>>,
    /// Manifests that listings showed, by directory.
    listed: Mutex<HashMap<String, String>>,
    signed: Option<Arc<Signed>>,
    /// Of files that have to be signed, by location: what was made sure of.
    checked: Mutex<HashMap<String, Checked>>,
    /// What was listed, by the directories that it turned out to be in: a store may name a version in its entries.
    listings: Mutex<HashMap<String, String>>,
}

impl Discovery {
    pub(super) fn new(inner: Arc<dyn Store>, verification: Verification) -> Self {
        let Verification { verify, signed } = verification;
        let (found, listed, checked) = (Mutex::default(), Mutex::default(), Mutex::default());
        // What is signed is verified with or without a manifest.
        let is_required = verify == Verify::Require && signed.is_none();
        Self { inner, is_required, found, listed, signed, checked, listings: Mutex::default() }
    }

    /// What was found.
    ///
    /// # Errors
    /// `Config` where signed files of one directory cannot be in one manifest.
    pub(super) fn into_manifests(self) -> Result<Manifests> {
        if self.signed.is_some() {
            return self.into_signed();
        }
        let found = self.found.into_inner().unwrap_or_else(PoisonError::into_inner);
        let known =
            |found: Found| found.get()?.as_ref().ok()?.as_ref().map(|found| Arc::clone(&found.manifest));
        let of = found.into_iter().map(|(directory, found)| (directory, known(found))).collect();
        Ok(Manifests { of, are_signed: false })
    }

    /// For each directory, a manifest of the files in it that were made sure of.
    fn into_signed(self) -> Result<Manifests> {
        let mut files: HashMap<String, Vec<FileHashes>> = HashMap::new();
        for (location, checked) in self.checked.into_inner().unwrap_or_else(PoisonError::into_inner) {
            if let Some(Ok(manifest)) = checked.get() {
                files.entry(parent(&location).to_owned()).or_default().extend_from_slice(manifest.files());
            }
        }
        let made = |(directory, files)| Ok((directory, Some(Arc::new(Manifest::new(files)?))));
        Ok(Manifests { of: files.into_iter().map(made).collect::<Result<_>>()?, are_signed: true })
    }

    /// The hashes of a file that has to be signed, in a manifest of that file alone.
    fn checked(&self, signed: &Signed, location: &str, object: &dyn Object) -> Result<Arc<Manifest>> {
        let checked = Arc::clone(lock(&self.checked).entry(location.to_owned()).or_default());
        let check = || {
            let directory = self.directory_of(location);
            let mut manifest = self.manifest_of(location)?;
            let (root, below) = signed.tree_of(&directory).map_err(|error| error.object(shown(location)))?;
            if manifest.is_none() && !below.is_empty() {
                // One that was made of all that is signed.
                let of_all = self.manifest_of(&join(root, MANIFEST_NAME))?;
                manifest = of_all.map(|found| FoundManifest { below: below.to_owned(), ..found });
            }
            let hashes = signed.hashes(location, &directory, object, manifest.as_ref())?;
            Manifest::new(vec![hashes]).map(Arc::new)
        };
        checked.get_or_init(check).clone()
    }

    /// The directory of an object, as it was asked for where it was listed.
    fn directory_of(&self, location: &str) -> String {
        let directory = parent(location);
        lock(&self.listings).get(directory).cloned().unwrap_or_else(|| directory.to_owned())
    }

    /// The manifest beside the object at `location`.
    fn manifest_of(&self, location: &str) -> Result<Option<FoundManifest>> {
        let directory = parent(location);
        let found = Arc::clone(lock(&self.found).entry(directory.to_owned()).or_default());
        found.get_or_init(|| self.find(location)).clone()
    }

    fn find(&self, location: &str) -> Result<Option<FoundManifest>> {
        let directory = parent(location);
        let listed = lock(&self.listed).get(directory).cloned();
        let place = listed.clone().unwrap_or_else(|| beside(location, MANIFEST_NAME));
        let bytes = match is_url(location) {
            false => local(&place)?,
            // A request that only a manifest is asked with.
            true if listed.is_some() || self.is_required || self.signed.is_some() => {
                self.remote(&place, listed.is_some())?
            }
            true => None,
        };
        match bytes {
            Some(bytes) => {
                let found = || {
                    let directory = self.directory_of(location);
                    let signed = self.signed.as_ref();
                    let is_signed =
                        signed.map(|signed| signed.check_manifest(&directory, &bytes)).transpose()?;
                    let manifest = Arc::new(Manifest::parse(&bytes)?);
                    Ok(FoundManifest { manifest, is_signed: is_signed == Some(true), below: String::new() })
                };
                found().map(Some).map_err(|error: Error| error.object(shown(&place)))
            }
            None if self.is_required => Err(Error::new(
                ErrorKind::Integrity,
                "there is no manifest, and one is required",
            )
            .code(Code::NoManifest)
            .object(shown(&place))
            .remedy(
                "Make one where the files are trusted (penstock manifest), or load with verify=\"auto\"",
            )),
            None => Ok(None),
        }
    }

    fn remote(&self, place: &str, was_listed: bool) -> Result<Option<Vec<u8>>> {
        let object = match self.inner.open(place) {
            Err(error) if error.kind() == ErrorKind::NotFound && !was_listed => return Ok(None),
            // S3 denies absent keys too, to whoever may not list. What is signed can do without a manifest.
            Err(error) if error.kind() == ErrorKind::Access && !was_listed && self.signed.is_some() => {
                return Ok(None);
            }
            object => object?,
        };
        let len = object.bytes();
        let mut bytes = room(len).map_err(|error| error.object(shown(place)))?;
        if len > 0 {
            object.read_into(0, Window::from_slice(&mut bytes), &mut ReadContext::default())?;
        }
        Ok(Some(bytes))
    }
}

impl Store for Discovery {
    fn open(&self, location: &str) -> Result<Arc<dyn Object>> {
        if let Some(signed) = &self.signed {
            let object = self.inner.open(location)?;
            let manifest = self.checked(signed, location, &*object)?;
            return verified(location, object, Some(&manifest));
        }
        let found = self.manifest_of(location)?;
        verified(location, self.inner.open(location)?, found.as_ref().map(|found| &found.manifest))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        let entries = self.inner.list(prefix)?;
        if self.signed.is_some() {
            let directory = prefix.trim_end_matches('/');
            for entry in &entries {
                lock(&self.listings).insert(parent(&entry.location).to_owned(), directory.to_owned());
            }
        }
        for entry in entries.iter().filter(|entry| name(&entry.location) == MANIFEST_NAME) {
            lock(&self.listed).insert(parent(&entry.location).to_owned(), entry.location.clone());
        }
        Ok(entries)
    }

    fn directories(&self, prefix: &str) -> Vec<String> {
        self.inner.directories(prefix)
    }

    fn file_of(&self, location: &str, identity: &Identity) -> Option<PathBuf> {
        self.inner.file_of(location, identity)
    }

    fn interrupt(&self) {
        self.inner.interrupt();
    }
}

/// The manifest at `location`, if there is one.
///
/// # Errors
/// `Integrity` where it is refused; what reading fails with.
pub fn read_manifest(store: Arc<dyn Store>, location: &str) -> Result<Option<Manifest>> {
    let bytes = match is_url(location) {
        true => Discovery::new(store, Verification::default()).remote(location, false)?,
        false => local(location)?,
    };
    bytes.map(|bytes| Manifest::parse(&bytes).map_err(|error| error.object(shown(location)))).transpose()
}

/// Memory for a manifest of `len` bytes.
fn room(len: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let wanted = usize::try_from(len).ok().filter(|_| len <= MAX_MANIFEST_BYTES);
    let Some(wanted) = wanted else {
        return Err(refused(format!("it has {len} bytes, more than {MAX_MANIFEST_BYTES}")));
    };
    super::header::lengthen(&mut bytes, wanted)?;
    Ok(bytes)
}

/// The manifest file of this machine at `place`, if there is one.
///
/// Opened without following a link, so that what is read is what lies in the directory. The exception is the cache of the
/// hub, in which every file of a snapshot is a link to `blobs`.
fn local(place: &str) -> Result<Option<Vec<u8>>> {
    let path = path_of(place);
    let open = |flags| {
        File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | flags).open(&path)
    };
    let failed = |error: io::Error| Error::from_io("opening the manifest", &error).object(shown(place));
    let file = match open(libc::O_NOFOLLOW) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            if !leads_to_blobs(&path) {
                return Err(refused("a symbolic link stands in its place").object(shown(place)));
            }
            open(0).map_err(failed)?
        }
        file => file.map_err(failed)?,
    };
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(refused("it is no regular file").object(shown(place)));
    }
    let mut bytes = room(metadata.len()).map_err(|error| error.object(shown(place)))?;
    bytes.clear();
    // What it has grown by since does not belong to it, and is refused with it.
    let read = file.take(metadata.len().saturating_add(1)).read_to_end(&mut bytes);
    read.map_err(|error| Error::from_io("reading the manifest", &error).object(shown(place)))?;
    Ok(Some(bytes))
}

/// Whether the link at `path` is one of a snapshot of the hub's cache: `../../blobs/name`, with a step up more for each
/// directory that it is in.
fn leads_to_blobs(path: &Path) -> bool {
    let Ok(target) = std::fs::read_link(path) else { return false };
    let target = location_of(target);
    let below = target.trim_start_matches("../");
    below != target
        && below.strip_prefix("blobs/").is_some_and(|name| !name.is_empty() && !name.contains('/'))
}

fn refused(cause: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Integrity, format!("the manifest is refused: {cause}"))
        .code(Code::BadManifest)
        .remedy("Put the manifest's own file there, or make one of files that you trust (penstock manifest)")
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
