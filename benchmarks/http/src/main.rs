//! Both ends of a load over HTTP, for the benchmark `remote`.
//!
//!     http-bench serve DIRECTORY [--port N] [shape]      answers ranges from files; prints its port
//!     http-bench stream URL [--requests N] [--part MIB]  object_store's stream of it into one buffer
//!     http-bench recv URL [--requests N] [--part MIB]    the same by threads that block in recv: the floor
//!
//! The shape of the network: `--latency-ms` before each answer, `--connection-mb` and `--link-mb` a second (1e6 bytes)
//! for each connection and for all together, `--outage-after` seconds after the first request every connection is lost
//! and none is made for `--outage` seconds.
//!
//! A client prints one line of JSON: bytes, seconds, the process's CPU seconds, and the sum of all 8-byte words. Parts
//! are asked for in order, each by whichever request is free.

mod buffer;
mod http;
mod recv;
mod serve;
mod shape;
mod stream;

use std::process::ExitCode;

use lexopt::prelude::*;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What a client is asked to do.
pub struct Wish {
    url: String,
    requests: usize,
    part: usize,
    /// Whether the buffer's pages are there before the clock starts.
    ready: bool,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("http-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Failure> {
    let mut args = lexopt::Parser::from_env();
    let (mut words, mut shape, mut port) = (Vec::new(), shape::Shape::default(), 0);
    let (mut requests, mut part, mut ready) = (16, 8.0, false);
    while let Some(arg) = args.next()? {
        match arg {
            Value(word) => words.push(word.string()?),
            Long("port") => port = args.value()?.parse()?,
            Long("latency-ms") => shape.latency = args.value()?.parse::<f64>()? / 1e3,
            Long("connection-mb") => shape.connection = Some(args.value()?.parse::<f64>()? * 1e6),
            Long("link-mb") => shape.link = Some(args.value()?.parse::<f64>()? * 1e6),
            Long("outage-after") => shape.outage_after = Some(args.value()?.parse()?),
            Long("outage") => shape.outage = args.value()?.parse()?,
            Long("requests") => requests = args.value()?.parse()?,
            Long("part") => part = args.value()?.parse()?,
            Long("ready") => ready = true,
            other => return Err(other.unexpected().into()),
        }
    }
    match &words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", directory] => serve::serve(directory.as_ref(), port, shape),
        [client @ ("stream" | "recv"), url] => {
            let part = (part * f64::from(1 << 20)) as usize;
            let wish = Wish { url: (*url).to_owned(), requests: requests.max(1), part: part.max(1), ready };
            let done = if *client == "recv" { recv::run(&wish) } else { stream::run(&wish) }?;
            println!("{done}");
            Ok(())
        }
        _ => Err("serve DIRECTORY, stream URL or recv URL".into()),
    }
}
