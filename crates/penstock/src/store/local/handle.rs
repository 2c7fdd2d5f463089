//! A file opened for direct reads: once, for all readers, or once more for each.
//!
//! Some storage knows its readers by their open files: it looks ahead of each from front to back, and brings no more than
//! one connection's worth through each (FUSE daemons over object stores). A context that wants a handle of its own gets the
//! file opened again for it, through `/proc`, so that it is surely the same file; it keeps the one it read from last, as
//! a reader goes from file to file. Where it cannot be opened again, the shared one serves, as it does for all others.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, StatxFlags, statx};

use super::file::Version;
use crate::memory::PAGE;
use crate::store::ReadContext;

/// A file, opened with `O_DIRECT`.
#[derive(Debug)]
pub(super) struct DirectFile {
    pub(super) file: File,
    /// Addresses given to reads must be multiples of this.
    pub(super) memory_align: usize,
}

impl DirectFile {
    pub(super) fn open(path: &Path) -> io::Result<File> {
        File::options()
            .read(true)
            .custom_flags(libc::O_DIRECT | libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY)
            .open(path)
    }

    /// `None` where that file cannot be read directly in whole pages.
    pub(super) fn aligned(file: File) -> Option<Self> {
        let memory_align = direct_alignment(&file)?;
        Some(Self { file, memory_align })
    }
}

/// The file that a context read from last, open for it alone.
#[derive(Debug)]
pub(super) struct OwnHandle {
    version: Version,
    direct: Arc<DirectFile>,
}

impl OwnHandle {
    /// The context's own handle of the file that `shared` is, whose version is `version`.
    pub(super) fn of(cx: &mut ReadContext, version: Version, shared: &Arc<DirectFile>) -> Arc<DirectFile> {
        let kept = cx.kept.as_ref().and_then(|kept| kept.downcast_ref::<Self>());
        if let Some(own) = kept.filter(|own| own.version == version) {
            return Arc::clone(&own.direct);
        }
        let again = format!("/proc/self/fd/{}", shared.file.as_raw_fd());
        let direct = match DirectFile::open(Path::new(&again)) {
            Ok(file) => Arc::new(DirectFile { file, memory_align: shared.memory_align }),
            Err(_) => Arc::clone(shared),
        };
        cx.kept = Some(Box::new(Self { version, direct: Arc::clone(&direct) }));
        direct
    }
}

/// Whether whole pages of a file that was opened with `O_DIRECT` can be read and written from page-aligned memory.
pub(in crate::store) fn suits_direct(file: &File) -> bool {
    direct_alignment(file).is_some()
}

/// What memory addresses a direct read needs; `None` where the file cannot be read directly in whole pages.
fn direct_alignment(file: &File) -> Option<usize> {
    let asked = StatxFlags::DIOALIGN;
    match statx(file.as_fd(), c"", AtFlags::EMPTY_PATH, asked) {
        Ok(answer) if answer.stx_mask & asked.bits() != 0 => {
            let (memory, offset) = (answer.stx_dio_mem_align as usize, answer.stx_dio_offset_align as usize);
            // Zero says "not supported"; offsets are always cut at whole pages, which must be fine enough.
            let fits = memory != 0 && offset != 0 && memory <= PAGE && PAGE.is_multiple_of(offset);
            fits.then_some(memory)
        }
        // Kernels before 6.1 and some file systems do not say; a page suits everything met so far.
        _ => Some(PAGE),
    }
}
