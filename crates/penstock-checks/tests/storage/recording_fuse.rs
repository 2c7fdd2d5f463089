//! A FUSE file system with one file, which remembers how it was read, and fails, hangs or vanishes when told to.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};

use crate::mounted::{Mounted, run, text};

/// A request that reached the daemon.
#[derive(Debug, Clone, Copy)]
pub struct Read {
    pub offset: u64,
    pub bytes: u64,
    pub direct: bool,
    /// Which open file it came through.
    pub handle: u64,
}

/// What the file system does, shared with its daemon.
#[derive(Default)]
struct Control {
    reads: Mutex<Vec<Read>>,
    /// The byte, counted from 1, that cannot be read; 0 where all can.
    bad: AtomicU64,
    /// Whether reads of the file's contents wait.
    hangs: Mutex<bool>,
    goes_on: Condvar,
    /// How long a read takes, in microseconds.
    takes: AtomicU64,
    /// How many times a file was opened.
    opened: AtomicU64,
}

/// The mounted file system; unmounted when it is dropped.
pub struct RecordingFuse {
    control: Arc<Control>,
    // In the order in which they go: the mount, its daemon, the directory.
    mounted: Mounted,
    _daemon: BackgroundSession,
    _folder: tempfile::TempDir,
}

impl RecordingFuse {
    /// Mounts a file `name` that holds `bytes`, with these kernel options besides.
    pub fn mount(name: &str, bytes: Vec<u8>, options: &[MountOption]) -> Result<Self, String> {
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let control = Arc::new(Control::default());
        let files = OneFile { name: name.to_owned(), bytes, control: Arc::clone(&control) };
        let mut config = Config::default();
        config.n_threads = Some(4);
        config.mount_options.push(MountOption::RO);
        config.mount_options.extend_from_slice(options);
        let daemon = fuser::spawn_mount(files, folder.path(), &config).map_err(|error| error.to_string())?;
        Ok(Self { control, mounted: Mounted::over(folder.path()), _daemon: daemon, _folder: folder })
    }

    pub fn path(&self) -> &Path {
        self.mounted.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// The requests for the file's contents so far, in the order they came in.
    pub fn reads(&self) -> Vec<Read> {
        self.control.reads.lock().unwrap().clone()
    }

    /// From now on, reads that would give this byte fail with `EIO`; `None`: all is well again.
    pub fn fail_at(&self, byte: Option<u64>) {
        self.control.bad.store(byte.map_or(0, |byte| byte + 1), SeqCst);
    }

    /// From now on, a read takes so long, however many there are at once.
    pub fn answer_after(&self, time: Duration) {
        self.control.takes.store(u64::try_from(time.as_micros()).unwrap(), SeqCst);
    }

    /// Whether reads wait from now on. Those that wait go on when they no longer shall.
    pub fn hang(&self, hangs: bool) {
        *self.control.hangs.lock().unwrap() = hangs;
        self.control.goes_on.notify_all();
    }

    /// Cuts the file system off from its daemon, as when that is killed: every call fails from now on.
    pub fn vanish(&self) {
        // It aborts the connection; then it may find the mount busy.
        let _ = run("umount", &["-f", text(self.path())]);
    }
}

struct OneFile {
    name: String,
    bytes: Vec<u8>,
    control: Arc<Control>,
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

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let handle = FileHandle(self.control.opened.fetch_add(1, SeqCst) + 1);
        reply.opened(handle, FopenFlags::empty());
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let direct = flags.0 & libc::O_DIRECT != 0;
        self.control.reads.lock().unwrap().push(Read {
            offset,
            bytes: size.into(),
            direct,
            handle: handle.0,
        });
        std::thread::sleep(Duration::from_micros(self.control.takes.load(SeqCst)));
        let hangs = self.control.hangs.lock().unwrap();
        drop(self.control.goes_on.wait_while(hangs, |hangs| *hangs).unwrap());
        let bad = self.control.bad.load(SeqCst);
        if (offset + 1..=offset + u64::from(size)).contains(&bad) {
            return reply.error(Errno::EIO);
        }
        let start = usize::try_from(offset).unwrap().min(self.bytes.len());
        let end = (start + size as usize).min(self.bytes.len());
        reply.data(&self.bytes[start..end]);
    }
}
