//! Whole loads from servers that are gone for a while, or want to be asked less.

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock::checkpoint::Checkpoint;
use penstock::pipeline::{Next, Session, Target};
use penstock::plan::{Plan, Selection};
use penstock::stats::LoadStats;
use penstock::store::{Environment, RemoteStore, RetryPolicy};
use penstock::tune::{Bounds, Readers};
use penstock::{Error, ErrorKind, Result};

use super::servers::http::{Act, Server, Source};
use super::servers::policy;
use super::{content, says, soon};

const TENSOR: usize = 300_000;
pub(super) const READERS: Readers = Readers {
    copies: 1,
    fetches: Bounds { initial: 16, start: 16, least: 2, most: 32 },
    threads: 33,
    per_reader_ranges: false,
};

/// A safetensors file of so many tensors, each of so many bytes.
pub(super) fn file_of(tensors: usize, bytes: usize) -> Vec<u8> {
    let entry = |i: usize| {
        let (start, end) = (i * bytes, (i + 1) * bytes);
        format!(r#""t{i}":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[{start},{end}]}}"#)
    };
    let header = format!("{{{}}}", (0..tensors).map(entry).collect::<Vec<_>>().join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend(content(tensors * bytes));
    file
}

/// A checkpoint of so many tensors behind a server of its own.
fn checkpoint(tensors: usize, policy: RetryPolicy) -> (Server, Checkpoint) {
    let file = file_of(tensors, TENSOR);
    let server = Server::start(Source::default());
    let location = server.put("/m.safetensors", &file);
    let store = RemoteStore::new(Environment::default(), policy);
    let checkpoint = Checkpoint::open(Arc::new(store), &[location]).unwrap();
    (server, checkpoint)
}

/// Loads all of it to host memory and checks every byte.
#[allow(unsafe_code)]
fn load(checkpoint: Checkpoint) -> Result<LoadStats> {
    soon(move || {
        let all = checkpoint.tensors().iter().map(|tensor| (tensor, Selection::all(tensor))).collect();
        let plan = Arc::new(Plan::new(all, 128 << 10, 0));
        let tensors = plan.tensors().len();
        let bytes = content(tensors * TENSOR);
        let mut session = Session::start(Arc::new(checkpoint), plan, Target::Slab, READERS)?;
        session.attach_slab(tensors)?;
        loop {
            match session.next(Duration::from_secs(30))? {
                Next::Landed(tensor) => {
                    let mut held = session.take_host(tensor).unwrap();
                    let begin = tensor as usize * TENSOR;
                    let window = held.window();
                    // SAFETY: the tensor has landed, so all of it is filled.
                    let landed = unsafe { window.assume_filled(0, TENSOR) };
                    assert!(landed == &bytes[begin..begin + TENSOR], "tensor {tensor}");
                }
                Next::Waiting => panic!("nothing landed for half a minute"),
                Next::Done => return session.finish(),
            }
        }
    })
}

#[test]
fn a_network_that_is_gone_for_a_while_does_not_fail_a_load() {
    let policy = RetryPolicy { outage: Duration::from_secs(20), ..policy() };
    let (server, checkpoint) = checkpoint(100, policy);
    let began = Instant::now();
    // Every connection breaks in the middle of its body, and none gets through for a second.
    server.script(move |_, n| match (n, began.elapsed() < Duration::from_secs(1)) {
        (0..20, _) => Act::Serve,
        (20..60, _) => Act::ResetAfter(1000 * n),
        (_, true) => Act::ResetAtOnce,
        (_, false) => Act::Serve,
    });
    let stats = load(checkpoint).unwrap();
    assert!(stats.calls > stats.blocks, "{} calls for {} blocks", stats.calls, stats.blocks);
}

#[test]
fn a_network_that_does_not_come_back_fails_it_and_says_what_happened() {
    let policy = RetryPolicy { outage: Duration::from_millis(300), ..policy() };
    let (server, checkpoint) = checkpoint(100, policy);
    server.script(|_, n| if n < 50 { Act::Serve } else { Act::ResetAtOnce });
    let error: Error = load(checkpoint).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Storage);
    says(
        &error,
        &[
            "given up after",
            "the last: the connection was lost",
            "m.safetensors",
            "tensor",
            "Check the network",
        ],
    );
}

#[test]
fn a_load_that_is_interrupted_over_and_over_is_given_up_as_a_whole() {
    let policy = RetryPolicy { interruptions: 40, ..policy() };
    let (server, checkpoint) = checkpoint(100, policy);
    server.script(|_, _| Act::ResetAfter(100));
    let error = load(checkpoint).unwrap_err();
    says(&error, &["too many requests of this load failed", "the last: the connection was lost"]);
    assert!(server.requests() < 41 + READERS.fetches.start + 1, "{}", server.requests());
}

#[test]
fn a_store_that_wants_to_be_asked_less_is_asked_by_fewer_readers() {
    let (server, checkpoint) = checkpoint(800, policy());
    server.script(|_, n| match n {
        100..160 => Act::Refuse(503, Vec::new(), "<Error><Code>SlowDown</Code></Error>".into()),
        _ => Act::Serve,
    });
    let stats = load(checkpoint).unwrap();
    assert_eq!(stats.throttled, 60);
    // Before it found out again how many are good.
    let fewest = stats.tried.iter().map(|trial| trial.readers).min();
    assert!(fewest.is_some_and(|fewest| fewest <= READERS.fetches.start / 2), "{:?}", stats.tried);
}
