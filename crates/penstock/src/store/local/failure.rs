//! What the operating system's refusals mean to someone who wants a file read: errors that say what to try.

use std::io;

use crate::error::Error;

/// The failure of `action` ("opening", "reading"), with a remedy that fits the error number.
pub(super) fn failed(action: &str, error: &io::Error) -> Error {
    Error::from_io(action, error).remedy(remedy(error))
}

fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) => "Check the path; relative paths start at the working directory",
        Some(libc::ELOOP) => {
            "The symbolic links of this path lead in a circle: check where they point (readlink)"
        }
        Some(libc::ENAMETOOLONG) => {
            "The path, or a name in it, is longer than the file system allows: check it"
        }
        None if error.kind() == io::ErrorKind::InvalidInput => {
            "The path holds a NUL character, which no file name can: check how the path was made"
        }
        Some(libc::EACCES | libc::EPERM) => {
            "Check the permissions of the file and its directories for the user of this process"
        }
        Some(libc::EMFILE) => "Raise the limit of open files (ulimit -n)",
        Some(libc::ENFILE) => "Raise the machine's limit of open files (sysctl fs.file-max)",
        Some(libc::ENOMEM) => {
            "The kernel had no memory to do it: free some, or raise the limit of the container"
        }
        Some(libc::ESTALE) => {
            "The file server knows this file no more: it was deleted or replaced there. Open the checkpoint again"
        }
        Some(libc::ENOTCONN | libc::ECONNABORTED) => {
            "The daemon of this FUSE mount has ended: unmount it (fusermount -u) and mount it again"
        }
        Some(libc::ETIMEDOUT | libc::EHOSTDOWN | libc::EHOSTUNREACH | libc::ENETUNREACH) => {
            "The file server does not answer: check it, the network and the mount"
        }
        _ => "The storage failed: check the mount, the disk and the kernel log (dmesg)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn remedies_fit_the_failure() {
        for (number, kind, word) in [
            (libc::ENOENT, ErrorKind::NotFound, "path"),
            (libc::ELOOP, ErrorKind::NotFound, "circle"),
            (libc::ENAMETOOLONG, ErrorKind::NotFound, "longer"),
            (libc::EPERM, ErrorKind::Access, "permissions"),
            (libc::EMFILE, ErrorKind::Storage, "ulimit -n"),
            (libc::ENOMEM, ErrorKind::Memory, "memory"),
            (libc::ESTALE, ErrorKind::Storage, "server"),
            (libc::ENOTCONN, ErrorKind::Storage, "FUSE"),
            (libc::EIO, ErrorKind::Storage, "dmesg"),
        ] {
            let error = failed("reading", &io::Error::from_raw_os_error(number));
            assert_eq!((error.kind(), error.os_error()), (kind, Some(number)));
            assert!(error.remedy_text().unwrap().contains(word), "{error}");
        }
    }
}
