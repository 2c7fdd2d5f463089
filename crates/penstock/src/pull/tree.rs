//! The directory that is pulled to: files below it, and nothing else.
//!
//! Every directory on the way to a file is opened from the one above it, without following links, and made where it is
//! missing. So neither a key with `..` nor a link that someone put there leads out. The destination itself may be a link:
//! that is its owner's choice.
//!
//! `.penstock` in it belongs to pulls: partial files, maps of files that are there, and a lock that ends with the process
//! that holds it (`locked_file`).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, Stat, flock, fstat, fstatvfs, mkdirat, openat,
    renameat, statat,
};
use rustix::io::Errno;

use super::ledger::times;
use crate::error::{Error, ErrorKind, Result};
use crate::store::block_map::BlockMap;
use crate::store::locked_file::LockedFile;

/// The directory of what pulls keep for themselves.
pub(super) const STATE: &str = ".penstock";
/// The directory of partial files in it.
pub(super) const PARTS: &str = "parts";
/// How often a pull that waits for another looks whether it has ended.
const LOCK_CHECK: Duration = Duration::from_millis(50);
/// After which time a pull that waits says so.
const WAIT_NOTICE: Duration = Duration::from_secs(3);

const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::CLOEXEC).union(OFlags::RDONLY);

/// A destination, held by this pull alone.
pub(super) struct Tree {
    path: PathBuf,
    root: OwnedFd,
    state: OwnedFd,
    parts: OwnedFd,
    _lock: LockedFile,
}

impl Tree {
    /// Opens the directory at `path`, which is made where it is missing, and waits until no other pull uses it; `None`
    /// where `is_cancelled` says so meanwhile. If that takes long, it is said once.
    ///
    /// # Errors
    /// `Access` or `Storage` where it cannot be made or written to, or is a file.
    pub(super) fn open(path: &Path, is_cancelled: impl Fn() -> bool) -> Result<Option<Self>> {
        let failed = |action: &str, error: io::Error| {
            Error::from_io(action, &error)
                .object(path.display().to_string())
                .remedy("Give a directory that this process may write to")
        };
        if let Some(file) = path.ancestors().find(|path| path.is_file()) {
            return Err(Error::new(ErrorKind::Access, "this is a file, not a directory")
                .object(file.display().to_string())
                .remedy("Give the directory to pull to; files in it are named as the objects are"));
        }
        std::fs::create_dir_all(path).map_err(|error| failed("making the directory", error))?;
        let made = || -> Result<_, Errno> {
            let root = openat(CWD, path, DIRECTORY, Mode::empty())?;
            let state = descend(root.as_fd(), STATE)?;
            let parts = descend(state.as_fd(), PARTS)?;
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let lock = LockedFile::new(openat(&state, "lock", flags, Mode::from(0o666))?.into());
            Ok((root, state, parts, lock))
        };
        let (root, state, parts, lock) =
            made().map_err(|errno| failed("making .penstock in the directory", errno.into()))?;
        let mut notice = Some(Instant::now() + WAIT_NOTICE);
        loop {
            match flock(&*lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK | Errno::INTR) if is_cancelled() => return Ok(None),
                Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(LOCK_CHECK),
                // A file system without locks: two pulls at once would repeat work, but files appear whole all the same.
                Err(_) => break,
            }
            if notice.take_if(|due| Instant::now() >= *due).is_some() {
                let lock = path.join(STATE).join("lock");
                tracing::warn!(lock = %lock.display(), "waiting for another pull to this directory to end");
            }
        }
        Ok(Some(Self { path: path.to_owned(), root, state, parts, _lock: lock }))
    }

    /// What a file is like that has the blocks of `map`, if it stays as it is while it is read; `None` where it does not,
    /// cannot be read, or `is_cancelled` says so.
    pub(super) fn compare(
        &self,
        directory: &OwnedFd,
        path: &str,
        map: &BlockMap,
        buffer: &mut [u8],
        is_cancelled: impl Fn() -> bool,
    ) -> Option<Stat> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = File::from(openat(directory, file_name(path), flags, Mode::empty()).ok()?);
        let before = fstat(&file).ok()?;
        let intact = |block| !is_cancelled() && matches!(map.read(&file, block, buffer), Ok(Some(_)));
        let all_are = (0..map.blocks()).all(intact);
        let after = fstat(&file).ok()?;
        let same = (times(&before), before.st_size) == (times(&after), after.st_size);
        (all_are && same).then_some(after)
    }

    /// Where a file of that path is, for errors.
    pub(super) fn shown(&self, path: &str) -> String {
        self.path.join(path).display().to_string()
    }

    /// Makes the directories on the way to a file, and returns the last.
    pub(super) fn directory_of(&self, path: &str) -> Result<OwnedFd> {
        let mut directory = self.root.try_clone().map_err(|error| Error::from_io("opening", &error))?;
        let mut begin = 0;
        for (end, _) in path.match_indices('/') {
            directory = descend(directory.as_fd(), &path[begin..end])
                .map_err(|errno| self.in_the_way(&path[..end], errno))?;
            begin = end + 1;
        }
        Ok(directory)
    }

    /// What is at `path`, if it is a regular file; `None` if nothing is.
    ///
    /// # Errors
    /// `Access` where a link or something else that is no regular file is in the way.
    pub(super) fn stat(&self, directory: &OwnedFd, path: &str) -> Result<Option<Stat>> {
        match statat(directory, file_name(path), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => Ok(Some(stat)),
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink => {
                Err(self.in_the_way(path, Errno::LOOP))
            }
            Ok(_) => Err(self.in_the_way(path, Errno::ISDIR)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(self.in_the_way(path, errno)),
        }
    }

    fn in_the_way(&self, path: &str, errno: Errno) -> Error {
        let error = match errno {
            Errno::LOOP | Errno::NOTDIR => Error::new(
                ErrorKind::Access,
                "a link or a file is in the way; links below the destination are not followed",
            ),
            Errno::ISDIR => Error::new(ErrorKind::Access, "something that is no regular file is in the way"),
            errno => Error::from_io("writing to the destination", &errno.into()),
        };
        error.object(self.shown(path)).remedy("Move it away, or pull to another directory")
    }

    /// The map that the file of that name came with, if a pull brought one.
    pub(super) fn map_of_pulled(&self, name: &str) -> Option<LockedFile> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        openat(&self.state, name, flags, Mode::empty()).map(|file| LockedFile::new(file.into())).ok()
    }

    /// A partial file, or its map.
    pub(super) fn part(&self, name: &str) -> Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let opened = openat(&self.parts, name, flags, Mode::from(0o666));
        opened.map(File::from).map_err(|errno| {
            Error::from_io("opening a partial file", &errno.into())
                .object(self.shown(STATE))
                .remedy("Remove the directory .penstock there, and pull again")
        })
    }

    /// Keeps the map of a file that has got its name. Without it the next pull brings the file again.
    pub(super) fn keep_map(&self, name: &str) {
        if let Err(error) = renameat(&self.parts, name, &self.state, name) {
            tracing::warn!(%error, "what is known of a pulled file could not be kept");
        }
    }

    /// Gives a complete partial file its name.
    pub(super) fn finish(&self, part: &str, directory: &OwnedFd, path: &str) -> Result<()> {
        renameat(&self.parts, part, directory, file_name(path)).map_err(|errno| {
            let error = Error::from_io("giving the file its name", &errno.into()).object(self.shown(path));
            match errno {
                Errno::XDEV => error
                    .remedy("A directory below the destination is on another disk: pull to it on its own"),
                _ => error.remedy("Move away what is in the way"),
            }
        })
    }

    /// What partial files take on the disk already, in bytes.
    pub(super) fn allocated(&self) -> u64 {
        let entries = Dir::read_from(&self.parts).into_iter().flatten().flatten();
        let stats = entries
            .filter_map(|entry| statat(&self.parts, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW).ok());
        stats
            .filter(|stat| FileType::from_raw_mode(stat.st_mode).is_file())
            .map(|stat| u64::try_from(stat.st_blocks).unwrap_or(0) * 512)
            .sum()
    }

    /// Bytes that may be written, where the file system says.
    pub(super) fn room(&self) -> Option<u64> {
        let stat = fstatvfs(&self.root).ok()?;
        Some(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
}

fn descend(directory: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, Errno> {
    let open = || openat(directory, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty());
    match open() {
        Err(Errno::NOENT) => match mkdirat(directory, name, Mode::from(0o777)) {
            Ok(()) | Err(Errno::EXIST) => open(),
            Err(errno) => Err(errno),
        },
        opened => opened,
    }
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Refuses a path that would lead out of the destination, or cannot be a file's.
pub(super) fn check(path: &str) -> Result<()> {
    let bad = |part: &str| matches!(part, "" | "." | "..") || part.contains('\0') || part.len() > 255;
    if !path.split('/').any(bad) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Access, format!("the key {path:?} is no path below the destination")).remedy(
        "Leave it out (ignore_patterns=, --exclude); a key with such parts comes from a broken or a hostile tool",
    ))
}
