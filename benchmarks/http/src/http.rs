//! As much of HTTP/1.1 as both ends need.

use std::io::{self, Read};
use std::net::TcpStream;

/// The longest head that is read.
const MAX_HEAD: usize = 16 << 10;

/// A head, and what came after it in the same read.
pub struct Head {
    pub text: Vec<u8>,
    pub rest: Vec<u8>,
}

/// Reads up to and including the empty line; none where the connection ended before anything came.
pub fn read_head(stream: &mut TcpStream, mut already: Vec<u8>) -> io::Result<Option<Head>> {
    loop {
        if let Some(end) = already.windows(4).position(|four| four == b"\r\n\r\n") {
            let rest = already.split_off(end + 4);
            return Ok(Some(Head { text: already, rest }));
        }
        if already.len() > MAX_HEAD {
            return Err(io::Error::other("the head is too long"));
        }
        let mut buffer = [0; 4096];
        match stream.read(&mut buffer)? {
            0 if already.is_empty() => return Ok(None),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            got => already.extend_from_slice(&buffer[..got]),
        }
    }
}

/// A request, as far as it matters here.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    pub method: String,
    /// Decoded, without its query.
    pub path: String,
    pub query: String,
    /// First and last byte of the range; the last may be left out.
    pub range: Option<(u64, Option<u64>)>,
    pub if_match: Option<String>,
}

impl Request {
    pub fn parse(head: &[u8]) -> io::Result<Self> {
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut parsed = httparse::Request::new(&mut headers);
        parsed.parse(head).map_err(io::Error::other)?;
        let target = parsed.path.unwrap_or_default();
        // AWS's runtime asks as if of a proxy, with the whole URL.
        let target = match target.strip_prefix("http://") {
            Some(rest) => rest.find('/').map_or("/", |path| &rest[path..]),
            None => target,
        };
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let header = |name: &str| {
            let found = parsed.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
            std::str::from_utf8(found.value).ok()
        };
        let range = header("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
        Ok(Self {
            method: parsed.method.unwrap_or_default().to_owned(),
            path: decoded(path),
            query: query.to_owned(),
            range: range.and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()))),
            if_match: header("if-match").map(str::to_owned),
        })
    }

    /// The value of a part of the query, decoded.
    pub fn asked(&self, name: &str) -> Option<String> {
        let mut parts = self.query.split('&').filter_map(|part| part.split_once('='));
        parts.find(|(part, _)| *part == name).map(|(_, value)| decoded(value))
    }
}

fn decoded(text: &str) -> String {
    let mut bytes = text.bytes();
    let mut plain = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        let mut hex = bytes.clone();
        let digits = [hex.next(), hex.next()].map(|digit| (digit.unwrap_or(b'x') as char).to_digit(16));
        match (byte, digits) {
            (b'%', [Some(high), Some(low)]) => {
                plain.push((high * 16 + low) as u8);
                bytes = hex;
            }
            _ => plain.push(byte),
        }
    }
    String::from_utf8_lossy(&plain).into_owned()
}

/// An answer's status and length.
pub fn parse_answer(head: &[u8]) -> io::Result<(u16, u64)> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut parsed = httparse::Response::new(&mut headers);
    parsed.parse(head).map_err(io::Error::other)?;
    let length = parsed.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
    let length = length.and_then(|length| std::str::from_utf8(length.value).ok()?.parse().ok());
    Ok((parsed.code.unwrap_or(0), length.ok_or_else(|| io::Error::other("no length"))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_taken_apart() {
        let head = b"GET /b/a%20b?list-type=2&prefix=a%2Fb HTTP/1.1\r\nHost: h\r\nRange: bytes=5-9\r\n\r\n";
        let request = Request::parse(head).unwrap();
        assert_eq!((request.method.as_str(), request.path.as_str()), ("GET", "/b/a b"));
        assert_eq!((request.range, request.asked("prefix").as_deref()), (Some((5, Some(9))), Some("a/b")));
        let whole = Request::parse(b"GET http://h:1/b/c HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!(whole.path, "/b/c");
        let open = Request::parse(b"GET /%zz HTTP/1.1\r\nrange: bytes=5-\r\n\r\n").unwrap();
        assert_eq!((open.range, open.path.as_str()), (Some((5, None)), "/%zz"));
        assert!(
            Request::parse(b"nonsense").is_err() || Request::parse(b"nonsense").unwrap().method.is_empty()
        );
    }

    #[test]
    fn an_answer_says_how_long_it_is() {
        let head = b"HTTP/1.1 206 X\r\nContent-Length: 12\r\n\r\n";
        assert_eq!(parse_answer(head).unwrap(), (206, 12));
        assert!(parse_answer(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
    }
}
