//! A server of files that costs as little as one can: a thread for each connection, bodies by `sendfile(2)`.
//!
//! It answers what loaders ask for: ranges of objects, their heads, and listings as S3 writes them (`list-type=2`). The
//! first part of a path may be a bucket that is no directory: then it is left out, so that `s3://any/key` and
//! `http://host/key` are the same file. Signatures are not looked at.

use std::fs::File;
use std::io::{self, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use crate::Failure;
use crate::http::{Request, read_head};
use crate::shape::{Network, PIECE, Pacer, Shape};

pub fn serve(directory: &Path, port: u16, shape: Shape) -> Result<(), Failure> {
    let directory = directory.canonicalize()?;
    let listener = TcpListener::bind(("127.0.0.1", port))?;
    println!("{}", listener.local_addr()?.port());
    io::stdout().flush()?;
    let network = Arc::new(Network::new(shape));
    loop {
        let (stream, _) = listener.accept()?;
        let (directory, network) = (directory.clone(), Arc::clone(&network));
        std::thread::Builder::new().stack_size(256 << 10).spawn(move || {
            // A client that goes away is nothing to talk about.
            let _ =
                Connection { directory: &directory, pacer: network.connection(), network: &network, stream }
                    .run();
        })?;
    }
}

struct Connection<'a> {
    directory: &'a Path,
    network: &'a Network,
    pacer: Pacer,
    stream: TcpStream,
}

impl Connection<'_> {
    fn run(mut self) -> io::Result<()> {
        self.stream.set_nodelay(true)?;
        let mut rest = Vec::new();
        while !self.network.is_down()
            && let Some(head) = read_head(&mut self.stream, rest)?
        {
            rest = head.rest;
            let request = Request::parse(&head.text)?;
            self.network.answer();
            self.answer(&request)?;
        }
        if self.network.is_down() { reset(&self.stream) } else { Ok(()) }
    }

    fn answer(&mut self, request: &Request) -> io::Result<()> {
        let path = self.path(&request.path);
        if request.asked("list-type").as_deref() == Some("2") {
            return self.list(&path, &request.asked("prefix").unwrap_or_default());
        }
        let Ok(file) = File::open(&path) else { return self.head(404, "", 0) };
        let about = file.metadata()?;
        let size = about.len();
        if !about.is_file() {
            return self.head(404, "", 0);
        }
        let tag = format!("\"{:x}-{size:x}\"", about.mtime());
        if request.if_match.as_ref().is_some_and(|asked| *asked != tag) {
            return self.head(412, "", 0);
        }
        let (first, end, status) = match request.range {
            Some((first, _)) if first >= size => return self.head(416, "", 0),
            Some((first, last)) => (first, last.map_or(size, |last| size.min(last + 1)), 206),
            None => (0, size, 200),
        };
        let mut more = format!(
            "ETag: {tag}\r\nLast-Modified: Sat, 21 Nov 2026 00:00:00 GMT\r\nAccept-Ranges: bytes\r\n"
        );
        if status == 206 {
            more += &format!("Content-Range: bytes {first}-{}/{size}\r\n", end - 1);
        }
        self.head(status, &more, end - first)?;
        if request.method == "HEAD" { Ok(()) } else { self.body(&file, first, end) }
    }

    fn head(&mut self, status: u16, more: &str, length: u64) -> io::Result<()> {
        write!(self.stream, "HTTP/1.1 {status} X\r\n{more}Content-Length: {length}\r\n\r\n")
    }

    fn body(&self, file: &File, mut at: u64, end: u64) -> io::Result<()> {
        let most = if self.network.is_paced() { PIECE } else { u64::MAX };
        while at < end {
            let piece = (end - at).min(most);
            if self.network.is_paced() {
                self.network.pass(&self.pacer, piece);
                if self.network.is_down() {
                    return reset(&self.stream);
                }
            }
            let begin = at;
            while at < begin + piece {
                at += sendfile(&self.stream, file, at, begin + piece - at)?;
            }
        }
        Ok(())
    }

    /// The file that a path names; nothing outside of the directory is one.
    fn path(&self, path: &str) -> PathBuf {
        let relative: PathBuf =
            Path::new(path).components().filter(|part| matches!(part, Component::Normal(_))).collect();
        let whole = self.directory.join(&relative);
        let mut parts = relative.components();
        parts.next();
        if whole.exists() { whole } else { self.directory.join(parts.as_path()) }
    }

    fn list(&mut self, bucket: &Path, prefix: &str) -> io::Result<()> {
        let (folder, _) = prefix.rsplit_once('/').unwrap_or(("", prefix));
        let mut entries: Vec<_> = std::fs::read_dir(bucket.join(folder))?.filter_map(Result::ok).collect();
        entries.sort_by_key(std::fs::DirEntry::file_name);
        let mut contents = String::new();
        for entry in entries {
            let slash = if folder.is_empty() { "" } else { "/" };
            let key = format!("{folder}{slash}{}", entry.file_name().to_string_lossy());
            let about = entry.metadata()?;
            if about.is_file() && key.starts_with(prefix) {
                contents += &format!(
                    "<Contents><Key>{key}</Key><LastModified>2026-11-21T00:00:00.000Z</LastModified><Size>{}</Size>\
                     <StorageClass>STANDARD</StorageClass></Contents>",
                    about.len()
                );
            }
        }
        let body = format!(
            "<?xml version=\"1.0\"?><ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        );
        self.head(200, "Content-Type: application/xml\r\n", body.len() as u64)?;
        self.stream.write_all(body.as_bytes())
    }
}

fn sendfile(stream: &TcpStream, file: &File, at: u64, bytes: u64) -> io::Result<u64> {
    let mut at = libc::off_t::try_from(at).map_err(io::Error::other)?;
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    // SAFETY: both are open, and the offset is an integer that lives during the call.
    match unsafe { libc::sendfile(stream.as_raw_fd(), file.as_raw_fd(), &mut at, bytes) } {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        sent => u64::try_from(sent).map_err(|_| io::Error::last_os_error()),
    }
}

/// Has the connection end with a reset: what a router that restarts looks like.
fn reset(stream: &TcpStream) -> io::Result<()> {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let length = std::mem::size_of_val(&linger) as libc::socklen_t;
    // SAFETY: the option is a `linger` of that length, which lives during the call.
    unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            length,
        )
    };
    Err(io::ErrorKind::ConnectionReset.into())
}
