//! What objects and endpoints may be called: keys are taken to the letter, endpoints as people write them.

use std::net::TcpListener;
use std::sync::Arc;

use penstock::ErrorKind;
use penstock::checkpoint::Checkpoint;
use penstock::store::{Environment, RemoteStore, Store};

use super::servers::http::{Act, Server, Source};
use super::servers::{self, patience};
use super::{content, read, refused, says};

/// What a part of a key may be, and what URLs, globs and shells would make something else of.
const ODD: [&str; 20] = [
    "a b",
    "ü€漢",
    "100%",
    "%20",
    "%2F",
    "a+b",
    "a#b",
    "what?x=1&y",
    "a&b=c",
    "(1)",
    "it's",
    "a~b",
    "{x}",
    "a@b",
    "semi;colon",
    "a:b",
    "a,b",
    "$x!",
    "~",
    "...",
];

#[test]
fn keys_are_taken_to_the_letter() {
    for remote in servers::all().into_iter().filter(|remote| remote.name != "HTTP") {
        for (number, name) in ODD.iter().enumerate() {
            let key = format!("odd/{number}/{name}/{name}.safetensors");
            let body = content(100 + number);
            let location = remote.put(&key, &body);
            let why = |error| panic!("{} {key}: {error}", remote.name);
            let object = remote.store.open(&location).unwrap_or_else(why);
            assert_eq!(
                read(&*object, 0, body.len()).unwrap_or_else(|error| panic!("{error}")).0,
                body,
                "{key}"
            );
            // Opened again by the location that it was given by.
            let again = remote.store.reopen(&location, &object.identity()).unwrap_or_else(why);
            assert_eq!(again.bytes(), body.len() as u64);
            let prefix = location.rsplit_once('/').unwrap().0;
            for prefix in [prefix.to_owned(), format!("{prefix}/")] {
                let listed = remote.store.list(&prefix).unwrap_or_else(|error| panic!("{key}: {error}"));
                let listed: Vec<_> = listed.into_iter().map(|entry| entry.location).collect();
                assert_eq!(listed, [&*location], "{} {key}", remote.name);
            }
        }
    }
}

#[test]
fn a_key_on_the_web_is_escaped_by_whoever_writes_the_url() {
    let server = Server::start(Source::default());
    let store = RemoteStore::new(Environment::default(), patience());
    for path in ["/a%20b.bin", "/100%25.bin", "/a+b.bin", "/%C3%BC.bin", "/a%2Fb%23c%3Fd.bin", "/a~b(1)'.bin"]
    {
        let location = server.put(path, &content(50));
        let object = store.open(&location).unwrap_or_else(|error| panic!("{path}: {error}"));
        assert_eq!(read(&*object, 0, 50).unwrap().0, content(50), "{path}");
    }
}

#[test]
fn markers_of_directories_are_no_objects_of_them() {
    // What the consoles of S3 and Google make where a directory is made by hand.
    for remote in [servers::s3(), servers::gcs()].into_iter().flatten() {
        remote.put("marked/model/m.safetensors", &content(10));
        remote.put("marked/model/sub/n.safetensors", &content(10));
        let listing = "<?xml version=\"1.0\"?><ListBucketResult><IsTruncated>false</IsTruncated>\
                       <Contents><Key>marked/model/</Key><LastModified>2026-11-21T00:00:00.000Z</LastModified>\
                       <ETag>\"1\"</ETag><Size>0</Size></Contents>\
                       <Contents><Key>marked/model/m.safetensors</Key><LastModified>2026-11-21T00:00:00.000Z\
                       </LastModified><ETag>\"2\"</ETag><Size>10</Size></Contents>\
                       <CommonPrefixes><Prefix>marked/model/sub/</Prefix></CommonPrefixes></ListBucketResult>";
        let proxy = Server::start(Source::Behind(remote.server.clone()));
        proxy.script(move |_, _| Act::Answer(listing.to_owned()));
        let environment = match remote.name {
            "S3" => servers::s3_environment(&proxy.url("")),
            _ => Environment::of([("STORAGE_EMULATOR_HOST", proxy.url(""))]),
        };
        let found = RemoteStore::new(environment, patience())
            .find(&format!("{}/marked/model/", remote.root), false)
            .unwrap_or_else(|error| panic!("{}: {error}", remote.name));
        let names: Vec<_> = found.objects.iter().map(|found| &*found.path).collect();
        assert_eq!(
            (names, found.directories),
            (vec!["m.safetensors"], vec!["sub".to_owned()]),
            "{}",
            remote.name
        );
    }
}

#[test]
fn a_key_that_cannot_be_read_is_named_at_once() {
    let server = Server::start(Source::default());
    server.script(|_, _| {
        Act::Answer(
            "<?xml version=\"1.0\"?><ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>p//lost.bin</Key>\
             <LastModified>2026-11-21T00:00:00.000Z</LastModified><ETag>\"1\"</ETag><Size>1</Size></Contents>\
             </ListBucketResult>"
                .to_owned(),
        )
    });
    let environment = [("AWS_ENDPOINT_URL", server.url("")), ("AWS_SKIP_SIGNATURE", "true".into())];
    let store = RemoteStore::new(Environment::of(environment), patience());
    let error = store.list("s3://bucket/p/").unwrap_err();
    assert_eq!((error.kind(), server.requests()), (ErrorKind::Storage, 1), "{error}");
    says(&error, &["p//lost.bin", "s3://bucket/p", "empty parts"]);
    let error = refused(&store, "s3://bucket/p//lost.bin");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    says(&error, &["s3://bucket/p//lost.bin", "empty parts"]);
}

/// A range as S3 answers it, of an object of eleven bytes.
fn answer(extra: &[(&'static str, &str)]) -> Act {
    let mut headers = vec![
        ("content-range", "bytes 0-10/11".to_owned()),
        ("etag", "\"1\"".to_owned()),
        ("last-modified", "Sat, 21 Nov 2026 00:00:00 GMT".to_owned()),
    ];
    headers.extend(extra.iter().map(|(name, value)| (*name, (*value).to_owned())));
    Act::Refuse(206, headers, "hello world".into())
}

#[test]
fn endpoints_may_have_a_path_slashes_at_the_end_and_numbers_for_a_host() {
    let six = TcpListener::bind("[::1]:0");
    let six = six.ok().map(|listener| Server::listen(Source::default(), listener));
    for server in [Some(Server::start(Source::default())), six].into_iter().flatten() {
        server.script(|_, _| answer(&[]));
        for (path, asked) in
            [("", "/b/k"), ("/", "/b/k"), ("/base", "/base/b/k"), ("/base/path//", "/base/path/b/k")]
        {
            let environment = Environment::of([
                ("AWS_ENDPOINT_URL_S3", &*server.url(path)),
                ("AWS_ACCESS_KEY_ID", "a"),
                ("AWS_SECRET_ACCESS_KEY", "b"),
            ]);
            let store = RemoteStore::new(environment, patience());
            assert_eq!(store.open("s3://b/k").unwrap_or_else(|error| panic!("{path}: {error}")).bytes(), 11);
            let log = server.log();
            assert!(log.last().unwrap().starts_with(&format!("GET {asked} ")), "{log:?}");
        }
        let store = RemoteStore::new(Environment::default(), patience());
        assert_eq!(store.open(&server.url("/k")).unwrap().bytes(), 11);
    }
}

#[test]
fn what_was_uploaded_compressed_is_told_and_not_taken_for_weights() {
    let server = Server::start(Source::default());
    for (root, variables) in [
        ("s3://b", vec![("AWS_ENDPOINT_URL", server.url("")), ("AWS_SKIP_SIGNATURE", "true".into())]),
        ("gs://b", vec![("STORAGE_EMULATOR_HOST", server.url(""))]),
        (&*server.url(""), vec![]),
    ] {
        let store = RemoteStore::new(Environment::of(variables), patience());
        let location = format!("{root}/m.safetensors");
        server.script(|_, _| answer(&[("content-encoding", "gzip"), ("x-goog-generation", "1")]));
        let error = refused(&store, &location);
        assert_eq!((error.kind(), server.requests()), (ErrorKind::Storage, 1), "{error}");
        says(&error, &["Content-Encoding: gzip", "Upload it as it is", "m.safetensors"]);
        // What some programs leave of their upload's framing is no compression.
        server.script(|_, _| answer(&[("content-encoding", "aws-chunked"), ("x-goog-generation", "1")]));
        assert_eq!(store.open(&location).unwrap().bytes(), 11);
    }
}

#[test]
fn an_empty_bucket_says_so() {
    let server = Server::start(Source::default());
    server.script(|_, _| {
        Act::Answer(
            "<?xml version=\"1.0\"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
                .into(),
        )
    });
    let environment = [("AWS_ENDPOINT_URL", server.url("")), ("AWS_SKIP_SIGNATURE", "true".into())];
    let store = RemoteStore::new(Environment::of(environment), patience());
    for location in ["s3://bucket", "s3://bucket/"] {
        let error = Checkpoint::open(Arc::new(store.clone()), &[location.to_owned()]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        says(&error, &["s3://bucket", "no object"]);
    }
}
