//! Entries on disk: where they are, who uses them, which of them go.
//!
//! An entry is a directory, named by its key: `data`, a sparse file as large as the object; `map`, its block map; and
//! once all is there `complete`, which says what `data` was like then. Whoever uses an entry holds a shared lock on its
//! map; who removes one, an exclusive lock, and moves it out of the way first. Locks on `data` are for writing to it. Making and removing is done by one process
//! at a time, under the lock of the whole. All locks are the kernel's and end with their process (`locked_file`).
//!
//! Bytes of a complete entry are not compared any more, so whoever can write to one decides what is loaded. Only what
//! belongs to this process's user or to root, and is not writable for everyone, is trusted (`trust`).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{
    FallocateFlags, FlockOperation, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, fallocate, flock, futimens,
    statvfs,
};
use rustix::io::Errno;

use super::DiskCache;
use super::entry::Entry;
use super::files::{BLOCK_BYTES, FILE, FOLDER, lock, open, open_to_lock};
use super::key::Key;
use super::mark;
use super::trust::distrust;
use crate::store::block_map::BlockMap;
use crate::store::locked_file::LockedFile;

/// The version of what is on disk: another would be another directory.
const FORMAT: &str = "penstock-3";
/// Earlier versions: keys of the first lack the endpoint, those of the second hold what a URL's secret can be computed
/// from. Nothing is read from them, and they go as room is needed.
const EARLIER: [&str; 2] = ["penstock-1", "penstock-2"];
/// What stays free of the disk where no bound is given: a fifth.
const SHARE: (u64, u64) = (4, 5);
/// How long to wait for a process that makes or removes entries: longer than removing large files takes.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
const LOCK_CHECK: Duration = Duration::from_millis(5);
/// How long after that nobody waits at all, so that a load of many shards does not wait once for each.
const LOCKED_OUT: Duration = Duration::from_secs(60);

/// A directory of entries.
#[derive(Debug, Clone)]
pub(super) struct Directory {
    root: PathBuf,
    earlier: Vec<PathBuf>,
    bound: Option<u64>,
    /// When the lock could not be had in time: others do not wait for it again so soon.
    locked_out: Arc<Mutex<Option<Instant>>>,
    has_warned: Arc<AtomicBool>,
}

/// A complete entry, which stays as long as this is held.
#[derive(Debug)]
pub(in crate::store) struct Held {
    entry: PathBuf,
    data: File,
    written: Written,
    _map: LockedFile,
}

impl Held {
    pub(super) fn path(&self) -> PathBuf {
        self.entry.join("data")
    }

    /// Whether the file has not been written to since it was found complete. What was done to its name or its permissions
    /// meanwhile is no harm; a file that the disk knows no more was not read from either.
    pub(super) fn is_unchanged(&self) -> bool {
        self.data.metadata().map_or(true, |now| Written::of(&now) == self.written)
    }

    /// Has the entry's bytes compared with their checksums by whoever uses it next.
    pub(super) fn doubt(&self) -> &Path {
        mark::clear(&self.entry);
        &self.entry
    }
}

/// What changes when a file is written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Written {
    bytes: u64,
    modified: (i64, i64),
}

impl Written {
    fn of(is: &fs::Metadata) -> Self {
        Self { bytes: is.len(), modified: (is.mtime(), is.mtime_nsec()) }
    }
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
        let earlier = EARLIER.iter().map(|format| directory.join(format)).collect();
        let root = directory.join(FORMAT);
        Self { root, earlier, bound: settings.bytes, locked_out: Arc::default(), has_warned: Arc::default() }
    }

    /// The entry of that key, if it is complete.
    pub(super) fn complete(&self, key: &Key) -> Option<Held> {
        let entry = self.root.join(&key.name);
        let map = open_to_lock(&entry.join("map"), OpenOptions::new().read(true)).ok()?;
        if !hold(&map, &entry.join("map")) || !BlockMap::is_of(&map, &key.label, key.bytes, BLOCK_BYTES) {
            return None;
        }
        let data = open(&entry.join("data"), OpenOptions::new().read(true)).ok()?;
        let is = data.metadata().ok()?;
        let right = is.is_file() && is.len() == key.bytes && mark::is_set(&entry, &is);
        if !right || !self.is_trusted(&entry) {
            return None;
        }
        touch(&map);
        Some(Held { entry, data, written: Written::of(&is), _map: map })
    }

    /// Logs why the cache cannot be used: once, not for each shard.
    pub(super) fn warn(&self, why: &str) {
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!("{why}");
        }
    }

    /// The entry of that key, made where there is none.
    ///
    /// # Errors
    /// A remark for the load's owner.
    pub(super) fn entry(&self, key: &Key) -> Result<Arc<Entry>, String> {
        // A second time where it was removed meanwhile, or was not what it seemed.
        for _ in 0..2 {
            if let Some(why) = self.distrusted(&self.root.join(&key.name)) {
                return Err(format!("the disk cache was not used: {why}"));
            }
            if let Some(entry) = self.existing(key) {
                return Ok(Arc::new(entry));
            }
            self.make(key)?;
        }
        Err(format!("the disk cache was not used: {} is being changed by others", self.root.display()))
    }

    /// Why neither the directory of all entries nor that one is to be trusted, if so. What is missing is.
    fn distrusted(&self, entry: &Path) -> Option<String> {
        let files = ["data", "map", "complete"];
        distrust(&self.root, true)
            .or_else(|| distrust(entry, false))
            .or_else(|| files.iter().find_map(|file| distrust(&entry.join(file), false)))
    }

    /// Whether the entry is there and trusted. To be asked after its files were opened: where others may make entries of
    /// their own, one of those may have been in its place before.
    fn is_trusted(&self, entry: &Path) -> bool {
        fs::symlink_metadata(entry).is_ok_and(|is| is.is_dir()) && self.distrusted(entry).is_none()
    }

    /// The entry of that key; none where it is not there, or is not what it should be.
    fn existing(&self, key: &Key) -> Option<Entry> {
        let path = self.root.join(&key.name);
        let opened = |write: bool| -> io::Result<_> {
            let how = || OpenOptions::new().read(true).write(write).clone();
            let file = |name| open_to_lock(&path.join(name), &mut how());
            Ok((file("map")?, file("data")?, !write))
        };
        // Where it may not be written to, what is there is read all the same.
        let (map, data, read_only) = opened(true).or_else(|_| opened(false)).ok()?;
        let is = data.metadata().ok()?;
        if !self.is_trusted(&path)
            || !hold(&map, &path.join("map"))
            || !is.is_file()
            || is.len() != key.bytes
            || !BlockMap::is_of(&map, &key.label, key.bytes, BLOCK_BYTES)
        {
            return None;
        }
        touch(&map);
        let (map, _) = BlockMap::open(map, &key.label, key.bytes, BLOCK_BYTES).ok()?;
        Some(Entry::new(path, data, map, read_only))
    }

    /// Waits for whoever makes or removes entries, and keeps others from it.
    fn lock(&self) -> Result<LockedFile, String> {
        let how = &mut OpenOptions::new();
        let how = how.write(true).create(true).truncate(false).mode(FILE);
        let lock = open_to_lock(&self.root.join("lock"), how).map_err(|error| self.not_writable(&error))?;
        let locked_out = || self.locked_out.lock().unwrap_or_else(PoisonError::into_inner);
        let recently = locked_out().is_some_and(|then| then.elapsed() < LOCKED_OUT);
        let end = Instant::now() + if recently { Duration::ZERO } else { LOCK_PATIENCE };
        loop {
            match flock(&*lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(lock),
                Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < end => {
                    std::thread::sleep(LOCK_CHECK);
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) => {
                    let lock = self.root.join("lock");
                    *locked_out() = Some(Instant::now());
                    return Err(format!(
                        "the disk cache was not used: another process holds {} for longer than {} s",
                        lock.display(),
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
        self.make_room(0).map_err(|note| note.unwrap_or_else(|error| self.not_writable(&error)))
    }

    /// Makes an empty entry, and room for it.
    fn make(&self, key: &Key) -> Result<(), String> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let failed = |error: io::Error| self.not_writable(&error);
        let directories = |path: &Path, mode| fs::DirBuilder::new().recursive(true).mode(mode).create(path);
        // What is above may be for others too.
        self.root.parent().map_or(Ok(()), |above| directories(above, 0o755)).map_err(failed)?;
        directories(&self.root, FOLDER).map_err(failed)?;
        // Held until the end of this function.
        let _lock = self.lock()?;
        let path = self.root.join(&key.name);
        if self.existing(key).is_some() {
            // Another process was quicker.
            return Ok(());
        }
        if path.exists() && !self.remove(&path) {
            return Err(format!(
                "the disk cache was not used: {} is in use and not what it should be",
                path.display()
            ));
        }
        self.make_room(key.bytes).map_err(|note| note.unwrap_or_else(failed))?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let new = self.root.join(format!(".new-{}-{number}", std::process::id()));
        let made = || -> io::Result<()> {
            fs::DirBuilder::new().mode(FOLDER).create(&new)?;
            let how = || OpenOptions::new().read(true).write(true).create_new(true).mode(FILE).clone();
            let data = open(&new.join("data"), &mut how())?;
            data.set_len(key.bytes)?;
            if key.bytes > 0 {
                // Better now than in the middle. Not every file system can reserve.
                let reserved = fallocate(&data, FallocateFlags::empty(), 0, key.bytes);
                if let Err(errno @ (Errno::NOSPC | Errno::DQUOT)) = reserved {
                    return Err(errno.into());
                }
            }
            drop(open(&new.join("map"), &mut how())?);
            let map = open_to_lock(&new.join("map"), OpenOptions::new().read(true).write(true))?;
            BlockMap::open(map, &key.label, key.bytes, BLOCK_BYTES)?;
            fs::rename(&new, &path)
        };
        made().map_err(|error| {
            let _ = fs::remove_dir_all(&new);
            failed(error)
        })
    }

    /// Removes entries, those used longest ago first, until so many bytes more fit.
    fn make_room(&self, bytes: u64) -> Result<(), Result<String, io::Error>> {
        let mut entries = self.candidates().map_err(Err)?;
        let mut all: u64 = entries.iter().map(|entry| entry.bytes).sum();
        let bound = self.bound.unwrap_or_else(|| {
            let free =
                statvfs(&self.root).map_or(u64::MAX, |disk| disk.f_bavail.saturating_mul(disk.f_frsize));
            let allocated: u64 = entries.iter().map(|entry| entry.allocated).sum();
            free.saturating_add(allocated) / SHARE.1 * SHARE.0
        });
        if bytes > bound {
            return Err(Ok(format!(
                "the disk cache was not used: the object has {bytes} bytes, and the cache may have {bound}"
            )));
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
            return Err(Ok(format!(
                "the disk cache was not used: its {bound} bytes are full of what is in use"
            )));
        }
        Ok(())
    }

    /// All entries, those of earlier versions too; what was left of making and removing others goes.
    fn candidates(&self) -> io::Result<Vec<Candidate>> {
        let mut found = Vec::new();
        let ours = |root: &&PathBuf| {
            fs::symlink_metadata(root).is_ok_and(|is| is.is_dir()) && distrust(root, true).is_none()
        };
        let earlier = self.earlier.iter().filter(ours).filter_map(|root| fs::read_dir(root).ok());
        let earlier = earlier.flatten().flatten();
        for entry in fs::read_dir(&self.root)?.flatten().chain(earlier) {
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            // Whoever makes or removes holds the lock, which is ours now. Earlier versions have another.
            if path.starts_with(&self.root) && (name.starts_with(".new-") || name.starts_with(".old-")) {
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
        let _map = match open_to_lock(&path.join("map"), OpenOptions::new().read(true).write(true)) {
            Ok(map) => {
                if flock(&*map, FlockOperation::NonBlockingLockExclusive).is_err() {
                    return false;
                }
                Some(map)
            }
            // Without a map, or with a link in its place, no one uses it.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ELOOP)) => None,
            Err(_) => return false,
        };
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let old = self.root.join(format!(".old-{}-{number}", std::process::id()));
        let moved = fs::rename(path, &old).is_ok();
        let _ = fs::remove_dir_all(&old);
        moved
    }
}

/// Keeps the entry from being removed; false where it is being removed, or is no longer there.
fn hold(map: &File, path: &Path) -> bool {
    let same = || Some(map.metadata().ok()?.ino() == fs::symlink_metadata(path).ok()?.ino());
    lock(map, FlockOperation::NonBlockingLockShared) && same() == Some(true)
}

/// Says that the entry was used now. On a disk that cannot be written to, nothing is evicted either.
fn touch(map: &File) {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let same = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    let _ = futimens(map, &Timestamps { last_access: same, last_modification: now });
}
