//! What objects and endpoints may be called: keys are taken to the letter, endpoints as people write them.

use std::net::TcpListener;
use std::sync::Arc;

use penstock::ErrorKind;
use penstock::checkpoint::Checkpoint;
use penstock::store::{Environment, RemoteStore, Store};

use super::servers::http::{Act, Server, Source};
use super::servers::{self, policy};
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
    let store = RemoteStore::new(Environment::default(), policy());
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
        let found = RemoteStore::new(environment, policy())
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

/// A page of S3's listing.
fn page(keys: &[&str], prefixes: &[&str], more: &str) -> Act {
    let object = |key: &&str| {
        // What ends in a slash marks a directory.
        let size = if key.ends_with('/') { 0 } else { 11 };
        format!(
            "<Contents><Key>{key}</Key><LastModified>2026-11-21T00:00:00.000Z</LastModified><ETag>\"1\"</ETag>\
             <Size>{size}</Size></Contents>"
        )
    };
    let prefix = |prefix: &&str| format!("<CommonPrefixes><Prefix>{prefix}</Prefix></CommonPrefixes>");
    let entries: String = keys.iter().map(object).chain(prefixes.iter().map(prefix)).collect();
    Act::Answer(format!("<?xml version=\"1.0\"?><ListBucketResult>{more}{entries}</ListBucketResult>"))
}

fn s3_of(server: &Server) -> RemoteStore {
    let environment = [("AWS_ENDPOINT_URL", server.url("")), ("AWS_SKIP_SIGNATURE", "true".into())];
    RemoteStore::new(Environment::of(environment), policy())
}

#[test]
fn keys_that_cannot_be_read_are_named() {
    let server = Server::start(Source::default());
    let store = s3_of(&server);
    for (keys, prefixes, key) in [
        (&["p/m.safetensors", "p/a\nb"][..], &[][..], "p/a?b"),
        (&["p/../evil"], &[], "p/../evil"),
        (&["p/m.safetensors"], &["p//"], "p//"),
    ] {
        server.script(move |_, _| page(keys, prefixes, ""));
        let listed = store.list("s3://bucket/p/").map(drop);
        let pulled = penstock::pull::find(&store, "s3://bucket/p/").map(drop);
        for error in [listed.unwrap_err(), pulled.unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::Storage);
            says(
                &error,
                &["the listing holds a key that cannot be read", key, "Give the objects themselves"],
            );
        }
    }
    // Who wants one of them is told.
    for key in ["p//lost.bin", "p/../evil", "p/a\nb", "/p"] {
        let error = refused(&store, &format!("s3://bucket/{key}"));
        assert_eq!(error.kind(), ErrorKind::NotFound);
        says(&error, &["keys like this cannot be read"]);
    }
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
            let store = RemoteStore::new(environment, policy());
            assert_eq!(store.open("s3://b/k").unwrap_or_else(|error| panic!("{path}: {error}")).bytes(), 11);
            let log = server.log();
            assert!(log.last().unwrap().starts_with(&format!("GET {asked} ")), "{log:?}");
        }
        let store = RemoteStore::new(Environment::default(), policy());
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
        let store = RemoteStore::new(Environment::of(variables), policy());
        let location = format!("{root}/m.safetensors");
        server.script(|_, _| answer(&[("content-encoding", "gzip"), ("x-goog-generation", "1")]));
        let error = refused(&store, &location);
        assert_eq!((error.kind(), server.requests()), (ErrorKind::Storage, 1), "{error}");
        // Where it is a server's own doing, there is nothing to upload again.
        let remedy =
            if root.starts_with("http") { "Have the server send it as it is" } else { "Upload it as it is" };
        says(&error, &["Content-Encoding: gzip", remedy, "m.safetensors"]);
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
    let store = RemoteStore::new(Environment::of(environment), policy());
    for location in ["s3://bucket", "s3://bucket/"] {
        let error = Checkpoint::open(Arc::new(store.clone()), &[location.to_owned()]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        says(&error, &["s3://bucket", "no object"]);
    }
}

/// An S3 store with these settings besides keys, at AWS unless one of them is an endpoint.
fn s3_with(settings: &[(&str, &str)]) -> RemoteStore {
    let keys =
        [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret"), ("AWS_REGION", "us-east-1")];
    let last = |name: &str| settings.iter().find(|(set, _)| *set == name);
    let kept = keys.into_iter().filter(|(name, _)| last(name).is_none());
    RemoteStore::new(Environment::of(kept.chain(settings.iter().copied())), policy())
}

#[test]
fn what_is_no_bucket_s_name_is_said_to_be_none() {
    let locations = [
        "s3://minio:9000/bucket/m",
        "s3://my bucket/m",
        "s3://[x/m",
        "s3://AKIAKEY:SECRET/KEY@bucket/m",
        "s3://AKIAKEY:SECRETKEY@bucket/m",
        "s3://a\\b/m",
        "s3://ü/m",
    ];
    for location in locations {
        for endpoint in [None, Some(("AWS_ENDPOINT_URL", "http://127.0.0.1:9"))] {
            let store = s3_with(endpoint.as_slice());
            let open = store.open(location).map(drop).unwrap_err();
            let list = store.list(location).map(drop).unwrap_err();
            for error in [open, list] {
                assert_eq!(error.kind(), ErrorKind::NotFound, "{location}: {error}");
                assert!(error.to_string().contains("no bucket is called like this"), "{location}: {error}");
                assert!(!error.to_string().contains("SECRET"), "{error}");
            }
        }
    }
}

#[test]
fn settings_that_no_request_can_carry_are_errors_that_name_them() {
    let settings = [
        ("AWS_ACCESS_KEY_ID", "a\nb"),
        ("AWS_SESSION_TOKEN", "to\nken-SECRET"),
        ("AWS_SESSION_TOKEN", "tokenü-SECRET"),
        ("AWS_REGION", "us east"),
        ("AWS_REGION", "us:east/x"),
    ];
    for (name, value) in settings {
        for endpoint in [None, Some(("AWS_ENDPOINT_URL", "http://127.0.0.1:9"))] {
            let set: Vec<_> = endpoint.into_iter().chain([(name, value)]).collect();
            let error = s3_with(&set).open("s3://bucket/m").map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{name}={value:?}: {error}");
            assert!(error.to_string().contains(name), "{error}");
            assert!(!error.to_string().contains("SECRET"), "{error}");
        }
    }
}

#[test]
fn a_line_break_at_the_end_of_a_setting_is_none_of_it() {
    let server = Server::start(Source::default());
    let body = content(1000);
    server.put("/bucket/m", &body);
    let endpoint = server.url("") + "\n";
    let store = s3_with(&[
        ("AWS_ACCESS_KEY_ID", "key\n"),
        ("AWS_SESSION_TOKEN", "t\r\n"),
        ("AWS_ENDPOINT_URL", &endpoint),
    ]);
    assert_eq!(read(&*store.open("s3://bucket/m").unwrap(), 0, 1000).unwrap().0, body);
}
