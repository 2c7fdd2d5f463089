//! The floor: threads that ask for a part and block in `recv(2)` until it is in its place.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::buffer::{Parts, measure};
use crate::http::{parse_answer, read_head};
use crate::{Failure, Wish};

pub fn run(wish: &Wish) -> Result<serde_json::Value, Failure> {
    let url = wish.url.strip_prefix("http://").ok_or("only http:// here")?;
    let (host, path) = url.split_once('/').ok_or("no path")?;
    let size = Client::new(host, path)?.size()?;
    measure(wish, size, |parts| {
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..wish.requests).map(|_| scope.spawn(|| Client::new(host, path)?.fetch(parts))).collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".into())))
        })
    })
}

struct Client<'a> {
    stream: TcpStream,
    host: &'a str,
    path: &'a str,
}

impl<'a> Client<'a> {
    fn new(host: &'a str, path: &'a str) -> Result<Self, Failure> {
        let stream = TcpStream::connect(host)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, host, path })
    }

    fn ask(&mut self, method: &str, more: &str) -> Result<(u64, Vec<u8>), Failure> {
        let (host, path) = (self.host, self.path);
        write!(self.stream, "{method} /{path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n")?;
        let head = read_head(&mut self.stream, Vec::new())?.ok_or("the connection ended")?;
        match parse_answer(&head.text)? {
            (200 | 206, length) => Ok((length, head.rest)),
            (status, _) => Err(format!("HTTP {status}").into()),
        }
    }

    fn size(&mut self) -> Result<u64, Failure> {
        self.ask("HEAD", "").map(|(length, _)| length)
    }

    fn fetch(&mut self, parts: &Parts<'_>) -> Result<(), Failure> {
        while let Some((at, into)) = parts.take() {
            let range = format!("Range: bytes={at}-{}\r\n", at + into.len() as u64 - 1);
            let (length, came) = self.ask("GET", &range)?;
            if length != into.len() as u64 {
                return Err("another length than was asked for".into());
            }
            let (first, rest) = into.split_at_mut(came.len());
            first.copy_from_slice(&came);
            self.stream.read_exact(rest)?;
        }
        Ok(())
    }
}
