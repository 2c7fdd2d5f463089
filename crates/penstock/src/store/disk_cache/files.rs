//! Files of the cache: how they are opened and locked, who may read them, and the size of their blocks.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::trust::is_trusted;
use crate::store::locked_file::LockedFile;

/// Bytes of a block. No more than what the request that opens an object brings, so that the first block, in which
/// the header is, comes whole.
pub(super) const BLOCK_BYTES: u64 = 512 << 10;
/// Permissions of files and of directories, whatever the umask is: what is cached may be of a private store, and who
/// else may write to it is not trusted anyway.
pub(super) const FILE: u32 = 0o600;
pub(super) const FOLDER: u32 = 0o700;

/// Opens a file of the cache, which is no link, and trusted.
pub(super) fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK).open(path)?;
    if is_trusted(&file)? { Ok(file) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

/// As [`open`], for a file that will be locked.
pub(super) fn open_to_lock(path: &Path, options: &mut OpenOptions) -> io::Result<LockedFile> {
    open(path, options).map(LockedFile::new)
}

/// Locks a file, if that can be done now. A file system without locks has no one to keep out either.
pub(super) fn lock(file: &File, how: FlockOperation) -> bool {
    matches!(flock(file, how), Ok(()) | Err(Errno::NOTSUP | Errno::NOSYS | Errno::NOLCK))
}
