//! An HTTP server that answers ranges, and does wrong when told to: from objects of its own, or in front of another
//! server whose answers it passes on.
//!
//! Each connection has a thread; what a request is met with is decided by a function of the test, which sees the request
//! and how many came before it.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// An object and its version.
#[derive(Clone)]
pub struct Object {
    pub bytes: Arc<Vec<u8>>,
    pub e_tag: Option<String>,
}

impl Object {
    pub fn new(bytes: &[u8]) -> Self {
        static VERSIONS: AtomicUsize = AtomicUsize::new(0);
        let version = VERSIONS.fetch_add(1, Ordering::Relaxed);
        Self { bytes: Arc::new(bytes.to_vec()), e_tag: Some(format!("\"v{version}\"")) }
    }
}

pub type Objects = Arc<Mutex<HashMap<String, Object>>>;

/// Where answers come from.
#[derive(Clone)]
pub enum Source {
    Own(Objects),
    /// Another server, `host:port`. Requests are passed on to the letter, since they may be signed.
    Behind(String),
    /// The same, asked by its own name, for servers that mind it.
    Named(String),
}

impl Default for Source {
    fn default() -> Self {
        Self::Own(Objects::default())
    }
}

/// A request, as far as tests look at it.
pub struct Request {
    pub method: String,
    /// With its query.
    pub path: String,
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
    head: Vec<u8>,
}

impl Request {
    pub fn range(&self) -> Option<(u64, u64)> {
        let (start, end) = self.headers.get("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((start.parse().ok()?, end.parse().ok()?))
    }
}

/// What a request is met with.
#[derive(Clone, Debug)]
pub enum Act {
    Serve,
    /// This JSON.
    Answer(String),
    /// This status with these headers and this body.
    Refuse(u16, Vec<(&'static str, String)>, String),
    /// This status, with a body that comes a byte a second for a day.
    DripRefusal(u16),
    /// The connection is reset before any answer.
    ResetAtOnce,
    /// The connection is reset after so many bytes of the body.
    ResetAfter(usize),
    /// It is closed, as if that had been all.
    CloseAfter(usize),
    /// Nothing more comes after so many bytes of the body.
    StallAfter(usize),
    /// So many bytes at a time, with a pause between.
    Drip(usize, Duration),
    /// The right head with a body of so many bytes, and a length to match.
    WrongLength(usize),
    /// Zeros instead of the bytes, in chunks: so many at once, the others and four too many after a pause.
    TooMuchOfAnother(usize, Duration),
    /// A range that begins so many bytes later than asked.
    WrongRange(u64),
    /// Another version's name.
    OtherVersion,
    /// The whole object, as servers without ranges do.
    Whole,
    /// No HTTP at all.
    Nonsense,
}

type Script = Box<dyn Fn(&Request, usize) -> Act + Send + Sync>;

struct Shared {
    source: Source,
    script: Mutex<Arc<Script>>,
    requests: AtomicUsize,
    log: Mutex<Vec<String>>,
}

/// A running server; it goes on until the test program ends.
#[derive(Clone)]
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Server {
    pub fn start(source: Source) -> Self {
        Self::listen(source, TcpListener::bind("127.0.0.1:0").unwrap())
    }

    /// A server for whoever comes to `listener`.
    pub fn listen(source: Source, listener: TcpListener) -> Self {
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            source,
            script: Mutex::new(Arc::new(Box::new(|_, _| Act::Serve))),
            requests: AtomicUsize::new(0),
            log: Mutex::default(),
        });
        let serving = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&serving);
                // A client that goes away is nothing to talk about.
                std::thread::spawn(move || drop(shared.serve(&stream)));
            }
        });
        Self { address, shared }
    }

    pub fn address(&self) -> String {
        self.address.to_string()
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address())
    }

    pub fn objects(&self) -> Objects {
        match &self.shared.source {
            Source::Own(objects) => Arc::clone(objects),
            Source::Behind(_) | Source::Named(_) => panic!("a proxy has no objects"),
        }
    }

    pub fn put(&self, path: &str, bytes: &[u8]) -> String {
        self.objects().lock().unwrap().insert(path.to_owned(), Object::new(bytes));
        self.url(path)
    }

    /// From now on, and counting anew.
    pub fn script(&self, script: impl Fn(&Request, usize) -> Act + Send + Sync + 'static) {
        *self.shared.script.lock().unwrap() = Arc::new(Box::new(script));
        self.shared.requests.store(0, Ordering::SeqCst);
        self.shared.log.lock().unwrap().clear();
    }

    /// Requests since the script was set.
    pub fn requests(&self) -> usize {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// Methods, paths and ranges of those requests.
    pub fn log(&self) -> Vec<String> {
        self.shared.log.lock().unwrap().clone()
    }
}

struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Answer {
    fn plain(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Vec::new() }
    }

    fn set(&mut self, name: &str, value: impl ToString) {
        self.headers.retain(|(known, _)| !known.eq_ignore_ascii_case(name));
        self.headers.push((name.to_owned(), value.to_string()));
    }
}

impl Shared {
    fn serve(&self, stream: &TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream.try_clone()?);
        while let Some(request) = read_request(&mut reader)? {
            let number = self.requests.fetch_add(1, Ordering::SeqCst);
            let range = request.headers.get("range").cloned().unwrap_or_default();
            self.log.lock().unwrap().push(format!("{} {} {range}", request.method, request.path));
            let script = Arc::clone(&self.script.lock().unwrap());
            if !self.act(stream, &request, script(&request, number))? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Meets a request; returns whether the connection can go on.
    fn act(&self, mut stream: &TcpStream, request: &Request, act: Act) -> std::io::Result<bool> {
        let is_head = request.method == "HEAD";
        let mut answer = match &act {
            Act::Refuse(status, headers, body) => {
                let mut answer = Answer::plain(*status);
                headers.iter().for_each(|(name, value)| answer.set(name, value));
                answer.body = body.clone().into_bytes();
                answer
            }
            Act::Answer(json) => {
                let mut answer = Answer::plain(200);
                answer.set("content-type", "application/json");
                answer.body = json.clone().into_bytes();
                answer
            }
            Act::DripRefusal(status) => {
                let head = format!("HTTP/1.1 {status} X\r\ncontent-length: 86400\r\n\r\n");
                stream.write_all(head.as_bytes())?;
                while stream.write_all(b" ").is_ok() {
                    std::thread::sleep(Duration::from_secs(1));
                }
                return Ok(false);
            }
            Act::ResetAtOnce => return reset(stream).map(|()| false),
            Act::Nonsense => return stream.write_all(b"I am no HTTP server\r\n\r\n").map(|()| false),
            Act::Whole => {
                let mut request = Request { headers: request.headers.clone(), ..copy(request) };
                request.headers.remove("range");
                self.answer(&request)?
            }
            _ => self.answer(request)?,
        };
        match act {
            Act::OtherVersion => answer.set("etag", "\"another\""),
            Act::WrongRange(shift) => {
                if let Some((start, end)) = request.range() {
                    let length = answer.body.len() as u64;
                    answer.set(
                        "content-range",
                        format!("bytes {}-{}/{}", start + shift, start + shift + length - 1, end + 1000),
                    );
                }
            }
            Act::WrongLength(length) => answer.body.resize(length, 0xEE),
            Act::TooMuchOfAnother(..) => answer.body = vec![0; answer.body.len() + 4],
            _ => {}
        }
        match act {
            Act::TooMuchOfAnother(..) => answer.set("transfer-encoding", "chunked"),
            _ if !is_head => answer.set("content-length", answer.body.len()),
            _ => {}
        }
        let mut head = format!("HTTP/1.1 {} X\r\n", answer.status);
        answer.headers.iter().for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
        stream.write_all(format!("{head}\r\n").as_bytes())?;
        let body = if is_head { &[][..] } else { &answer.body };
        match act {
            Act::ResetAfter(bytes) if body.len() > bytes => {
                stream.write_all(&body[..bytes])?;
                // What was written should arrive before the reset does.
                std::thread::sleep(Duration::from_millis(20));
                return reset(stream).map(|()| false);
            }
            Act::CloseAfter(bytes) if body.len() > bytes => {
                stream.write_all(&body[..bytes])?;
                return stream.shutdown(Shutdown::Both).map(|()| false);
            }
            Act::StallAfter(bytes) if body.len() > bytes => {
                stream.write_all(&body[..bytes])?;
                // Until the client has had enough.
                let _ = stream.read(&mut [0]);
                return Ok(false);
            }
            Act::TooMuchOfAnother(bytes, pause) => {
                let (first, rest) = body.split_at(bytes);
                for (chunk, pause) in [(first, pause), (rest, Duration::ZERO)] {
                    stream.write_all(format!("{:x}\r\n", chunk.len()).as_bytes())?;
                    stream.write_all(chunk)?;
                    stream.write_all(b"\r\n")?;
                    std::thread::sleep(pause);
                }
                stream.write_all(b"0\r\n\r\n")?;
            }
            Act::Drip(bytes, pause) => {
                for piece in body.chunks(bytes) {
                    stream.write_all(piece)?;
                    std::thread::sleep(pause);
                }
            }
            _ => stream.write_all(body)?,
        }
        Ok(true)
    }

    fn answer(&self, request: &Request) -> std::io::Result<Answer> {
        let objects = match &self.source {
            Source::Own(objects) => objects,
            Source::Behind(server) => return forward(server, &request.head, request),
            Source::Named(server) => {
                let host = request.headers.get("host").cloned().unwrap_or_default();
                let head = String::from_utf8_lossy(&request.head).replacen(&host, server, 1);
                return forward(server, head.as_bytes(), request);
            }
        };
        // Some objects are named by a query too.
        let path = request.path.split('?').next().unwrap_or_default();
        let found =
            [&*request.path, path].iter().find_map(|path| objects.lock().unwrap().get(*path).cloned());
        let Some(object) = found else { return Ok(Answer::plain(404)) };
        let header = |name: &str| request.headers.get(name);
        if header("if-match").is_some_and(|asked| Some(asked) != object.e_tag.as_ref()) {
            return Ok(Answer::plain(412));
        }
        let size = object.bytes.len();
        let mut answer = Answer::plain(200);
        if let Some(e_tag) = &object.e_tag {
            answer.set("ETag", e_tag);
        }
        let whole = || object.bytes.to_vec();
        match request.range() {
            Some((start, _)) if start >= size as u64 => answer.status = 416,
            Some((start, end)) => {
                let end = end.min(size as u64 - 1);
                answer.status = 206;
                answer.set("Content-Range", format!("bytes {start}-{end}/{size}"));
                answer.body = object.bytes[start as usize..=end as usize].to_vec();
            }
            None => answer.body = whole(),
        }
        if request.method == "HEAD" {
            answer.set("Content-Length", answer.body.len());
            answer.body.clear();
        }
        Ok(answer)
    }
}

fn copy(request: &Request) -> Request {
    Request {
        method: request.method.clone(),
        path: request.path.clone(),
        headers: request.headers.clone(),
        body: request.body.clone(),
        head: request.head.clone(),
    }
}

fn read_request(reader: &mut BufReader<TcpStream>) -> std::io::Result<Option<Request>> {
    let head = read_head(reader)?;
    let text = String::from_utf8_lossy(&head).into_owned();
    let mut lines = text.lines();
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(path)) = (words.next().filter(|m| !m.is_empty()), words.next()) else {
        return Ok(None);
    };
    let headers = headers(lines);
    let length = headers.get("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(Some(Request { method: method.into(), path: path.into(), headers, body, head }))
}

fn headers<'a>(lines: impl Iterator<Item = &'a str>) -> HashMap<String, String> {
    let pairs = lines.filter_map(|line| line.split_once(':'));
    pairs.map(|(name, value)| (name.trim().to_ascii_lowercase(), value.trim().to_owned())).collect()
}

/// The bytes up to and including the empty line; none where the connection has ended.
fn read_head(reader: &mut BufReader<TcpStream>) -> std::io::Result<Vec<u8>> {
    let mut head = Vec::new();
    loop {
        let before = head.len();
        reader.read_until(b'\n', &mut head)?;
        if head.len() == before || head[before..] == *b"\r\n" {
            return Ok(head);
        }
    }
}

/// The answer of the server behind.
fn forward(server: &str, head: &[u8], request: &Request) -> std::io::Result<Answer> {
    let mut stream = TcpStream::connect(server)?;
    stream.write_all(head)?;
    stream.write_all(&request.body)?;
    let mut reader = BufReader::new(stream);
    let head = String::from_utf8_lossy(&read_head(&mut reader)?).into_owned();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(502);
    let mut answer = Answer::plain(status);
    for line in head.lines().skip(1) {
        if let Some((name, value)) = line.split_once(':') {
            answer.headers.push((name.trim().to_owned(), value.trim().to_owned()));
        }
    }
    let value = |name: &str| {
        answer.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.clone())
    };
    if request.method == "HEAD" {
        return Ok(answer);
    }
    if value("transfer-encoding").is_some_and(|coding| coding.contains("chunked")) {
        answer.body = read_chunks(&mut reader)?;
        answer.headers.retain(|(name, _)| !name.eq_ignore_ascii_case("transfer-encoding"));
    } else if let Some(length) = value("content-length").and_then(|length| length.parse().ok()) {
        answer.body = vec![0; length];
        reader.read_exact(&mut answer.body)?;
    }
    Ok(answer)
}

fn read_chunks(reader: &mut BufReader<TcpStream>) -> std::io::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let length = usize::from_str_radix(line.trim(), 16).unwrap_or(0);
        let begin = body.len();
        body.resize(begin + length, 0);
        reader.read_exact(&mut body[begin..])?;
        reader.read_exact(&mut [0; 2])?;
        if length == 0 {
            return Ok(body);
        }
    }
}

/// Ends the connection with a reset rather than an orderly close.
#[allow(unsafe_code)]
fn reset(stream: &TcpStream) -> std::io::Result<()> {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let size = libc::socklen_t::try_from(std::mem::size_of::<libc::linger>()).unwrap();
    // SAFETY: the option's value is a `linger` of that size, alive during the call.
    unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size,
        )
    };
    // The other handles of the socket are in this thread too and go with it.
    Ok(())
}
