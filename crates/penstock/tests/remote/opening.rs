//! What opening and finding checkpoints on remote stores costs, and finds.

use std::collections::BTreeMap;
use std::sync::Arc;

use penstock::checkpoint::{Checkpoint, resolve};
use penstock::store::{Environment, RemoteStore, Store};
use penstock::{Code, ErrorKind};

use super::servers::http::{Act, Server, Source};
use super::servers::{self, policy};
use super::{SIZE, content, refused, says};

/// A safetensors file of `U8` tensors of two bytes.
fn weights(tensors: &[&str]) -> Vec<u8> {
    let entries: Vec<_> = tensors
        .iter()
        .enumerate()
        .map(|(i, name)| {
            format!(r#"{name:?}:{{"dtype":"U8","shape":[2],"data_offsets":[{},{}]}}"#, 2 * i, 2 * i + 2)
        })
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + 2 * tensors.len(), 7);
    file
}

fn index(map: &[(&str, &str)]) -> Vec<u8> {
    let map: BTreeMap<_, _> = map.iter().copied().collect();
    serde_json::to_vec(&BTreeMap::from([("weight_map", map)])).unwrap()
}

fn web() -> (Server, RemoteStore) {
    (Server::start(Source::default()), RemoteStore::new(Environment::default(), policy()))
}

fn open(store: &RemoteStore, location: &str) -> penstock::Result<Checkpoint> {
    Checkpoint::open(Arc::new(store.clone()), &[location.to_owned()])
}

#[test]
fn a_shard_costs_one_request_to_open_and_none_to_open_again() {
    let (server, store) = web();
    let location = server.put("/m.safetensors", &weights(&["a", "b"]));
    let checkpoint = open(&store, &location).unwrap();
    assert_eq!((server.requests(), checkpoint.tensors().len()), (1, 2));
    checkpoint.open_object(0).unwrap();
    assert_eq!(server.requests(), 1);
}

#[test]
fn a_header_longer_than_the_first_request_costs_one_more() {
    let (server, store) = web();
    let names: Vec<_> = (0..12_000).map(|i| format!("layers.{i}.weight")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let location = server.put("/m.safetensors", &weights(&names));
    assert_eq!(open(&store, &location).unwrap().tensors().len(), 12_000);
    assert_eq!(server.requests(), 2);
}

#[test]
fn prefixes_indexes_globs_and_objects_without_an_ending_are_found_on_every_store() {
    for remote in servers::all() {
        let at = |key: &str| format!("finding/{key}");
        remote.put(&at("plain/b.safetensors"), &weights(&["b"]));
        remote.put(&at("plain/a 1.safetensors"), &weights(&["a"]));
        remote.put(&at("plain/deep/c.safetensors"), &weights(&["c"]));
        remote.put(&at("plain/notes.txt"), b"x");
        remote.put(&at("sharded/model-1.safetensors"), &weights(&["x", "unused"]));
        remote.put(&at("sharded/sub/model-2.safetensors"), &weights(&["y"]));
        let map = index(&[("x", "model-1.safetensors"), ("y", "sub/model-2.safetensors")]);
        remote.put(&at("sharded/model.safetensors.index.json"), &map);
        remote.put(&at("without-an-ending"), &weights(&["w"]));
        let names = |location: &str| -> Vec<String> {
            let checkpoint = open(&remote.store, &format!("{}/{}", remote.root, at(location)))
                .unwrap_or_else(|error| panic!("{}: {error}", remote.name));
            checkpoint.tensors().iter().map(|tensor| tensor.name.to_string()).collect()
        };
        assert_eq!(names("sharded/"), ["x", "y"], "{}", remote.name);
        assert_eq!(names("sharded"), ["x", "y"], "{}", remote.name);
        assert_eq!(names("sharded/model.safetensors.index.json"), ["x", "y"], "{}", remote.name);
        assert_eq!(names("without-an-ending"), ["w"], "{}", remote.name);
        if remote.name != "HTTP" {
            assert_eq!(names("plain/"), ["a", "b"], "{}", remote.name);
            assert_eq!(names("plain/a*.safetensors"), ["a"], "{}", remote.name);
            let nothing =
                open(&remote.store, &format!("{}/finding/plain/z*.safetensors", remote.root)).unwrap_err();
            assert_eq!(nothing.kind(), ErrorKind::NotFound);
        }
        let missing = open(&remote.store, &format!("{}/finding/nothing/", remote.root)).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound, "{}: {missing}", remote.name);
    }
}

#[test]
fn an_empty_object_is_an_object() {
    for remote in servers::all() {
        let location = remote.put("empty.safetensors", b"");
        let object = remote.store.open(&location).unwrap_or_else(|error| panic!("{}: {error}", remote.name));
        assert_eq!(object.bytes(), 0, "{}", remote.name);
        says(&open(&remote.store, &location).unwrap_err(), &["the file is empty"]);
    }
}

#[test]
fn listings_of_many_pages_are_complete() {
    // More than the thousand that a page of S3 holds.
    let Some(s3) = servers::s3() else { return };
    let names: Vec<_> = (0..1203).map(|i| format!("pages/model-{i:05}.safetensors")).collect();
    std::thread::scope(|scope| {
        for chunk in names.chunks(151) {
            scope.spawn(move || chunk.iter().for_each(|name| drop(s3.put(name, b"x"))));
        }
    });
    let listed = s3.store.list(&format!("{}/pages/", s3.root)).unwrap();
    let expected: Vec<_> = names.iter().map(|name| format!("{}/{name}", s3.root)).collect();
    assert_eq!(
        listed.iter().map(|entry| &entry.location).collect::<Vec<_>>(),
        expected.iter().collect::<Vec<_>>()
    );
}

/// Two pages of a listing, as S3 and Google write them, or as Azure does.
fn page(azure: bool, second: bool) -> String {
    let name = if second { "p/b.safetensors" } else { "p/a.safetensors" };
    let date = "2026-11-21T00:00:00.000Z";
    if azure {
        let next = if second { "" } else { "<NextMarker>more&amp;of it</NextMarker>" };
        return format!(
            "<?xml version=\"1.0\"?><EnumerationResults><Blobs><Blob><Name>{name}</Name><Properties><Last-Modified>Sat, 21 \
             Nov 2026 00:00:00 GMT</Last-Modified><Content-Length>7</Content-Length><Content-Type>x</Content-Type>\
             <Etag>1</Etag></Properties></Blob></Blobs>{next}</EnumerationResults>"
        );
    }
    let next = if second { "" } else { "<NextContinuationToken>more&amp;of it</NextContinuationToken>" };
    format!(
        "<?xml version=\"1.0\"?><ListBucketResult><IsTruncated>{}</IsTruncated>{next}<Contents><Key>{name}</Key>\
         <LastModified>{date}</LastModified><ETag>\"1\"</ETag><Size>7</Size></Contents></ListBucketResult>",
        !second
    )
}

#[test]
fn every_store_is_asked_for_the_next_page_and_again_where_that_fails() {
    for (root, variables) in [
        ("s3://b", vec![("AWS_ENDPOINT_URL", ""), ("AWS_SKIP_SIGNATURE", "true")]),
        ("gs://b", vec![("STORAGE_EMULATOR_HOST", "")]),
        (
            "az://b",
            vec![
                ("AZURE_STORAGE_CONNECTION_STRING", "AccountName=devstoreaccount1;BlobEndpoint="),
                ("AZURE_SKIP_SIGNATURE", "true"),
            ],
        ),
    ] {
        let server = Server::start(Source::default());
        let azure = root.starts_with("az");
        server.script(move |request, number| {
            let second = request.path.contains("more%26of%20it") || request.path.contains("more%26of+it");
            match number {
                1 => Act::ResetAtOnce,
                2 => Act::Refuse(503, Vec::new(), String::new()),
                // From its beginning, page after page.
                _ => Act::Answer(page(azure, second)),
            }
        });
        let ends_in_url = |value: &str| {
            if value.is_empty() || value.ends_with('=') { server.url("") } else { String::new() }
        };
        let variables =
            variables.iter().map(|(name, value)| (*name, format!("{value}{}", ends_in_url(value))));
        let store = RemoteStore::new(Environment::of(variables), policy());
        let listed = store.list(&format!("{root}/p/")).unwrap_or_else(|error| panic!("{root}: {error}"));
        let names: Vec<_> = listed.iter().map(|entry| entry.location.rsplit_once('/').unwrap().1).collect();
        assert_eq!(names, ["a.safetensors", "b.safetensors"], "{root}");
        assert_eq!(server.requests(), 5, "{root}: {:?}", server.log());
    }
}

#[test]
fn a_signed_index_signs_its_shards_and_nobody_is_shown_the_signature() {
    let (server, store) = web();
    server.put("/m/a 1.safetensors", &weights(&["a"]));
    server.objects().lock().unwrap().extend({
        let bytes = weights(&["a"]);
        [("/m/a%201.safetensors".to_owned(), super::servers::http::Object::new(&bytes))]
    });
    server.put("/m/model.safetensors.index.json", &index(&[("a", "a 1.safetensors")]));
    server.script(|request, _| match request.path.contains("sig=SENTINEL") {
        true => Act::Serve,
        false => Act::Refuse(403, Vec::new(), String::new()),
    });
    let signed = server.url("/m/model.safetensors.index.json?sig=SENTINEL");
    let checkpoint = open(&store, &signed).unwrap();
    assert_eq!(checkpoint.objects()[0].location, server.url("/m/a%201.safetensors"));
    let resolved = resolve(&store, &[signed]).unwrap();
    let shown = format!("{checkpoint:?} {:?} {resolved:?} {store:?}", checkpoint.objects());
    assert!(!shown.contains("SENTINEL"), "{shown}");
    checkpoint.open_object(0).unwrap();
}

#[test]
fn an_index_of_a_server_with_a_port_names_shards_with_an_at() {
    let (server, store) = web();
    server.objects().lock().unwrap().extend({
        let bytes = weights(&["a"]);
        [("/m/a%401.safetensors".to_owned(), super::servers::http::Object::new(&bytes))]
    });
    let location = server.put("/m/model.safetensors.index.json", &index(&[("a", "a@1.safetensors")]));
    open(&store, &location).unwrap().open_object(0).unwrap();
}

#[test]
fn headers_of_many_shards_are_fetched_at_once() {
    let (server, store) = web();
    let shards: Vec<_> = (0..12).map(|i| format!("model-{i:02}.safetensors")).collect();
    let tensors: Vec<_> = (0..12).map(|i| format!("t{i}")).collect();
    for (shard, tensor) in shards.iter().zip(&tensors) {
        server.put(&format!("/m/{shard}"), &weights(&[tensor]));
    }
    let map: Vec<_> = tensors.iter().zip(&shards).map(|(t, s)| (t.as_str(), s.as_str())).collect();
    let location = server.put("/m/model.safetensors.index.json", &index(&map));
    // Nobody is answered before all twelve have asked.
    let barrier = std::sync::Barrier::new(12);
    server.script(move |request, _| {
        if request.path.ends_with(".safetensors") {
            barrier.wait();
        }
        Act::Serve
    });
    assert_eq!(super::soon(move || open(&store, &location)).unwrap().tensors().len(), 12);
}

#[test]
fn an_object_replaced_between_opening_and_loading_is_noticed() {
    for remote in servers::all() {
        let location = remote.put("replaced.safetensors", &weights(&["a", "b", "c"]));
        let checkpoint = open(&remote.store, &location).unwrap();
        remote.put("replaced.safetensors", &weights(&["a", "b", "d"]));
        let object = checkpoint.open_object(0).unwrap();
        let error = super::read(object.as_ref(), 8, 10).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Changed, "{}: {error}", remote.name);
        remote.delete("replaced.safetensors");
        let error = super::read(object.as_ref(), 8, 10).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Changed, "{}: {error}", remote.name);
    }
}

#[test]
fn a_server_without_ranges_is_told_apart() {
    let (server, store) = web();
    let small = server.put("/small.safetensors", &content(SIZE));
    let large = server.put("/large.safetensors", &content((32 << 20) + 1));
    server.script(|_, _| Act::Whole);
    assert_eq!(store.open(&small).unwrap().bytes(), SIZE as u64);
    let error = refused(&store, &large);
    assert_eq!(error.kind(), ErrorKind::Storage);
    says(&error, &["does not answer requests for part", "such as nginx"]);
}

#[test]
fn a_host_that_does_not_answer_is_given_up_soon() {
    let (_, store) = web();
    for location in ["http://127.0.0.1:1/m.safetensors", "http://no-such-host.invalid/m.safetensors"] {
        let store = store.clone();
        let error = super::soon(move || refused(&store, location));
        assert_eq!(error.kind(), ErrorKind::Storage);
        says(&error, &["no connection", "HTTPS_PROXY"]);
    }
}

/// A page of a listing that goes on with `token`, as S3 and Google or Azure write it.
fn endless(azure: bool, token: &str) -> String {
    match azure {
        true => format!(
            "<?xml version=\"1.0\"?><EnumerationResults ContainerName=\"b\"><Blobs></Blobs><NextMarker>{token}\
             </NextMarker></EnumerationResults>"
        ),
        false => format!(
            "<?xml version=\"1.0\"?><ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>{token}\
             </NextContinuationToken></ListBucketResult>"
        ),
    }
}

#[test]
fn a_listing_that_repeats_its_token_is_an_error() {
    for root in ["s3://b", "gs://b", "az://b"] {
        let server = Server::start(Source::default());
        let azure = root.starts_with("az");
        // Two pages that lead to one another.
        server.script(move |request, _| {
            let token = if request.path.contains("=one") { "two" } else { "one" };
            Act::Answer(endless(azure, token))
        });
        let store = RemoteStore::new(anonymous(root, &server.url("")), policy());
        for recursive in [false, true] {
            server.script(move |request, _| {
                let token = if request.path.contains("=one") { "two" } else { "one" };
                Act::Answer(endless(azure, token))
            });
            let (listing, at) = (store.clone(), format!("{root}/p/"));
            let error = super::soon(move || listing.find(&at, recursive).map(drop).unwrap_err());
            assert_eq!(error.error_code(), Code::EndlessListing, "{root}: {error}");
            says(&error, &["repeats a continuation token", root]);
            assert!(server.requests() <= 3, "{root}: {:?}", server.log());
        }
    }
}

fn anonymous(root: &str, url: &str) -> Environment {
    let url = url.trim_end_matches('/');
    match &root[..2] {
        "s3" => Environment::of([("AWS_ENDPOINT_URL", url), ("AWS_SKIP_SIGNATURE", "true")]),
        "gs" => Environment::of([("STORAGE_EMULATOR_HOST", url)]),
        _ => {
            let connection = format!("AccountName=devstoreaccount1;BlobEndpoint={url}");
            Environment::of([
                ("AZURE_STORAGE_CONNECTION_STRING", &*connection),
                ("AZURE_SKIP_SIGNATURE", "true"),
            ])
        }
    }
}

#[test]
fn opening_outlasts_what_loading_outlasts() {
    let (server, store) = web();
    let location = server.put("/m.safetensors", &weights(&["a"]));
    // More in a row than a host may refuse that nobody has heard of.
    let failures = policy().in_a_row_at_first as usize + 2;
    let busy = |status| Act::Refuse(status, Vec::new(), String::new());
    for act in [busy(503), busy(429), busy(500), Act::ResetAtOnce, Act::CloseAfter(10), Act::Nonsense] {
        let again = act.clone();
        server.script(move |_, number| if number < failures { again.clone() } else { Act::Serve });
        let (store, location) = (store.clone(), location.clone());
        let opened =
            super::soon(move || open(&store, &location)).unwrap_or_else(|error| panic!("{act:?}: {error}"));
        assert_eq!((opened.tensors().len(), server.requests()), (1, failures + 1), "{act:?}");
    }
    // Listings, too.
    server.script(move |_, number| match number < failures {
        true => Act::Refuse(503, Vec::new(), String::new()),
        false => Act::Answer(
            "<ListBucketResult><Contents><Key>p/a</Key><Size>1</Size><LastModified>2026-11-21T06:47:41Z\
                              </LastModified></Contents></ListBucketResult>"
                .into(),
        ),
    });
    let store = RemoteStore::new(anonymous("s3://b", &server.url("")), policy());
    assert_eq!(super::soon(move || store.list("s3://b/p/")).unwrap().len(), 1);
}

#[test]
fn a_proxy_that_is_not_there_is_named() {
    for (variable, proxy, url) in [
        ("HTTP_PROXY", "http://me:SENTINEL@127.0.0.1:1", "http://store.example/m.safetensors"),
        ("https_proxy", "127.0.0.1:1", "https://store.example/m.safetensors"),
    ] {
        let store = RemoteStore::new(Environment::of([(variable, proxy)]), policy());
        let error = super::soon(move || refused(&store, url));
        assert_eq!(error.error_code(), Code::Connection);
        let server = if variable == "HTTP_PROXY" { "http://store.example" } else { "store.example" };
        let named = format!("no connection to the proxy 127.0.0.1:1 ({variable}) for {server}");
        says(&error, &[&named, "NO_PROXY"]);
        assert!(!error.to_string().contains("SENTINEL"), "{error}");
    }
}

#[test]
fn the_proxies_are_those_of_the_stores_environment() {
    let (server, direct) = web();
    let location = server.put("/m.safetensors", &weights(&["a"]));
    let proxies = [("HTTP_PROXY", "http://127.0.0.1:1")];
    // Two stores of one process differ in it.
    refused(&RemoteStore::new(Environment::of(proxies), policy()), &location);
    direct.open(&location).unwrap();
    let excepted = proxies.into_iter().chain([("NO_PROXY", "127.0.0.0/8")]);
    RemoteStore::new(Environment::of(excepted), policy()).open(&location).unwrap();
}

#[test]
fn a_redirect_that_cannot_be_followed_is_told_once() {
    let (server, store) = web();
    let location = server.url("/m.safetensors");
    for target in [location.clone(), "ftp://127.0.0.1/m.safetensors".to_owned()] {
        server.script(move |_, _| Act::Refuse(302, vec![("location", target.clone())], String::new()));
        let (store, location) = (store.clone(), location.clone());
        let error = super::soon(move || refused(&store, &location));
        assert_eq!(error.kind(), ErrorKind::Storage);
        says(&error, &["redirect", "curl -sIL"]);
    }
}

#[test]
fn failures_have_codes_for_programs() {
    let (server, store) = web();
    let location = server.put("/m.safetensors", &weights(&["a"]));
    for (status, code) in [
        (404, Code::NotFound),
        (403, Code::AccessDenied),
        (401, Code::Credentials),
        (429, Code::Throttled),
        (503, Code::Throttled),
        (500, Code::ServerError),
    ] {
        server.script(move |_, _| Act::Refuse(status, Vec::new(), String::new()));
        let (store, location) = (store.clone(), location.clone());
        let error = super::soon(move || refused(&store, &location));
        assert_eq!(error.error_code(), code, "{status}: {error}");
    }
    server.script(|_, _| Act::ResetAtOnce);
    assert_eq!(super::soon(move || refused(&store, &location)).error_code(), Code::Connection);
}

#[test]
fn a_prefix_of_prefixes_is_told_with_what_is_below_it() {
    for remote in servers::all().into_iter().filter(|remote| remote.name != "HTTP") {
        remote.put("typo/llama-3-8b/m.safetensors", b"x");
        remote.put("typo/other/m.safetensors", b"x");
        let error = remote.store.list(&format!("{}/typo/lama-3-8b/", remote.root)).unwrap_err();
        assert_eq!(error.error_code(), Code::NotFound);
        let error = remote.store.list(&format!("{}/typo/", remote.root)).unwrap_err();
        says(&error, &["directly under", "holds llama-3-8b/, other/"]);
    }
}
