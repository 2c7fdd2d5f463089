//! A FUSE file system with one file, which remembers how it was read.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo,
    LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, Request,
};

use crate::mounted::Mounted;

/// A request that reached the daemon.
#[derive(Debug, Clone, Copy)]
pub struct Read {
    pub offset: u64,
    pub bytes: u64,
    pub direct: bool,
}

/// The mounted file system; unmounted when it is dropped.
pub struct RecordingFuse {
    reads: Arc<Mutex<Vec<Read>>>,
    // In the order in which they go: the mount, its daemon, the directory.
    mounted: Mounted,
    _daemon: BackgroundSession,
    _folder: tempfile::TempDir,
}

impl RecordingFuse {
    /// Mounts a file `name` that holds `bytes`, with these kernel options besides.
    pub fn mount(name: &str, bytes: Vec<u8>, options: &[MountOption]) -> Result<Self, String> {
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let reads = Arc::new(Mutex::new(Vec::new()));
        let files = OneFile { name: name.to_owned(), bytes, reads: Arc::clone(&reads) };
        let mut config = Config::default();
        config.mount_options.push(MountOption::RO);
        config.mount_options.extend_from_slice(options);
        let daemon = fuser::spawn_mount(files, folder.path(), &config).map_err(|error| error.to_string())?;
        Ok(Self { reads, mounted: Mounted::over(folder.path()), _daemon: daemon, _folder: folder })
    }

    pub fn path(&self) -> &Path {
        self.mounted.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// The requests for the file's contents so far, in the order they came in.
    pub fn reads(&self) -> Vec<Read> {
        self.reads.lock().unwrap().clone()
    }
}

struct OneFile {
    name: String,
    bytes: Vec<u8>,
    reads: Arc<Mutex<Vec<Read>>>,
}

const TTL: Duration = Duration::from_secs(60);
const FILE: INodeNo = INodeNo(2);

impl OneFile {
    fn attributes(&self, inode: INodeNo) -> FileAttr {
        let folder = inode == INodeNo::ROOT;
        let size = if folder { 0 } else { self.bytes.len() as u64 };
        FileAttr {
            ino: inode,
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if folder { FileType::Directory } else { FileType::RegularFile },
            perm: if folder { 0o755 } else { 0o444 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for OneFile {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == INodeNo::ROOT && name == OsStr::new(&self.name) {
            reply.entry(&TTL, &self.attributes(FILE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attributes(inode));
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let direct = flags.0 & libc::O_DIRECT != 0;
        self.reads.lock().unwrap().push(Read { offset, bytes: size.into(), direct });
        let start = usize::try_from(offset).unwrap().min(self.bytes.len());
        let end = (start + size as usize).min(self.bytes.len());
        reply.data(&self.bytes[start..end]);
    }
}
