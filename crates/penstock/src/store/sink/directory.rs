//! A directory or a file of this machine, complete or absent: written beside its place, and renamed when it is complete.
//!
//! What is written is called `.NAME.penstock-save`, in the directory that `NAME` will be in, so that the last step is a
//! rename within one file system. What is there is exchanged for it in one step (`RENAME_EXCHANGE`), and removed
//! afterwards. A lock beside it (`.NAME.penstock-save.lock`) ends with the process that holds it. So the second of two savers
//! is refused, and what a killed one left is cleared away by the next.
//!
//! Where a directory is replaced, files of it that are no weights stay: they are linked into the new one. Weights, their
//! indexes and the manifest of the old one go.
//!
//! After a power failure there is the old or the new, if files are flushed: they are before the rename, and the directory
//! after it.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::Errno;

use super::file::{LocalFile, failed};
use super::{PREVIOUS_SUFFIX, Sink, SinkObject, TEMPORARY_SUFFIX, being_saved, exists};
use crate::error::{Error, ErrorKind, Result};
use crate::manifest::MANIFEST_NAME;
use crate::memory::Owner;
use crate::store::local::location_of;
use crate::store::locked_file::LockedFile;

/// Attempts at a lock whose file someone else takes away meanwhile.
const ATTEMPTS: usize = 100;
/// Parts that are written at once: disks want a few, and memory no more than there are cores.
const WRITERS: usize = 8;

/// What stands in the place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum There {
    Nothing,
    EmptyDirectory,
    Something,
}

/// A directory, or a file, that is being saved.
pub struct LocalSink {
    shown: String,
    target: PathBuf,
    temporary: PathBuf,
    is_directory: bool,
    there: There,
    flush: bool,
    kept: Vec<(String, PathBuf)>,
    /// Files that may be open.
    files: Mutex<Vec<Weak<LocalFile>>>,
    /// Whether the page cache is in between although it need not be.
    refused: Arc<AtomicBool>,
    /// Held until the save has ended; none where the file system has no locks.
    lock: Mutex<Option<Lock>>,
    owner: Owner,
}

struct Lock {
    path: PathBuf,
    _file: Option<LockedFile>,
}

impl LocalSink {
    /// Takes the place at `path`: a directory, or one file. `overwrite` says whether what is there may be replaced, `flush`
    /// whether what is saved is on stable storage when [`Sink::publish`] returns.
    ///
    /// # Errors
    /// `Exists` where something is there that may not be replaced, or another save is writing there; `Config` where the path
    /// cannot be the name of what is saved; `Access`, `NotFound` or `Storage` where nothing can be made beside it.
    pub fn create(path: &Path, is_directory: bool, overwrite: bool, flush: bool) -> Result<Self> {
        let shown = location_of(path);
        let io = |action: &str, error: &io::Error| failed(action, error).object(location_of(path));
        // The directory that a link leads to is replaced, and not the link.
        let target = match is_directory && path.is_symlink() && path.is_dir() {
            true => fs::canonicalize(path).map_err(|error| io("following the link", &error))?,
            false => path.to_owned(),
        };
        let Some(name) = target.file_name() else {
            return Err(Error::new(ErrorKind::Config, "this path ends in no name of its own")
                .object(shown)
                .remedy("Give the name of a directory, or of a file that ends in .safetensors"));
        };
        let parent = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        fs::create_dir_all(parent).map_err(|error| io("making the directory", &error))?;
        let beside = |suffix: &str| {
            let mut hidden = std::ffi::OsString::from(".");
            hidden.push(name);
            hidden.push(suffix);
            parent.join(hidden)
        };
        let temporary = beside(TEMPORARY_SUFFIX);
        let lock = lock(&beside(".penstock-save.lock"), &shown)?;
        let mut sink = Self {
            there: There::Nothing,
            target: target.clone(),
            is_directory,
            flush,
            kept: Vec::new(),
            files: Mutex::default(),
            refused: Arc::default(),
            owner: Owner::current(),
            // Given to the sink only once what lies in its place is its own to remove.
            lock: Mutex::default(),
            temporary,
            shown,
        };
        let locked = lock._file.is_some();
        let prepared = sink.prepare(overwrite, locked);
        match prepared {
            Ok(()) => {
                *sink.lock.lock().unwrap_or_else(PoisonError::into_inner) = Some(lock);
                if let Err(error) = sink.fill() {
                    sink.discard();
                    return Err(error);
                }
                Ok(sink)
            }
            Err(error) => {
                lock.release();
                Err(error)
            }
        }
    }

    /// Looks at what is there, and makes what is written to.
    fn prepare(&mut self, overwrite: bool, locked: bool) -> Result<()> {
        let io = |action: &str, error: &io::Error| failed(action, error).object(&*self.shown);
        self.there = match fs::symlink_metadata(&self.target) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => There::Nothing,
            Err(error) => return Err(io("looking for what is there", &error)),
            Ok(found) if found.is_dir() != self.is_directory => {
                let (is, wanted) = match found.is_dir() {
                    true => (
                        "a directory",
                        "Give a name in it that ends in .safetensors, or its own without that ending",
                    ),
                    false => (
                        "no directory",
                        "Give another name, or one that ends in .safetensors for a single file",
                    ),
                };
                return Err(Error::new(ErrorKind::Exists, format!("{is} is there"))
                    .object(&*self.shown)
                    .remedy(wanted));
            }
            Ok(found) if self.is_directory => {
                let parent = self.temporary.parent().and_then(|parent| fs::metadata(parent).ok());
                if parent.is_some_and(|parent| parent.dev() != found.dev()) {
                    let cause = "this directory is a mount point, which cannot be exchanged for another";
                    let error = Error::new(ErrorKind::Config, cause).object(&*self.shown);
                    return Err(error.remedy("Give a directory in it"));
                }
                let mut entries =
                    fs::read_dir(&self.target).map_err(|error| io("listing the directory", &error))?;
                if entries.next().is_none() { There::EmptyDirectory } else { There::Something }
            }
            Ok(_) => There::Something,
        };
        if self.there == There::Something && !overwrite {
            return Err(exists(&self.shown, "Give overwrite=True to replace it, or another place"));
        }
        match (remove(&self.temporary, locked), locked) {
            (Ok(()), _) => {}
            (Err(_), false) => {
                let what = location_of(&self.temporary);
                return Err(being_saved(
                    &self.shown,
                    format!(
                        "If no save is running, delete {what}: this file system has no locks that would tell"
                    ),
                ));
            }
            (Err(error), true) => return Err(io("clearing away what a save left that was cut off", &error)),
        }
        // What a replacement in two steps left: the new one is in its place if anything is.
        let previous = self.previous();
        if locked && previous.exists() {
            match self.there {
                There::Nothing => fs::rename(&previous, &self.target),
                _ => remove(&previous, true),
            }
            .map_err(|error| io("clearing away what a save left that was cut off", &error))?;
            if self.there == There::Nothing {
                return self.prepare(overwrite, locked);
            }
        }
        if self.is_directory {
            fs::create_dir(&self.temporary).map_err(|error| io("making the directory", &error))?;
        }
        Ok(())
    }

    /// Puts into a new directory what stays of the old one.
    fn fill(&mut self) -> Result<()> {
        if self.there == There::Nothing {
            return Ok(());
        }
        let io = |error: &io::Error| failed("keeping what is there", error).object(&*self.shown);
        if !self.is_directory {
            return Ok(());
        }
        let old = fs::metadata(&self.target).map_err(|error| io(&error))?;
        fs::set_permissions(&self.temporary, Permissions::from_mode(old.mode() & 0o7777))
            .map_err(|error| io(&error))?;
        let mut kept = Vec::new();
        keep(&self.target, &self.temporary, "", old.dev(), &mut kept).map_err(|error| io(&error))?;
        self.kept = kept;
        Ok(())
    }

    fn previous(&self) -> PathBuf {
        let name = self.target.file_name().unwrap_or_default();
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(PREVIOUS_SUFFIX);
        self.target.with_file_name(hidden)
    }

    fn path_of(&self, name: &str) -> PathBuf {
        if self.is_directory { self.temporary.join(name) } else { self.temporary.clone() }
    }

    /// The last step.
    fn rename(&self) -> io::Result<()> {
        let (from, to) = (&self.temporary, &self.target);
        match self.there {
            There::Nothing => into_nothing(from, to, self.is_directory),
            // A directory is renamed over an empty one, and over no other.
            There::EmptyDirectory => fs::rename(from, to),
            There::Something if !self.is_directory => fs::rename(from, to),
            There::Something => match renameat_with(CWD, from, CWD, to, RenameFlags::EXCHANGE) {
                Ok(()) => Ok(()),
                Err(Errno::NOENT) => into_nothing(from, to, true),
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::PERM) => {
                    // For a moment there is neither; what was there can be found beside it.
                    let previous = self.previous();
                    fs::rename(to, &previous)?;
                    if let Err(error) = fs::rename(from, to) {
                        let _ = fs::rename(&previous, to);
                        return Err(error);
                    }
                    fs::rename(&previous, from)
                }
                Err(errno) => Err(errno.into()),
            },
        }
    }
}

impl Sink for LocalSink {
    fn location(&self) -> &str {
        &self.shown
    }

    fn begin(&self, name: &str, bytes: u64) -> Result<Arc<dyn SinkObject>> {
        let file = Arc::new(LocalFile::create(&self.path_of(name), bytes, self.flush, &self.refused)?);
        self.files.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&file));
        Ok(file)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let file = LocalFile::create(&self.path_of(name), bytes.len() as u64, self.flush, &self.refused)?;
        file.write(0, bytes)?;
        file.finish()
    }

    fn kept(&self) -> Vec<(String, PathBuf)> {
        self.kept.clone()
    }

    fn publish(&self) -> Result<()> {
        let io = |action: &str, error: &io::Error| failed(action, error).object(&*self.shown);
        if !self.is_directory
            && self.there == There::Something
            && let Ok(old) = fs::metadata(&self.target)
        {
            let mode = Permissions::from_mode(old.mode() & 0o7777);
            fs::set_permissions(&self.temporary, mode)
                .map_err(|error| io("keeping its permissions", &error))?;
        }
        if self.flush && self.is_directory {
            synced(&self.temporary).map_err(|error| io("flushing", &error))?;
        }
        self.rename().map_err(|error| match error.raw_os_error() {
            Some(libc::EEXIST | libc::ENOTEMPTY) => exists(
                &self.shown,
                "It was put there while the save went on: give another place, or overwrite=True",
            ),
            _ => io("renaming", &error),
        })?;
        if self.flush {
            let parent = self.target.parent().filter(|parent| !parent.as_os_str().is_empty());
            // It is visible; whether it would be after a power failure is all that is not known where this fails.
            synced(parent.unwrap_or(Path::new("."))).map_err(|error| io("flushing", &error))?;
        }
        // What was exchanged for it.
        if let Err(error) = remove(&self.temporary, true) {
            tracing::warn!(path = %self.temporary.display(), %error, "what was replaced could not be removed");
        }
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
        lock.into_iter().for_each(Lock::release);
        Ok(())
    }

    fn discard(&self) {
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(lock) = lock.filter(|_| self.owner.is_current()) {
            // A file that is open keeps its room on the disk.
            let files = std::mem::take(&mut *self.files.lock().unwrap_or_else(PoisonError::into_inner));
            files.iter().filter_map(Weak::upgrade).for_each(|file| file.close());
            if let Err(error) = remove(&self.temporary, true) {
                tracing::warn!(path = %self.temporary.display(), %error, "what a save had begun could not be removed");
            }
            lock.release();
        }
    }

    fn writers(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        WRITERS.min(cores.max(2))
    }

    fn notes(&self) -> Vec<String> {
        let refused = self.refused.load(Ordering::Relaxed);
        let note = "the file system refused direct writes, so the page cache was in between";
        refused.then(|| note.to_owned()).into_iter().collect()
    }
}

impl Drop for LocalSink {
    fn drop(&mut self) {
        self.discard();
    }
}

impl Lock {
    /// Takes the file of the lock away before the lock ends, so that who waits for it sees that it is none any more.
    fn release(self) {
        let own = self._file.as_ref().is_some_and(LockedFile::is_own);
        if own {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The lock at `path`, held by this process.
fn lock(path: &Path, shown: &str) -> Result<Lock> {
    for _ in 0..ATTEMPTS {
        let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC;
        let file = File::options().write(true).create(true).truncate(false).custom_flags(flags).open(path);
        let file = file.map_err(|error| failed("making a lock beside it", &error).object(shown))?;
        let file = LockedFile::new(file);
        match flock(&*file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(being_saved(shown, "Wait for it to end, or give another place"));
            }
            Err(Errno::INTR) => continue,
            Err(_) => {
                drop(file);
                let _ = fs::remove_file(path);
                return Ok(Lock { path: path.to_owned(), _file: None });
            }
        }
        let is_same = |there: fs::Metadata| {
            file.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (there.dev(), there.ino()))
        };
        // Whoever held it before may have taken it away.
        if fs::symlink_metadata(path).is_ok_and(is_same) {
            return Ok(Lock { path: path.to_owned(), _file: Some(file) });
        }
    }
    Err(being_saved(shown, "Wait for it to end, or give another place"))
}

/// Renames to a name that nothing has.
fn into_nothing(from: &Path, to: &Path, is_directory: bool) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) if is_directory => fs::rename(from, to),
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            // A link is made where nothing is, or not at all.
            fs::hard_link(from, to)?;
            fs::remove_file(from)
        }
        renamed => Ok(renamed?),
    }
}

/// Removes a file or a directory with all that is in it, if there is one and `may` says so.
fn remove(path: &Path, may: bool) -> io::Result<()> {
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    match (may, found.is_dir()) {
        (false, _) => Err(io::ErrorKind::AlreadyExists.into()),
        (true, true) => fs::remove_dir_all(path),
        (true, false) => fs::remove_file(path),
    }
}

fn synced(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Links what is no weights from one directory into another, and notes the files. All directories have to be on one file
/// system: what is mounted in there would be removed with the directory that was replaced.
fn keep(
    from: &Path,
    to: &Path,
    prefix: &str,
    device: u64,
    kept: &mut Vec<(String, PathBuf)>,
) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (kind, name) = (entry.file_type()?, entry.file_name());
        let shown = location_of(Path::new(&name));
        if prefix.is_empty() && is_of_weights(&shown) {
            continue;
        }
        let place = to.join(&name);
        // Of directories only: overlayfs may say of a file that it is on the one below.
        if kind.is_dir() && entry.metadata()?.dev() != device {
            let what = format!("{prefix}{shown} is on another file system");
            return Err(io::Error::new(io::ErrorKind::CrossesDevices, what));
        }
        if kind.is_dir() {
            fs::create_dir(&place)?;
            keep(&entry.path(), &place, &format!("{prefix}{shown}/"), device, kept)?;
            continue;
        }
        if kind.is_symlink() {
            std::os::unix::fs::symlink(fs::read_link(entry.path())?, &place)?;
        } else if fs::hard_link(entry.path(), &place).is_err() {
            fs::copy(entry.path(), &place)?;
        }
        kept.push((format!("{prefix}{shown}"), place));
    }
    Ok(())
}

/// Whether a save replaces a file of that name.
fn is_of_weights(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json") || name == MANIFEST_NAME
}
