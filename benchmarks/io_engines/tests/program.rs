//! The program as it is run: with io_uring where this machine has it, and where it is refused.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// A few short rounds of one kind of pattern; the directory must be on a disk, since tmpfs is never cold.
fn program(directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_io-engines"));
    command.arg(directory).args(["--gib", "0.06", "--rounds", "2", "--cap", "0.02", "--only", "16 KiB"]);
    command
}

fn place() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn every_engine_is_measured_in_every_round_or_named_as_refused() {
    let (place, results) = (place(), place());
    let file = results.path().join("results.json");
    let printed =
        text(&program(place.path()).arg("--remove").arg("--output").arg(&file).output().expect("run"));
    let json: Value = serde_json::from_str(&std::fs::read_to_string(file).expect("results")).expect("JSON");
    let rows = json["rows"].as_array().expect("rows");
    assert!(
        rows.iter().any(|row| row["engine"] == "threads 8" && row["pattern"] == "warm: ranges of 16 KiB")
    );
    let rings =
        rows.iter().filter(|row| row["engine"].as_str().is_some_and(|name| name.contains("io_uring")));
    assert_eq!(rings.count() > 0, json["io_uring"] == "allowed", "{printed}");
    for row in rows {
        assert!(row["gb_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{row}");
        assert_eq!(row["rounds"]["round"], serde_json::json!([0, 1]), "{row}");
        let cached = row["rounds"]["cached_share"][0].as_f64().expect("a share");
        let warm = row["pattern"].as_str().is_some_and(|name| name.starts_with("warm"));
        assert!(if warm { cached >= 0.99 } else { cached <= 0.01 }, "{row}");
    }
    for refused in json["refused"].as_array().expect("a list") {
        let line = format!("{} is refused here", refused["engine"].as_str().expect("a name"));
        assert!(printed.contains(&line), "{printed}");
    }
    assert_eq!(std::fs::read_dir(place.path()).expect("there").count(), 0, "--remove leaves nothing");
    let whole = json.to_string();
    assert!(!whole.contains(&place.path().display().to_string()), "results name no paths");
}

#[test]
fn threads_are_measured_where_seccomp_forbids_io_uring() {
    for (code, said) in [(libc::EPERM, "seccomp"), (libc::ENOSYS, "has no io_uring")] {
        let place = place();
        let mut command = program(place.path());
        // SAFETY: only system calls between fork and exec.
        unsafe { command.pre_exec(move || forbid_io_uring(code)) };
        let printed = text(&command.output().expect("run"));
        let line = printed.lines().find(|line| line.starts_with("io_uring is refused here")).expect(&printed);
        assert!(line.contains(said), "{line}");
        assert!(printed.contains("threads 8") && !printed.contains("io_uring 1x"), "{printed}");
    }
}

/// As containers' profiles do: `io_uring_setup` and its two companions fail, everything else is allowed.
fn forbid_io_uring(code: i32) -> std::io::Result<()> {
    let statement = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let load_number = statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0);
    let below = statement(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 2, libc::SYS_io_uring_setup as u32);
    let above =
        statement(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, 1, 0, libc::SYS_io_uring_register as u32);
    let refuse = statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | code.unsigned_abs());
    let allow = statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW);
    let mut filter = [load_number, below, above, refuse, allow];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the filter lives through the calls, which copy it.
    let outcome = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    if outcome == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}
