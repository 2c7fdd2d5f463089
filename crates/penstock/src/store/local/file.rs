//! One open file: what it is, which version of it, and whether it is still that version.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::fs::{Advice, fadvise};

use super::CachePolicy;
use super::cache::Probe;
use super::failure::failed;
use super::handle::{DirectFile, OwnHandle};
use super::path::location_of;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{FileMapping, Window};
use crate::store::{Identity, Object, ReadContext, shown};

/// A regular file, open for reading.
#[derive(Debug)]
pub(super) struct LocalFile {
    path: PathBuf,
    /// What errors call it, since that is what has to be looked at.
    pub(super) location: String,
    /// Of a copy of a remote object: that one's name and version.
    pub(super) stands_for: Option<(String, Identity)>,
    pub(super) file: File,
    bytes: u64,
    version: Version,
    changed: Changed,
    /// Set when the change time differs from what it was, and nothing else does.
    touched: AtomicBool,
    pub(super) cache: CachePolicy,
    probe: Probe,
    direct: OnceLock<Option<Arc<DirectFile>>>,
    /// Set when a direct read was refused although the file could be opened for it, or is known to gain nothing.
    pub(super) direct_refused: AtomicBool,
    /// Why it is read through the page cache although it would not have to be.
    note: OnceLock<String>,
}

/// What changes when a file is written to or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Version {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

/// When the inode was last changed. A program that writes and puts the modification time back cannot put this back. But
/// `chmod`, `chown`, relabelling, renaming and hard links alter it too, even where they set what was set before (as when
/// Kubernetes gives a volume to another pod). So it is no failure where it alone differs: whoever read the header compares
/// it again before a load ([`Store::reopen`](crate::store::Store::reopen)), and a change during a load is noted.
type Changed = (i64, i64);

fn changed_at(metadata: &std::fs::Metadata) -> Changed {
    (metadata.ctime(), metadata.ctime_nsec())
}

impl Version {
    fn of(metadata: &std::fs::Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// What stands before the change time in an identity.
const CHANGED: &str = ":changed ";

/// Whether two identities are of one file, written to at one time, whose change times differ.
pub(in crate::store) fn differ_in_change_time(one: &Identity, other: &Identity) -> bool {
    match (one.0.split_once(CHANGED), other.0.split_once(CHANGED)) {
        (Some((one, then)), Some((other, now))) => one == other && then != now,
        _ => false,
    }
}

impl LocalFile {
    /// Opens the file at `path`, which must be a regular file or a link to one.
    ///
    /// # Errors
    /// `NotFound`; `Access` where it is unreadable, or a directory, FIFO, socket or device; `Storage`.
    pub(super) fn open(path: &Path, cache: CachePolicy) -> Result<Self> {
        let location = location_of(path);
        let refused = |error: io::Error| opening_failed(&error, path).object(shown(&location));
        // Looked at before it is opened: opening a FIFO waits for a writer, opening a device may do anything.
        refuse_special(&std::fs::metadata(path).map_err(refused)?, &location)?;
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY)
            .open(path)
            .map_err(refused)?;
        let metadata = file.metadata().map_err(refused)?;
        refuse_special(&metadata, &location)?;
        Ok(Self {
            probe: Probe::of(&file),
            path: path.to_owned(),
            location,
            stands_for: None,
            file,
            bytes: metadata.len(),
            version: Version::of(&metadata),
            changed: changed_at(&metadata),
            touched: AtomicBool::new(false),
            cache,
            direct: OnceLock::new(),
            direct_refused: AtomicBool::new(false),
            note: OnceLock::new(),
        })
    }

    /// Whether it is the file of that identity, as far as all but the change time tells. A difference in that is noted.
    pub(super) fn is_likely(&self, identity: &Identity) -> bool {
        let own = self.identity();
        if own != *identity {
            self.touched.store(true, Ordering::Relaxed);
        }
        differ_in_change_time(&own, identity) || own == *identity
    }

    /// The file for direct reads, opened at the first use: the context's own where it wants one. `None` where the file system
    /// has no such thing.
    pub(super) fn direct(&self, cx: &mut ReadContext) -> Option<Arc<DirectFile>> {
        let shared = self.direct.get_or_init(|| self.open_direct().map(Arc::new)).as_ref()?;
        Some(if cx.per_reader_fd { OwnHandle::of(cx, self.version, shared) } else { Arc::clone(shared) })
    }

    fn open_direct(&self) -> Option<DirectFile> {
        let file = DirectFile::open(&self.path).inspect_err(|error| self.remark_no_direct(error)).ok()?;
        // The path may lead elsewhere by now; `verify_unchanged` will say so, this must not read from there.
        (Version::of(&file.metadata().ok()?) == self.version).then_some(())?;
        DirectFile::aligned(file)
    }

    /// Goes on without direct reads, which the kernel refuses.
    pub(super) fn refuse_direct(&self, error: &Error) {
        self.direct_refused.store(true, Ordering::Relaxed);
        self.remark_no_direct(&error.cause());
    }

    fn remark_no_direct(&self, because: &dyn std::fmt::Display) {
        self.note.get_or_init(|| {
            // Without the file's name: one sentence for all files of a mount.
            format!("read through the page cache, as direct reads (O_DIRECT) are refused: {because}")
        });
    }

    /// The share of the pages of `range` that are in the page cache; nothing where the kernel does not say.
    pub(super) fn cached_share(&self, range: &Range<u64>) -> Option<f64> {
        self.probe.cached_share(&self.file, self.bytes, range)
    }

    /// Has the kernel bring `range` into the page cache, without waiting for it.
    pub(super) fn ask_for(&self, range: &Range<u64>) {
        let len = std::num::NonZeroU64::new(range.end.saturating_sub(range.start));
        // A hint: where it is refused, reading brings the pages in.
        let _ = fadvise(&self.file, range.start, len, Advice::WillNeed);
    }

    pub(super) fn changed(&self, cause: &'static str, range: Option<Range<u64>>) -> Error {
        let error = Error::new(ErrorKind::Changed, cause)
            .object(&self.location)
            .remedy("Wait until whatever writes the file is done, then open the checkpoint again");
        match range {
            Some(range) => error.range(range),
            None => error,
        }
    }
}

impl Object for LocalFile {
    fn location(&self) -> &str {
        self.stands_for.as_ref().map_or(&self.location, |(location, _)| location)
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn identity(&self) -> Identity {
        if let Some((_, identity)) = &self.stands_for {
            return identity.clone();
        }
        let Version { device, inode, bytes, modified } = self.version;
        let changed = self.changed;
        Identity(format!(
            "{device:x}:{inode:x}:{bytes}:{}.{:09}{CHANGED}{}.{:09}",
            modified.0, modified.1, changed.0, changed.1
        ))
    }

    fn read_into(&self, offset: u64, into: Window<'_>, cx: &mut ReadContext) -> Result<()> {
        self.read_exactly(offset, into, cx)
    }

    fn read_to_staging(&self, range: Range<u64>, buffer: Window<'_>, cx: &mut ReadContext) -> Result<usize> {
        self.read_aligned(range, buffer, cx)
    }

    fn map(&self) -> Result<FileMapping> {
        FileMapping::map(&self.file, self.bytes).map_err(|error| error.object(&self.location))
    }

    fn is_cached(&self, range: &Range<u64>) -> Option<bool> {
        self.would_copy(range)
    }

    fn prefetch(&self, range: Range<u64>) -> bool {
        if self.cached_share(&range).is_some_and(|share| share >= 1.0) {
            return false;
        }
        self.ask_for(&range);
        true
    }

    fn avoid_direct(&self) {
        // Someone who rules the page cache out means it.
        if self.cache != CachePolicy::Bypass {
            self.direct_refused.store(true, Ordering::Relaxed);
        }
    }

    fn notes(&self) -> Vec<String> {
        let unknown = self.probe.unanswered().filter(|_| self.cache == CachePolicy::Auto);
        let touched = self.touched.load(Ordering::Relaxed).then(|| {
            "the change time of a file differs from when it was opened, and its modification time does not: chmod, chown or a \
             link does that, or a program that wrote to it and put the time back"
                .to_owned()
        });
        self.note.get().cloned().into_iter().chain(unknown).chain(touched).collect()
    }

    fn verify_unchanged(&self) -> Result<()> {
        let now = self.file.metadata().map_err(|e| failed("checking", &e).object(&self.location))?;
        if now.len() < self.bytes {
            return Err(self.changed("the file was truncated while it was being loaded", None));
        }
        if Version::of(&now) != self.version {
            return Err(self.changed("the file was written to while it was being loaded", None));
        }
        if changed_at(&now) != self.changed {
            self.touched.store(true, Ordering::Relaxed);
        }
        // A path that leads nowhere any more is no harm: the bytes came from the file that was opened.
        match std::fs::metadata(&self.path) {
            Ok(there) if (there.dev(), there.ino()) != (self.version.device, self.version.inode) => {
                Err(self.changed("the file was replaced by another while it was being loaded", None))
            }
            _ => Ok(()),
        }
    }
}

fn refuse_special(metadata: &std::fs::Metadata, location: &str) -> Result<()> {
    let kind = metadata.file_type();
    let what = if kind.is_file() {
        return Ok(());
    } else if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    };
    Err(Error::new(ErrorKind::Access, format!("this is {what}, not a regular file"))
        .object(shown(location))
        .remedy("Give the path of a safetensors file; streams and devices cannot be read at offsets"))
}

fn opening_failed(error: &io::Error, path: &Path) -> Error {
    if error.kind() == io::ErrorKind::NotFound && path.is_symlink() {
        return Error::from_io("opening", error)
            .remedy("The link leads nowhere: the download it points to is missing or was cleaned up");
    }
    failed("opening", error)
}
