//! Remote stores against servers that fail, refuse, lie and dawdle: what comes out is the right bytes, or an error that
//! says what happened. And what is secret stays so.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../servers/mod.rs"]
mod servers;

mod answers;
mod cache;
mod cache_loads;
mod cache_managed;
mod cache_shared;
mod credentials;
mod faults;
mod hub;
mod loads;
mod names;
mod opening;
mod pull;

use std::time::{Duration, Instant};

use penstock::memory::Window;
use penstock::store::{Object, ReadContext, Store};
use penstock::{Error, Result};

/// Bytes of objects under test: more than opening one brings.
const SIZE: usize = 3 << 20;

fn content(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

/// Reads part of an object to the middle of a larger buffer, and checks that nothing around it was touched.
fn read(object: &dyn Object, offset: usize, len: usize) -> Result<(Vec<u8>, ReadContext)> {
    let mut memory = vec![0xA5; len + 128];
    let mut cx = ReadContext::default();
    let done = object.read_into(offset as u64, Window::from_slice(&mut memory[64..64 + len]), &mut cx);
    assert!(memory[..64].iter().chain(&memory[64 + len..]).all(|byte| *byte == 0xA5), "written outside");
    done.map(|()| (memory[64..64 + len].to_vec(), cx))
}

/// The failure of opening what is at `location`.
fn refused(store: &dyn Store, location: &str) -> Error {
    store.open(location).map(drop).unwrap_err()
}

#[track_caller]
fn says(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

/// Does `work` in a thread, and fails if it takes longer than a test may.
fn soon<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = std::sync::mpsc::channel();
    let began = Instant::now();
    std::thread::spawn(move || drop(sender.send(work())));
    receiver
        .recv_timeout(Duration::from_secs(60))
        .unwrap_or_else(|_| panic!("hung for {:?}", began.elapsed()))
}
