//! Whole loads through the disk cache: they ask a server for what loads without one ask for, and what came is kept.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use penstock::Result;
use penstock::checkpoint::Checkpoint;
use penstock::memory::Window;
use penstock::pipeline::{Next, Session, Target};
use penstock::plan::{Plan, Selection};
use penstock::store::{Environment, ReadContext, RemoteStore, Store};
use proptest::prelude::*;

use super::cache::{BLOCK, Cached, check, flush, load as fill, overwrite};
use super::loads::{READERS, file_of};
use super::servers::http::{Act, Server};
use super::servers::policy;
use super::{SIZE, content, read, soon};

/// What a server is asked for by loading all but every fifth of some tensors to host memory: ranges, sorted. The gaps are
/// worth no request of their own.
#[allow(unsafe_code)]
fn asked(server: &Server, store: Arc<dyn Store>, url: &str, tensors: usize, bytes: usize) -> Vec<(u64, u64)> {
    let checkpoint = Checkpoint::open(store, &[url.to_owned()]).unwrap();
    flush();
    server.script(|_, _| Act::Serve);
    let checkpoint = Arc::new(checkpoint);
    soon(move || {
        let expected = content(tensors * bytes);
        let wanted: Vec<usize> = (0..tensors).filter(|number| number % 5 != 1).collect();
        let of = |number: &usize| checkpoint.tensor(&format!("t{number}")).unwrap();
        let selected = wanted.iter().map(|number| (of(number), Selection::all(of(number)))).collect();
        let plan = Arc::new(Plan::new(selected, 8 << 20, 1 << 20));
        let mut session = Session::start(Arc::clone(&checkpoint), plan, Target::Slab, READERS).unwrap();
        session.attach_slab(wanted.len()).unwrap();
        loop {
            match session.next(Duration::from_secs(30)).unwrap() {
                Next::Landed(tensor) => {
                    let mut held = session.take_host(tensor).unwrap();
                    let begin = wanted[tensor as usize] * bytes;
                    let window = held.window();
                    // SAFETY: the tensor has landed, so all of it is filled.
                    let landed = unsafe { window.assume_filled(0, bytes) };
                    assert!(landed == &expected[begin..begin + bytes], "tensor {tensor}");
                }
                Next::Waiting => panic!("nothing landed for half a minute"),
                Next::Done => break drop(session.finish().unwrap()),
            }
        }
    });
    flush();
    let mut ranges: Vec<(u64, u64)> = server
        .log()
        .iter()
        .map(|line| {
            let (start, end) = line.split_once("bytes=").unwrap().1.split_once('-').unwrap();
            (start.parse().unwrap(), end.parse::<u64>().unwrap() + 1)
        })
        .collect();
    ranges.sort_unstable();
    ranges
}

#[test]
fn a_load_asks_a_server_no_more_often_with_a_cache_than_without() {
    for (tensors, bytes) in [(60, 300_000), (1800, 10_000)] {
        let cached = Cached::new();
        let url = cached.server.put("/m.safetensors", &file_of(tensors, bytes));
        let plain = Arc::new(RemoteStore::new(Environment::default(), policy()));
        let mut without = asked(&cached.server, plain, &url, tensors, bytes);
        let with = asked(&cached.server, Arc::new(cached.store()), &url, tensors, bytes);
        // The first block was kept when the header was read.
        without[0].0 = BLOCK as u64;
        assert_eq!(with, without, "{tensors} tensors of {bytes} bytes");
        // What lies between tensors was kept as well, so all of it is there.
        assert!(cached.is_complete("/m.safetensors"));
        let again = asked(&cached.server, Arc::new(cached.store()), &url, tensors, bytes);
        assert_eq!(again, Vec::new(), "{tensors} tensors of {bytes} bytes");
    }
}

#[test]
fn a_complete_entry_that_cannot_be_read_costs_no_request_for_each_window() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    fill(&cached.store(), &url, &bytes);
    let object = cached.store().open(&url).unwrap();
    assert!(!object.scatters(), "a local file is read piece by piece");
    let data = cached.entries()[0].join("data");
    File::options().write(true).open(&data).unwrap().set_len(BLOCK as u64).unwrap();
    assert!(read(&*object, 2 * BLOCK, 1000).unwrap().0 == bytes[2 * BLOCK..2 * BLOCK + 1000]);
    assert!(object.scatters());
    cached.requests();
    let mut memory = [[0; 1000]; 3];
    let starts = [BLOCK, BLOCK + 5000, 3 * BLOCK];
    let windows = starts.iter().zip(&mut memory);
    let mut into: Vec<_> = windows.map(|(at, row)| (*at as u64, Window::from_slice(row))).collect();
    object.read_scattered(&mut into, &mut ReadContext::default()).unwrap();
    assert!(memory.iter().zip(starts).all(|(row, at)| *row == bytes[at..at + 1000]));
    assert_eq!(cached.requests(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever is on disk, is damaged there, or fails to come.
    #[test]
    fn windows_anywhere_get_their_bytes_and_what_is_kept_is_right(
        reads in prop::collection::vec(
            (0..SIZE / 2, prop::collection::vec((0usize..700_000, 0usize..700_000), 1..8), 0..4), 1..8),
    ) {
        let cached = Cached::new();
        let bytes = content(SIZE);
        let url = cached.server.put("/m", &bytes);
        let mut object = cached.store().open(&url).unwrap();
        for (offset, spans, what) in reads {
            let mut at = offset;
            let spans: Vec<_> = spans.into_iter().map(|(gap, len)| {
                let start = SIZE.min(at + gap);
                at = SIZE.min(start + len);
                start..at
            }).collect();
            match what {
                1 => object = { drop(object); cached.store().open(&url).unwrap() },
                2 => {
                    drop(object);
                    flush();
                    // Timestamps are as fine as the kernel's clock ticks.
                    std::thread::sleep(Duration::from_millis(20));
                    overwrite(&cached.entries()[0].join("data"), (offset + 1) as u64, &[0xEE; 700]);
                    object = cached.store().open(&url).unwrap();
                }
                3 => cached.server.script(|_, n| if n < 2 { Act::CloseAfter(600_000) } else { Act::Serve }),
                _ => {}
            }
            let mut memory: Vec<_> = spans.iter().map(|span| vec![0xA5; span.len() + 64]).collect();
            let mut into: Vec<_> = spans.iter().zip(&mut memory).map(|(span, memory)| {
                (span.start as u64, Window::from_slice(&mut memory[..span.len()]))
            }).collect();
            let done: Result<()> = object.read_scattered(&mut into, &mut ReadContext::default());
            done.unwrap();
            for (span, memory) in spans.iter().zip(&memory) {
                prop_assert!(memory[..span.len()] == bytes[span.clone()], "{span:?}");
                prop_assert!(memory[span.len()..].iter().all(|byte| *byte == 0xA5), "{span:?}");
            }
        }
        check(&*object, 0, &bytes);
        drop(object);
        flush();
        let again = cached.store().open(&url).unwrap();
        check(&*again, 0, &bytes);
    }
}
