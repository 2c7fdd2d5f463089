//! Real servers for tests of remote stores: an HTTP server of the test's own, and the ones that `tools/servers.sh`
//! fetches. Each is started once for a test program, on a port of its own, and ends with it.
#![allow(dead_code, unreachable_pub, clippy::print_stderr, clippy::unwrap_used, clippy::panic)]

pub mod http;
pub mod hub;

use std::collections::HashMap;
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload, RetryConfig};
use penstock::store::{Environment, RemoteStore, RetryPolicy};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

pub const BUCKET: &str = "penstock-test";
pub const S3_KEY: &str = "sentinel-access";
pub const S3_SECRET: &str = "sentinel-secret-key";
pub const AZURE_ACCOUNT: &str = "devstoreaccount1";

/// Waits that suit tests: long enough for two busy cores, short enough to be waited for.
pub fn policy() -> RetryPolicy {
    RetryPolicy {
        connect: Duration::from_secs(5),
        idle: Duration::from_secs(2),
        first_pause: Duration::from_millis(5),
        longest_pause: Duration::from_millis(50),
        longest_wait: Duration::from_secs(5),
        in_a_row: 10,
        outage: Duration::ZERO,
        ..RetryPolicy::default()
    }
}

/// The servers that there are, by name.
fn cached() -> &'static HashMap<String, String> {
    static CACHED: OnceLock<HashMap<String, String>> = OnceLock::new();
    CACHED.get_or_init(|| {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tools/servers.sh");
        let output = Command::new("bash").arg(script).stderr(Stdio::inherit()).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().filter_map(|line| line.split_once('=')).map(|(n, p)| (n.into(), p.into())).collect()
    })
}

/// A server's process; it is killed with the test program, even if that dies.
struct Server {
    port: u16,
    _directory: tempfile::TempDir,
    _child: Child,
}

impl Server {
    /// Starts `name` with the arguments that `arguments` makes of a free port and an empty directory. `None` where its
    /// toolchain is absent, which is said.
    fn start(name: &str, arguments: impl Fn(u16, &str) -> Vec<String>) -> Option<Self> {
        let Some(path) = cached().get(name) else {
            eprintln!("SKIPPED: {name} is not to be had here; see tools/servers.sh");
            return None;
        };
        let directory = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new(path);
        command.args(arguments(port, directory.path().to_str().unwrap()));
        command.stdout(Stdio::null()).stderr(Stdio::null()).stdin(Stdio::null());
        // SAFETY: prctl is safe to call between fork and exec.
        #[allow(unsafe_code)]
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        // The signal comes when the thread that started the child ends, so one that does not end starts it.
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            sender.send(command.spawn().unwrap()).unwrap();
            loop {
                std::thread::park();
            }
        });
        let mut child = receiver.recv().unwrap();
        let began = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(child.try_wait().unwrap().is_none(), "{name} ended at once");
            assert!(began.elapsed() < Duration::from_secs(60), "{name} does not come up");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(Self { port, _directory: directory, _child: child })
    }
}

/// A remote store under test: how to reach it, and how to put objects where it finds them.
pub struct Remote {
    pub name: &'static str,
    /// `s3://bucket`, `http://host:port`: what locations begin with.
    pub root: String,
    pub store: RemoteStore,
    /// `host:port`.
    pub server: String,
    put: Put,
    delete: Delete,
}

impl Remote {
    pub fn put(&self, key: &str, bytes: &[u8]) -> String {
        (self.put)(key, bytes);
        format!("{}/{key}", self.root)
    }

    pub fn delete(&self, key: &str) {
        (self.delete)(key);
    }
}

/// Every remote store that can be had here.
pub fn all() -> Vec<&'static Remote> {
    [Some(web()), s3(), gcs(), azure()].into_iter().flatten().collect()
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    static RUNTIME: OnceLock<tokio::runtime::Runtime> = OnceLock::new();
    let make = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    RUNTIME.get_or_init(make).block_on(work)
}

type Put = Box<dyn Fn(&str, &[u8]) + Send + Sync>;
type Delete = Box<dyn Fn(&str) + Send + Sync>;

/// Puts and deletes through `object_store`, which is how the tests write; what is tested only reads.
fn writer(store: impl ObjectStore) -> (Put, Delete) {
    let store = Arc::new(store);
    let other = Arc::clone(&store);
    let put = move |key: &str, bytes: &[u8]| {
        block_on(store.put(&Path::parse(key).unwrap(), PutPayload::from(bytes.to_vec()))).unwrap();
    };
    let delete = move |key: &str| block_on(other.delete(&Path::parse(key).unwrap())).unwrap();
    (Box::new(put), Box::new(delete))
}

fn install_tls() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
}

/// Sends a request as it is and returns the answer, for what `object_store` does not do: making buckets.
fn raw(port: u16, request: &str) -> String {
    use std::io::{Read, Write};
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

/// A plain HTTP server, this program's own.
pub fn web() -> &'static Remote {
    static WEB: OnceLock<Remote> = OnceLock::new();
    WEB.get_or_init(|| {
        let server = http::Server::start(http::Source::default());
        let (objects, others) = (server.objects(), server.objects());
        Remote {
            name: "HTTP",
            root: format!("http://{}", server.address()),
            store: RemoteStore::new(Environment::default(), policy()),
            server: server.address(),
            put: Box::new(move |key, bytes| {
                objects.lock().unwrap().insert(format!("/{key}"), http::Object::new(bytes));
            }),
            delete: Box::new(move |key| {
                others.lock().unwrap().remove(&format!("/{key}"));
            }),
        }
    })
}

pub fn s3_environment(endpoint: &str) -> Environment {
    Environment::of([
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ACCESS_KEY_ID", S3_KEY),
        ("AWS_SECRET_ACCESS_KEY", S3_SECRET),
        ("AWS_REGION", "us-east-1"),
    ])
}

/// S3, by versitygw.
pub fn s3() -> Option<&'static Remote> {
    static S3: OnceLock<Option<(Server, Remote)>> = OnceLock::new();
    let made = S3.get_or_init(|| {
        install_tls();
        let server = Server::start("versitygw", |port, directory| {
            std::fs::create_dir(format!("{directory}/{BUCKET}")).unwrap();
            ["--access", S3_KEY, "--secret", S3_SECRET, "--quiet", "--keep-alive", "--port"]
                .into_iter()
                .map(str::to_owned)
                .chain([format!("127.0.0.1:{port}"), "posix".into(), directory.into()])
                .collect()
        })?;
        let endpoint = format!("http://127.0.0.1:{}", server.port);
        let writing = object_store::aws::AmazonS3Builder::new()
            .with_bucket_name(BUCKET)
            .with_endpoint(&endpoint)
            .with_allow_http(true)
            .with_access_key_id(S3_KEY)
            .with_secret_access_key(S3_SECRET)
            .with_retry(RetryConfig::default());
        let (put, delete) = writer(writing.build().unwrap());
        let remote = Remote {
            name: "S3",
            root: format!("s3://{BUCKET}"),
            store: RemoteStore::new(s3_environment(&endpoint), policy()),
            server: format!("127.0.0.1:{}", server.port),
            put,
            delete,
        };
        Some((server, remote))
    });
    made.as_ref().map(|(_, remote)| remote)
}

/// Google Cloud Storage, by fake-gcs-server.
pub fn gcs() -> Option<&'static Remote> {
    static GCS: OnceLock<Option<(Server, Remote)>> = OnceLock::new();
    let made = GCS.get_or_init(|| {
        install_tls();
        let server = Server::start("fake-gcs-server", |port, _| {
            let port = port.to_string();
            let public = format!("127.0.0.1:{port}");
            let flags = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", &*port];
            flags.into_iter().chain(["-public-host", &*public]).map(str::to_owned).collect()
        })?;
        let body = format!("{{\"name\":\"{BUCKET}\"}}");
        let made = raw(
            server.port,
            &format!(
                "POST /storage/v1/b?project=p HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: \
                 application/json\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            ),
        );
        assert!(made.starts_with("HTTP/1.1 200"), "{made}");
        let endpoint = format!("http://127.0.0.1:{}", server.port);
        let port = server.port;
        // The emulator takes uploads as JSON only, which object_store does not write.
        let put = move |key: &str, bytes: &[u8]| {
            use std::io::{Read, Write};
            let name = utf8_percent_encode(key, NON_ALPHANUMERIC);
            let head = format!(
                "POST /upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name} HTTP/1.1\r\nhost: 127.0.0.1\r\n\
                 connection: close\r\ncontent-type: application/octet-stream\r\ncontent-length: {}\r\n\r\n",
                bytes.len()
            );
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(bytes).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        };
        let delete = move |key: &str| {
            let name = utf8_percent_encode(key, NON_ALPHANUMERIC);
            raw(
                port,
                &format!("DELETE /storage/v1/b/{BUCKET}/o/{name} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"),
            );
        };
        let remote = Remote {
            name: "GCS",
            root: format!("gs://{BUCKET}"),
            store: RemoteStore::new(Environment::of([("STORAGE_EMULATOR_HOST", endpoint)]), policy()),
            server: format!("127.0.0.1:{port}"),
            put: Box::new(put),
            delete: Box::new(delete),
        };
        Some((server, remote))
    });
    made.as_ref().map(|(_, remote)| remote)
}

/// Azure Blob Storage, by Azurite.
pub fn azure() -> Option<&'static Remote> {
    static AZURE: OnceLock<Option<(Server, Remote)>> = OnceLock::new();
    let made = AZURE.get_or_init(|| {
        install_tls();
        let server = Server::start("azurite", |port, _| {
            let flags = ["--silent", "--skipApiVersionCheck", "--inMemoryPersistence", "--disableTelemetry"];
            let flags = flags.into_iter().map(str::to_owned);
            flags.chain([format!("--blobPort={port}")]).collect()
        })?;
        let url = format!("http://127.0.0.1:{}", server.port);
        make_container(server.port);
        let writing = object_store::azure::MicrosoftAzureBuilder::new()
            .with_account(AZURE_ACCOUNT)
            .with_access_key(AZURE_KEY)
            .with_endpoint(format!("{url}/{AZURE_ACCOUNT}"))
            .with_allow_http(true)
            .with_container_name(BUCKET);
        let (put, delete) = writer(writing.build().unwrap());
        let remote = Remote {
            name: "Azure",
            root: format!("az://{BUCKET}"),
            store: RemoteStore::new(azure_environment(&url), policy()),
            server: format!("127.0.0.1:{}", server.port),
            put,
            delete,
        };
        Some((server, remote))
    });
    made.as_ref().map(|(_, remote)| remote)
}

/// Azurite's key, which its documentation gives to everyone.
pub const AZURE_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

pub fn azure_environment(url: &str) -> Environment {
    let connection =
        format!("AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};BlobEndpoint={url}/{AZURE_ACCOUNT};");
    Environment::of([("AZURE_STORAGE_CONNECTION_STRING", connection)])
}

/// Allows making containers, for good: an account signature made with Azurite's public key.
const MAKE_CONTAINERS: &str = "sv=2019-12-12&ss=b&srt=c&sp=c&se=2099-01-01T00%3A00%3A00Z&sig=gtLKHeoHHaSXKYUU7mB05BvFhjAn49dYycgdR%2BgWtiU%3D";

/// Makes the container, which `object_store` does not do.
fn make_container(port: u16) {
    let answer = raw(
        port,
        &format!(
            "PUT /{AZURE_ACCOUNT}/{BUCKET}?restype=container&{MAKE_CONTAINERS} HTTP/1.1\r\nhost: 127.0.0.1\r\n\
             connection: close\r\nx-ms-version: 2021-08-06\r\ncontent-length: 0\r\n\r\n"
        ),
    );
    assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
}
