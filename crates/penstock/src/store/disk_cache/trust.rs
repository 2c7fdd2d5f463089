//! Whose files a cache takes for its own.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const STICKY: u32 = 0o1000;
const WRITABLE_FOR_ALL: u32 = 0o002;

/// Why what is at `path` is not to be trusted, if so: it is another user's, or everyone may write to it. In a directory
/// that is `shared`, everyone may, if its sticky bit keeps users from each other's files. What is missing is trusted.
pub(super) fn distrust(path: &Path, shared: bool) -> Option<String> {
    let is = fs::symlink_metadata(path).ok()?;
    if is.uid() != user() && is.uid() != 0 {
        let (owner, user) = (is.uid(), user());
        return Some(format!("{} belongs to user {owner}, and this process is user {user}", path.display()));
    }
    // Of a link, only the owner counts; no link is followed when the file is opened.
    let sticky = shared && is.mode() & STICKY != 0;
    let open_to_all = !is.is_symlink() && is.mode() & WRITABLE_FOR_ALL != 0 && !sticky;
    open_to_all.then(|| format!("everyone may write to {}", path.display()))
}

/// Whether an opened file is trusted, whatever is at its path by now.
pub(super) fn is_trusted(file: &File) -> io::Result<bool> {
    let is = file.metadata()?;
    Ok((is.uid() == user() || is.uid() == 0) && is.mode() & WRITABLE_FOR_ALL == 0)
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}
