//! The directory of entries: which there are, whose they are, which of them go.
//!
//! Making and removing entries is done by one process at a time, under the lock of the whole. Who removes one holds it
//! alone, and moves it out of the way first. All locks are the kernel's and end with their process (`locked_file`).
//!
//! Bytes of a complete entry are not compared any more, so whoever can write to one decides what is loaded. The directory
//! belongs to this process's user or to root, and so do the files that are read.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{FlockOperation, flock, statvfs};
use rustix::io::Errno;

use super::DiskCache;
use super::entry::{Entry, FILE, FOLDER, distrust, open};
use super::key::Key;
use crate::store::locked_file::LockedFile;

/// The version of what is on disk: another would be another directory.
const FORMAT: &str = "penstock-3";
/// What stays free of the disk where no bound is given: a fifth.
const SHARE: (u64, u64) = (4, 5);
/// How long to wait for a process that makes or removes entries: longer than removing large files takes.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
const LOCK_CHECK: Duration = Duration::from_millis(5);

/// A directory of entries.
#[derive(Debug, Clone)]
pub(super) struct Directory {
    root: PathBuf,
    bound: Option<u64>,
    /// Set where the lock could not be had in time: the next object of the load does not wait for it again.
    locked_out: Arc<AtomicBool>,
    has_warned: Arc<AtomicBool>,
}

/// One entry, as eviction sees it.
struct Candidate {
    path: PathBuf,
    bytes: u64,
    allocated: u64,
    used: SystemTime,
}

impl Directory {
    pub(super) fn new(settings: DiskCache) -> Self {
        // Whoever changes the working directory meanwhile does not mean another cache.
        let directory = std::path::absolute(&settings.directory).unwrap_or(settings.directory);
        let root = directory.join(FORMAT);
        Self { root, bound: settings.bytes, locked_out: Arc::default(), has_warned: Arc::default() }
    }

    /// Refuses a directory that others may write to.
    ///
    /// # Errors
    /// Why, in words.
    pub(super) fn check(&self) -> Result<(), String> {
        // A link there, and what it leads to.
        let is = [fs::symlink_metadata(&self.root), fs::metadata(&self.root)];
        match is.iter().flatten().find_map(distrust) {
            Some(why) => Err(format!("the disk cache was not used: {} {why}", self.root.display())),
            None => Ok(()),
        }
    }

    /// Logs why the cache cannot be used: once, not for each shard.
    pub(super) fn warn(&self, why: &str) {
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!("{why}");
        }
    }

    /// The entry of that key; none where it is not there, or is not what it should be.
    ///
    /// # Errors
    /// A remark for the load's owner.
    pub(super) fn find(&self, key: &Key) -> Result<Option<Arc<Entry>>, String> {
        self.check()?;
        let found = Entry::open(&self.root.join(&key.name));
        let right = found.filter(|entry| entry.label == key.label && entry.bytes == key.bytes);
        Ok(right.inspect(Entry::touch).map(Arc::new))
    }

    /// The entry of that key, made where there is none.
    ///
    /// # Errors
    /// A remark for the load's owner.
    pub(super) fn entry(&self, key: &Key) -> Result<Arc<Entry>, String> {
        if let Some(entry) = self.find(key)? {
            return Ok(entry);
        }
        let failed = |error: io::Error| self.not_writable(&error);
        let directories = |path: &Path, mode| fs::DirBuilder::new().recursive(true).mode(mode).create(path);
        // What is above may be for others too.
        self.root.parent().map_or(Ok(()), |above| directories(above, 0o755)).map_err(failed)?;
        directories(&self.root, FOLDER).map_err(failed)?;
        // Held until the end of this function.
        let _lock = self.lock()?;
        if let Some(entry) = self.find(key)? {
            // Another process was quicker.
            return Ok(entry);
        }
        let path = self.root.join(&key.name);
        let broken =
            || format!("the disk cache was not used: {} is in use and not what it should be", path.display());
        if path.symlink_metadata().is_ok() && !self.remove(&path) {
            return Err(broken());
        }
        self.make_room(key.bytes)?;
        let made = Entry::make(&path, key).inspect_err(|_| drop(fs::remove_dir_all(&path)));
        made.map_err(failed)?;
        self.find(key)?.ok_or_else(broken)
    }

    /// Waits for whoever makes or removes entries, and keeps others from it.
    fn lock(&self) -> Result<LockedFile, String> {
        let how = &mut OpenOptions::new();
        let how = how.write(true).create(true).truncate(false).mode(FILE);
        let opened = open(&self.root.join("lock"), how).map(LockedFile::new);
        let lock = opened.map_err(|error| self.not_writable(&error))?;
        let is_out = self.locked_out.load(Ordering::Relaxed);
        let end = Instant::now() + if is_out { Duration::ZERO } else { LOCK_PATIENCE };
        loop {
            match flock(&*lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    self.locked_out.store(false, Ordering::Relaxed);
                    return Ok(lock);
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < end => {
                    std::thread::sleep(LOCK_CHECK);
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) => {
                    self.locked_out.store(true, Ordering::Relaxed);
                    return Err(format!(
                        "the disk cache was not used: another process holds {} for longer than {} s",
                        self.root.join("lock").display(),
                        LOCK_PATIENCE.as_secs()
                    ));
                }
                Err(errno) => return Err(self.not_writable(&errno.into())),
            }
        }
    }

    fn not_writable(&self, error: &io::Error) -> String {
        let root = self.root.display();
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => {
                format!("the disk cache was not used: the disk of {root} is full")
            }
            _ => format!("the disk cache was not used: {root} cannot be written to: {error}"),
        }
    }

    /// The directory of all entries.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Removes the entry of that name; false where it is in use or not there.
    ///
    /// # Errors
    /// Why the lock could not be had, in words.
    pub(super) fn remove_named(&self, name: &str) -> Result<bool, String> {
        let _lock = self.lock()?;
        Ok(self.root.join(name).exists() && self.remove(&self.root.join(name)))
    }

    /// Removes entries, those used longest ago first, until all together have no more bytes than the bound.
    ///
    /// # Errors
    /// Why that cannot be, in words.
    pub(super) fn shrink(&self) -> Result<(), String> {
        let _lock = self.lock()?;
        self.make_room(0)
    }

    /// Removes entries, those used longest ago first, until so many bytes more fit.
    fn make_room(&self, bytes: u64) -> Result<(), String> {
        let mut entries = self.candidates().map_err(|error| self.not_writable(&error))?;
        let mut all: u64 = entries.iter().map(|entry| entry.bytes).sum();
        let bound = self.bound.unwrap_or_else(|| {
            let free =
                statvfs(&self.root).map_or(u64::MAX, |disk| disk.f_bavail.saturating_mul(disk.f_frsize));
            let allocated: u64 = entries.iter().map(|entry| entry.allocated).sum();
            free.saturating_add(allocated) / SHARE.1 * SHARE.0
        });
        if bytes > bound {
            return Err(format!(
                "the disk cache was not used: the object has {bytes} bytes, and the cache may have {bound}"
            ));
        }
        entries.sort_by_key(|entry| entry.used);
        for entry in entries {
            if all.saturating_add(bytes) <= bound {
                break;
            }
            if self.remove(&entry.path) {
                all -= entry.bytes;
            }
        }
        if all.saturating_add(bytes) > bound {
            return Err(format!("the disk cache was not used: its {bound} bytes are full of what is in use"));
        }
        Ok(())
    }

    /// All entries; what was left of removing others goes.
    fn candidates(&self) -> io::Result<Vec<Candidate>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.root)?.flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            if name.starts_with(".old-") {
                let _ = fs::remove_dir_all(&path);
            }
            let ours = name.len() == 16 && name.bytes().all(|b| b.is_ascii_hexdigit());
            if !ours || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let data = fs::symlink_metadata(path.join("data"));
            let (bytes, allocated) = data.map_or((0, 0), |data| (data.len(), data.blocks() * 512));
            let used = fs::symlink_metadata(path.join("map")).and_then(|map| map.modified());
            found.push(Candidate { path, bytes, allocated, used: used.unwrap_or(SystemTime::UNIX_EPOCH) });
        }
        Ok(found)
    }

    /// Removes an entry, unless it is in use. The caller holds the lock of the whole.
    fn remove(&self, path: &Path) -> bool {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        // Locked until the end of this function: whoever comes meanwhile finds it locked, or gone.
        // To write to, without which NFS gives no exclusive lock.
        let how = || OpenOptions::new().read(true).write(true).clone();
        let _map = match open(&path.join("map"), &mut how()).map(LockedFile::new) {
            Ok(map) if flock(&*map, FlockOperation::NonBlockingLockExclusive).is_err() => return false,
            Ok(map) => Some(map),
            // Without a map, or with a link or another user's file in its place, no one uses it.
            Err(error) if matches!(error.raw_os_error(), None | Some(libc::ENOENT | libc::ELOOP)) => None,
            Err(_) => return false,
        };
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let old = self.root.join(format!(".old-{}-{number}", std::process::id()));
        let moved = fs::rename(path, &old).is_ok();
        let _ = fs::remove_dir_all(&old);
        moved
    }
}
