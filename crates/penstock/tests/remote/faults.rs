//! Faults in the middle of a load. Each is met on a plain HTTP server and, through a proxy that passes on what is
//! signed, on S3.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use penstock::ErrorKind;
use penstock::store::{Environment, Object, RemoteStore, Store};
use proptest::prelude::*;

use super::servers::http::{Act, Request, Server, Source};
use super::servers::{self, policy, s3_environment};
use super::{SIZE, content, read, says, soon};

/// An object behind a server that can be told to fail.
struct Faulty {
    name: &'static str,
    server: Server,
    store: RemoteStore,
    location: String,
}

impl Faulty {
    fn open(&self) -> Arc<dyn Object> {
        self.server.script(|_, _| Act::Serve);
        self.store.open(&self.location).unwrap()
    }
}

fn faulty() -> Vec<Faulty> {
    let server = Server::start(Source::default());
    let location = server.put("/m.safetensors", &content(SIZE));
    let store = RemoteStore::new(Environment::default(), policy());
    let mut all = vec![Faulty { name: "HTTP", server, store, location }];
    if let Some(s3) = servers::s3() {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let location = s3.put(&format!("faults/{}.safetensors", NUMBER.fetch_add(1, SeqCst)), &content(SIZE));
        let server = Server::start(Source::Behind(s3.server.clone()));
        let store = RemoteStore::new(s3_environment(&server.url("")), policy());
        all.push(Faulty { name: "S3", server, store, location });
    }
    all
}

fn is_range(request: &Request) -> bool {
    request.range().is_some()
}

/// Reads the whole object through `acts`, one for each request, and what follows served as it should be.
fn survives(acts: &[Act], requests: usize) {
    for faulty in faulty() {
        let object = faulty.open();
        let script = acts.to_vec();
        faulty.server.script(move |_, number| script.get(number).cloned().unwrap_or(Act::Serve));
        let (bytes, cx) = soon(move || read(object.as_ref(), 0, SIZE)).unwrap();
        assert!(bytes == content(SIZE), "{}: wrong bytes after {acts:?}", faulty.name);
        assert_eq!((faulty.server.requests(), cx.calls), (requests, requests as u64), "{}", faulty.name);
    }
}

/// Reads through `act` for every request, and returns each store's error.
fn gives_up(act: &Act) -> Vec<(Faulty, penstock::Error)> {
    let tried = faulty().into_iter().map(|faulty| {
        let object = faulty.open();
        let always = act.clone();
        faulty.server.script(move |_, _| always.clone());
        let error = soon(move || read(object.as_ref(), 0, SIZE)).unwrap_err();
        // What opening had brought was not asked for again.
        assert_eq!(error.byte_range().map(|range| range.end), Some(SIZE as u64), "{error}");
        says(&error, &[&faulty.location]);
        (faulty, error)
    });
    tried.collect()
}

fn refuse(status: u16, headers: &[(&'static str, &str)], body: &str) -> Act {
    Act::Refuse(status, headers.iter().map(|(n, v)| (*n, v.to_string())).collect(), body.into())
}

const SLOW_DOWN: &str =
    "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>";

#[test]
fn a_connection_reset_in_mid_body_is_resumed_where_it_stopped() {
    for faulty in faulty() {
        let object = faulty.open();
        faulty.server.script(|_, n| if n == 0 { Act::ResetAfter(1_000_000) } else { Act::Serve });
        let (bytes, cx) = read(object.as_ref(), 700_000, 2_000_000).unwrap();
        assert!(bytes == content(SIZE)[700_000..2_700_000], "{}", faulty.name);
        // What had come was not fetched again.
        assert_eq!((cx.calls, cx.network_bytes), (2, 2_000_000));
        let log = faulty.server.log();
        let resumed: u64 = log[1].split("bytes=").nth(1).unwrap().split('-').next().unwrap().parse().unwrap();
        assert!(resumed > 700_000 && resumed <= 1_700_000, "{log:?}");
    }
}

#[test]
fn lost_connections_truncated_bodies_and_nonsense_are_asked_for_again() {
    survives(&[Act::ResetAtOnce, Act::ResetAtOnce], 3);
    survives(&[Act::CloseAfter(12_345), Act::CloseAfter(0), Act::CloseAfter(1)], 4);
    survives(&[Act::Nonsense], 2);
    survives(&[Act::WrongLength(1000)], 2);
    survives(&[Act::WrongLength(4 << 20)], 2);
    survives(&[Act::WrongRange(7)], 2);
}

#[test]
fn a_busy_server_is_asked_again() {
    for status in [500, 502, 503, 504, 429, 408] {
        survives(&[refuse(status, &[], ""), refuse(status, &[("retry-after", "0")], "busy")], 3);
    }
    survives(&[refuse(503, &[], SLOW_DOWN)], 2);
    // Some gateways say it with a status that means something else.
    survives(&[refuse(400, &[], SLOW_DOWN)], 2);
}

#[test]
fn a_stall_ends_in_another_request() {
    survives(&[Act::StallAfter(500_000)], 2);
}

#[test]
fn a_slow_drip_is_waited_for() {
    // In all longer than the idle limit: only silence is an end.
    for faulty in faulty() {
        let object = faulty.open();
        faulty.server.script(|_, _| Act::Drip(SIZE / 16, Duration::from_millis(200)));
        let (bytes, cx) = soon(move || read(object.as_ref(), 0, SIZE)).unwrap();
        assert!(bytes == content(SIZE) && cx.calls == 1, "{}", faulty.name);
    }
}

#[test]
fn a_server_says_when_to_come_back() {
    for faulty in faulty() {
        let object = faulty.open();
        for status in [429, 500, 503] {
            let later = move || refuse(status, &[("retry-after", "1")], "");
            faulty.server.script(move |_, n| if n == 0 { later() } else { Act::Serve });
            let began = std::time::Instant::now();
            read(object.as_ref(), 600_000, 1000).unwrap();
            assert!(began.elapsed() >= Duration::from_secs(1), "{} {status}", faulty.name);
        }
        // Longer than anyone would wait is a refusal.
        faulty.server.script(|_, _| refuse(429, &[("retry-after", "7200")], ""));
        let error = soon(move || read(object.as_ref(), 600_000, 1000)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Storage);
        says(&error, &["come back in 7200 s", "HTTP 429"]);
    }
}

#[test]
fn what_does_not_pass_is_told_with_what_happened() {
    for (_, error) in gives_up(&refuse(503, &[], SLOW_DOWN)) {
        assert_eq!(error.kind(), ErrorKind::Storage);
        says(
            &error,
            &[
                "given up after 10 failed requests",
                "the last: HTTP 503 SlowDown (Please reduce",
                "PENSTOCK_READERS",
            ],
        );
    }
    for (_, error) in gives_up(&Act::ResetAtOnce) {
        assert_eq!(error.kind(), ErrorKind::Storage);
        says(&error, &["the connection was lost"]);
    }
    for (_, error) in gives_up(&Act::WrongRange(7)) {
        assert_eq!(error.kind(), ErrorKind::Storage);
        says(&error, &["an unusable answer"]);
    }
}

#[test]
fn a_server_that_always_breaks_off_late_is_not_asked_for_ever() {
    for faulty in faulty() {
        let mut policy = policy();
        policy.interruptions = 5;
        let environment =
            if faulty.name == "S3" { s3_environment(&faulty.server.url("")) } else { Environment::default() };
        let store = RemoteStore::new(environment, policy);
        faulty.server.script(|_, _| Act::Serve);
        let object = store.open(&faulty.location).unwrap();
        faulty.server.script(|_, _| Act::ResetAfter(1000));
        let error = soon(move || read(object.as_ref(), 0, SIZE)).unwrap_err();
        says(
            &error,
            &["too many requests of this load failed, 6 of them, the last: the connection was lost"],
        );
        assert_eq!(faulty.server.requests(), 6, "{}", faulty.name);
    }
}

#[test]
fn another_version_is_never_mixed_in() {
    for faulty in faulty() {
        let object = faulty.open();
        // A server that ignores the condition and answers with what it has.
        faulty.server.script(|_, n| if n == 0 { Act::ResetAfter(100_000) } else { Act::OtherVersion });
        let error = soon(move || read(object.as_ref(), 0, SIZE)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Changed, "{}: {error}", faulty.name);
        // One that minds it.
        let object = faulty.open();
        faulty.server.script(|request, _| {
            assert!(request.headers.contains_key("if-match"), "the version was not asked for");
            refuse(412, &[], "")
        });
        let error = soon(move || read(object.as_ref(), 0, SIZE)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Changed, "{}: {error}", faulty.name);
        assert_eq!(faulty.server.requests(), 1);
    }
}

#[test]
fn an_object_deleted_under_way_has_changed() {
    for (_, error) in gives_up(&refuse(404, &[], "<Error><Code>NoSuchKey</Code></Error>")) {
        assert_eq!(error.kind(), ErrorKind::Changed);
        says(&error, &["replaced or deleted"]);
    }
}

#[test]
fn a_denial_under_way_is_not_asked_for_again() {
    for (faulty, error) in gives_up(&refuse(403, &[], "<Error><Code>AccessDenied</Code></Error>")) {
        assert_eq!(error.kind(), ErrorKind::Access);
        assert_eq!(faulty.server.requests(), 1);
    }
}

#[test]
fn a_read_that_waits_ends_when_the_load_is_stopped() {
    for faulty in faulty() {
        let object = faulty.open();
        faulty.server.script(|_, _| Act::StallAfter(100));
        let load = faulty.store.for_load().unwrap();
        let object = load.reopen(&faulty.location, &object.identity()).unwrap();
        let reading = Arc::clone(&object);
        let reader = std::thread::spawn(move || read(reading.as_ref(), 0, SIZE));
        while faulty.server.requests() == 0 {
            std::thread::yield_now();
        }
        let began = std::time::Instant::now();
        load.interrupt();
        let error = reader.join().unwrap().unwrap_err();
        // Well before the idle limit of two seconds.
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        // And none begins after it, in that load.
        assert_eq!(read(object.as_ref(), 600_000, 10).unwrap_err().kind(), ErrorKind::Cancelled);
        faulty.server.script(|_, _| Act::Serve);
        read(faulty.open().as_ref(), 600_000, 10).unwrap();
    }
}

#[test]
fn opening_ends_when_it_is_stopped() {
    for faulty in faulty() {
        faulty.server.script(|_, _| Act::StallAfter(0));
        let (store, location) = (faulty.store.clone(), faulty.location.clone());
        let opening = std::thread::spawn(move || store.open(&location).map(drop));
        while faulty.server.requests() == 0 {
            std::thread::yield_now();
        }
        faulty.store.interrupt();
        assert_eq!(opening.join().unwrap().unwrap_err().kind(), ErrorKind::Cancelled);
    }
}

#[test]
fn a_user_and_a_password_in_a_url_are_sent_to_its_host_and_to_no_other() {
    let (server, elsewhere) = (Server::start(Source::default()), Server::start(Source::default()));
    let target = elsewhere.put("/m.safetensors", &content(SIZE));
    server.put("/m.safetensors", &content(SIZE));
    let store = RemoteStore::new(Environment::default(), policy());
    let location = format!("http://me:pass%20word@{}/m.safetensors", server.address());
    // "me:pass word", as RFC 7617 has it.
    server.script(|request, _| match request.headers.get("authorization").map(String::as_str) {
        Some("Basic bWU6cGFzcyB3b3Jk") => Act::Serve,
        _ => refuse(401, &[], ""),
    });
    assert_eq!(store.open(&location).unwrap().bytes(), SIZE as u64);
    server.script(move |_, _| refuse(302, &[("location", &target)], ""));
    elsewhere.script(|request, _| match request.headers.contains_key("authorization") {
        false => Act::Serve,
        true => refuse(500, &[], ""),
    });
    store.open(&location).unwrap();
}

#[test]
fn a_refusal_that_drips_is_not_waited_for() {
    for faulty in faulty() {
        let object = faulty.open();
        faulty.server.script(|_, _| Act::DripRefusal(403));
        let error = soon(move || read(object.as_ref(), 0, SIZE)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Access, "{}: {error}", faulty.name);
    }
}

#[test]
fn a_range_that_takes_far_longer_than_others_is_asked_for_again() {
    for faulty in faulty() {
        let environment =
            if faulty.name == "S3" { s3_environment(&faulty.server.url("")) } else { Environment::default() };
        let mut policy = policy();
        policy.idle = Duration::from_secs(3600);
        policy.hedge_after = Duration::from_millis(50);
        let store = RemoteStore::new(environment, policy);
        faulty.server.script(|_, _| Act::Serve);
        let object = store.open(&faulty.location).unwrap();
        for _ in 0..10 {
            read(object.as_ref(), 1_000_000, 1_500_000).unwrap();
        }
        // The first request hangs for good; the second goes for what it had not brought.
        faulty.server.script(|_, n| if n == 0 { Act::StallAfter(700_000) } else { Act::Serve });
        let reading = Arc::clone(&object);
        let (bytes, cx) = soon(move || read(reading.as_ref(), 1_000_000, 1_500_000)).unwrap();
        assert!(bytes == content(SIZE)[1_000_000..2_500_000], "{}", faulty.name);
        assert_eq!((cx.calls, cx.network_bytes), (2, 1_500_000), "{}", faulty.name);
        // A second request that fails leaves the first to go on.
        faulty.server.script(|_, n| match n {
            0 => Act::Drip(100_000, Duration::from_millis(50)),
            _ => refuse(403, &[], ""),
        });
        let reading = Arc::clone(&object);
        let (bytes, cx) = soon(move || read(reading.as_ref(), 1_000_000, 1_500_000)).unwrap();
        assert!(bytes == content(SIZE)[1_000_000..2_500_000], "{}", faulty.name);
        assert_eq!(cx.calls, 2, "{}", faulty.name);
        // There is no third: of a dozen ranges, two were asked for twice.
        faulty.server.script(|_, _| Act::Drip(100_000, Duration::from_millis(50)));
        let (_, cx) = soon(move || read(object.as_ref(), 1_000_000, 1_500_000)).unwrap();
        assert_eq!(cx.calls, 1, "{}", faulty.name);
    }
}

#[test]
fn what_a_request_took_back_is_not_left_over_what_the_other_brought() {
    let ms = Duration::from_millis;
    let too_much = Act::TooMuchOfAnother(500_000, ms(300));
    let slow = Act::Drip(100_000, ms(60));
    for faulty in faulty() {
        let environment =
            if faulty.name == "S3" { s3_environment(&faulty.server.url("")) } else { Environment::default() };
        let mut policy = policy();
        policy.hedge_after = ms(50);
        let store = RemoteStore::new(environment, policy);
        faulty.server.script(|_, _| Act::Serve);
        let object = store.open(&faulty.location).unwrap();
        for first_is_right in [false, true] {
            for _ in 0..20 {
                read(object.as_ref(), 1_000_000, 1_500_000).unwrap();
            }
            let (first, second) = if first_is_right { (&slow, &too_much) } else { (&too_much, &slow) };
            let acts = [first.clone(), second.clone(), Act::StallAfter(0)];
            faulty.server.script(move |_, n| acts.get(n).cloned().unwrap_or(Act::Serve));
            let reading = Arc::clone(&object);
            let (bytes, _) = soon(move || read(reading.as_ref(), 1_000_000, 1_500_000)).unwrap();
            assert!(bytes == content(SIZE)[1_000_000..2_500_000], "{} {first_is_right}", faulty.name);
            faulty.server.script(|_, _| Act::Serve);
        }
    }
}

#[test]
fn answers_may_lead_elsewhere_on_the_web_only() {
    let elsewhere = Server::start(Source::default());
    let target = elsewhere.put("/there.safetensors", &content(SIZE));
    for faulty in faulty() {
        let target = target.clone();
        faulty.server.script(move |_, _| refuse(302, &[("location", &target)], ""));
        let opened = faulty.store.open(&faulty.location);
        if faulty.name == "HTTP" {
            let (bytes, _) = read(opened.unwrap().as_ref(), 0, SIZE).unwrap();
            assert!(bytes == content(SIZE));
        } else {
            let error = opened.map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Storage);
            says(&error, &["HTTP 302", "The server sends elsewhere"]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever goes wrong, in whatever order: the right bytes, or an error.
    #[test]
    fn any_run_of_faults_ends_in_the_right_bytes_or_an_error(
        faults in prop::collection::vec((0u8..9, 0usize..2_000_000), 0..14),
        offset in 0usize..SIZE, len in 0usize..SIZE,
    ) {
        let server = Server::start(Source::default());
        let location = server.put("/m.safetensors", &content(SIZE));
        let object = RemoteStore::new(Environment::default(), policy()).open(&location).unwrap();
        let acts: Vec<_> = faults.into_iter().map(|(kind, bytes)| match kind {
            0 => Act::ResetAtOnce,
            1 => Act::ResetAfter(bytes),
            2 => Act::CloseAfter(bytes),
            3 => refuse(503, &[], SLOW_DOWN),
            4 => refuse(429, &[("retry-after", "0")], ""),
            5 => Act::WrongLength(bytes),
            6 => Act::WrongRange(bytes as u64 + 1),
            7 => Act::OtherVersion,
            _ => Act::Serve,
        }).collect();
        server.script(move |request, number| {
            if is_range(request) { acts.get(number).cloned().unwrap_or(Act::Serve) } else { Act::Serve }
        });
        let len = len.min(SIZE - offset);
        match soon(move || read(object.as_ref(), offset, len)) {
            Ok((bytes, _)) => prop_assert!(bytes == content(SIZE)[offset..offset + len]),
            Err(error) => prop_assert!(matches!(error.kind(), ErrorKind::Storage | ErrorKind::Changed), "{error}"),
        }
    }
}
