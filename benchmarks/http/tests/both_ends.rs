//! The clients bring what the server has, through a network of whatever shape.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

struct Server(Child, String);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_http-bench"))
}

fn serve(directory: &std::path::Path, shape: &[&str]) -> Server {
    let mut command = program();
    command.arg("serve").arg(directory).args(shape).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut port = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut port).unwrap();
    Server(child, format!("http://127.0.0.1:{}", port.trim()))
}

fn client(kind: &str, url: &str) -> serde_json::Value {
    let done = program().args([kind, url, "--requests", "4", "--part", "0.25"]).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    serde_json::from_slice(&done.stdout).unwrap()
}

#[test]
fn what_is_served_is_what_comes_whole_or_shaped() {
    let directory = tempfile::tempdir().unwrap();
    let words: Vec<u64> = (0..400_000u64).map(|number| number.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    std::fs::write(directory.path().join("file"), &bytes).unwrap();
    let sum = words.iter().fold(0u64, |sum, word| sum.wrapping_add(*word)).to_string();
    for shape in [&[][..], &["--latency-ms", "5", "--connection-mb", "20", "--link-mb", "40"]] {
        let server = serve(directory.path(), shape);
        // A bucket that is no directory is left out.
        for path in ["file", "bucket/file"] {
            for kind in ["recv", "stream"] {
                let done = client(kind, &format!("{}/{path}", server.1));
                assert_eq!(
                    (done["bytes"].as_u64(), done["sum"].as_str()),
                    (Some(3_200_000), Some(&*sum)),
                    "{kind}"
                );
                let seconds = done["seconds"].as_f64().unwrap();
                assert!(shape.is_empty() || seconds > 0.07, "3.2 MB at 40 MB/s in {seconds} s");
            }
        }
    }
}

#[test]
fn an_outage_ends_every_connection() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("file"), vec![7; 4 << 20]).unwrap();
    let server =
        serve(directory.path(), &["--connection-mb", "2", "--outage-after", "0.3", "--outage", "3600"]);
    let done = program().args(["recv", &format!("{}/file", server.1)]).output().unwrap();
    assert!(!done.status.success());
}
