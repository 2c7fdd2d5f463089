//! Pulls, from real servers and from ones that fail: every file whole or not there, what came kept, nothing outside of
//! the destination.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use penstock::pull::{How, Pull, Pulled, find, preview};
use penstock::store::{Environment, RemoteStore};
use penstock::{Error, ErrorKind, Result};

use super::servers::http::{Act, Server, Source};
use super::servers::hub::{Hub, commit};
use super::servers::{self, policy};
use super::{content, says};

/// Bytes of a file of several blocks.
const LARGE: usize = (20 << 20) + 5;

fn web_store() -> RemoteStore {
    RemoteStore::new(Environment::default(), policy())
}

fn pull(store: &RemoteStore, url: &str, to: &Path) -> Result<Pulled> {
    pull_only(store, url, to, |_| true)
}

fn pull_only(store: &RemoteStore, url: &str, to: &Path, wanted: impl Fn(&str) -> bool) -> Result<Pulled> {
    let mut items = find(store, url)?;
    items.retain(|item| wanted(&item.path));
    end(&mut Pull::start(store, items, to, None)?)
}

fn end(pull: &mut Pull) -> Result<Pulled> {
    let began = Instant::now();
    loop {
        assert!(began.elapsed() < Duration::from_secs(60), "the pull hangs");
        if let Some(pulled) = pull.wait(Duration::from_millis(20))? {
            return Ok(pulled);
        }
    }
}

/// What a pull would do.
fn would(store: &RemoteStore, url: &str, to: &Path) -> Vec<(String, u64, How)> {
    let files = preview(store, &find(store, url).unwrap(), to).unwrap();
    files.into_iter().map(|file| (file.path, file.bytes, file.how)).collect()
}

fn how(pulled: &Pulled) -> Vec<(&str, How)> {
    pulled.files.iter().map(|file| (&*file.path, file.how)).collect()
}

/// Every file below a directory but the pull's own, with its bytes.
fn files(below: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(below).unwrap().flatten().filter(|entry| entry.file_name() != ".penstock") {
        match entry.path().is_dir() {
            true => found.extend(files(&entry.path())),
            false => found.push((entry.path(), fs::read(entry.path()).unwrap())),
        }
    }
    found.sort();
    found
}

fn parts(to: &Path) -> usize {
    fs::read_dir(to.join(".penstock/parts")).map_or(0, Iterator::count)
}

#[test]
fn a_prefix_becomes_a_directory_and_is_not_fetched_again() {
    for server in servers::all().into_iter().filter(|server| server.name != "HTTP") {
        let name = server.name;
        let prefix = format!("{}/pull/model", server.root);
        let large = content(LARGE);
        for (key, bytes) in
            [("a.bin", &large[..]), ("sub/deep/b.txt", b"b"), ("empty", b""), ("sub/c d.json", b"{}")]
        {
            server.put(&format!("pull/model/{key}"), bytes);
        }
        server.put("pull/model-2/other", b"x");
        let to = tempfile::tempdir().unwrap();
        let to = to.path().join("made/on/the/way");
        let pulled =
            pull(&server.store, &format!("{prefix}/"), &to).unwrap_or_else(|error| panic!("{name}: {error}"));
        let expected = ["a.bin", "empty", "sub/c d.json", "sub/deep/b.txt"];
        assert_eq!(how(&pulled), expected.map(|path| (path, How::Pulled)), "{name}");
        assert_eq!(pulled.fetched_bytes, LARGE as u64 + 3, "{name}");
        assert!(
            fs::read(to.join("a.bin")).unwrap() == large
                && fs::read(to.join("sub/deep/b.txt")).unwrap() == b"b"
        );
        assert_eq!((files(&to).len(), parts(&to)), (4, 0), "{name}");
        // Again: nothing to do. One object is replaced by another of the same size, one file is written to: these two.
        let again = pull(&server.store, &prefix, &to).unwrap();
        assert_eq!(
            (how(&again), again.fetched_bytes),
            (expected.map(|path| (path, How::Kept)).to_vec(), 0),
            "{name}"
        );
        let planned = |url: &str, to: &Path| would(&server.store, url, to).into_iter().map(|(.., how)| how);
        assert!(planned(&prefix, &to).all(|how| how == How::Kept), "{name}");
        std::thread::sleep(Duration::from_millis(1100));
        server.put("pull/model/sub/deep/b.txt", b"B");
        fs::write(to.join("sub/c d.json"), b"[]").unwrap();
        let plan: Vec<_> = planned(&prefix, &to).collect();
        assert_eq!(plan, [How::Kept, How::Kept, How::Pulled, How::Pulled], "{name}");
        let third = pull(&server.store, &prefix, &to).unwrap();
        let kept: Vec<_> = third.files.iter().map(|file| file.how == How::Kept).collect();
        assert_eq!(kept, [true, true, false, false], "{name}");
        assert_eq!(fs::read(to.join("sub/deep/b.txt")).unwrap(), b"B");
        assert_eq!(fs::read(to.join("sub/c d.json")).unwrap(), b"{}");
    }
}

#[test]
fn every_store_s_half_of_a_file_is_known_for_what_it_is() {
    for server in servers::all().into_iter().filter(|server| server.name != "HTTP") {
        server.put("pull/half/a.bin", &content(LARGE));
        let prefix = format!("{}/pull/half", server.root);
        // A pull may be over before it can be stopped.
        let cut = (0..50).find_map(|_| {
            let to = tempfile::tempdir().unwrap();
            let items = find(&server.store, &prefix).unwrap();
            let mut pull = Pull::start(&server.store, items, to.path(), Some(1)).unwrap();
            while pull.progress().done_bytes < 1 << 20 {
                std::thread::sleep(Duration::from_millis(1));
            }
            pull.stop();
            (parts(to.path()) == 2).then_some(to)
        });
        let to = cut.unwrap();
        let expected = |how| [("a.bin".to_owned(), LARGE as u64, how)];
        assert_eq!(would(&server.store, &prefix, to.path()), expected(How::Resumed), "{}", server.name);
        let pulled = pull(&server.store, &prefix, to.path()).unwrap();
        assert_eq!(how(&pulled), [("a.bin", How::Resumed)], "{}", server.name);
        assert_eq!(would(&server.store, &prefix, to.path()), expected(How::Kept), "{}", server.name);
    }
}

#[test]
fn one_object_becomes_one_file() {
    for server in servers::all() {
        let url = server.put("pull-one/m.safetensors", &content(1000));
        let to = tempfile::tempdir().unwrap();
        let pulled = pull(&server.store, &url, to.path()).unwrap();
        assert_eq!(how(&pulled), [("m.safetensors", How::Pulled)]);
        assert!(files(to.path()) == [(to.path().join("m.safetensors"), content(1000))]);
        assert_eq!(pull(&server.store, &url, to.path()).unwrap().fetched_bytes, 0, "{}", server.name);
        let missing = url.replace("m.safetensors", "none");
        let error = pull(&server.store, &missing, to.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    }
}

#[test]
fn what_is_not_wanted_stays_where_it_is() {
    let server = servers::web();
    let url = server.put("pull-wanted/model.safetensors", b"m");
    server.put("pull-wanted/model.safetensors.index.json", br#"{"weight_map":{"a":"sub/x 1.safetensors"}}"#);
    server.put("pull-wanted/sub/x%201.safetensors", b"x");
    let base = url.trim_end_matches("/model.safetensors");
    let to = tempfile::tempdir().unwrap();
    // A server that cannot list: the checkpoint that is there, shards where its index has them.
    let pulled = pull_only(&server.store, base, to.path(), |path| path.ends_with("safetensors")).unwrap();
    assert_eq!(how(&pulled), [("sub/x 1.safetensors", How::Pulled)]);
    assert_eq!(files(to.path()), [(to.path().join("sub/x 1.safetensors"), b"x".to_vec())]);
}

#[test]
fn a_repository_is_pulled_at_one_commit() {
    let hub = Hub::start();
    let large = content(LARGE);
    hub.push(
        "models/org/model",
        1,
        &[("model.safetensors", &large), ("config.json", b"{}"), ("onnx/x.onnx", b"x")],
    );
    let endpoint = hub.server.url("");
    let home = tempfile::tempdir().unwrap();
    let variables = [("HF_ENDPOINT", &*endpoint), ("HF_HOME", home.path().to_str().unwrap())];
    let store = || RemoteStore::new(Environment::of(variables), policy());
    let to = tempfile::tempdir().unwrap();
    let pulled = pull(&store(), "hf://org/model", to.path()).unwrap();
    assert_eq!(pulled.files.len(), 3);
    assert!(fs::read(to.path().join("model.safetensors")).unwrap() == large);
    // Another commit with one file changed: the others are known by their digests.
    hub.push(
        "models/org/model",
        2,
        &[("model.safetensors", &large), ("config.json", b"[]"), ("onnx/x.onnx", b"x")],
    );
    let again = pull(&store(), "hf://org/model", to.path()).unwrap();
    let expected =
        [("config.json", How::Pulled), ("model.safetensors", How::Kept), ("onnx/x.onnx", How::Kept)];
    assert_eq!((how(&again), again.fetched_bytes), (expected.to_vec(), 2));
    let one = tempfile::tempdir().unwrap();
    let old = pull(&store(), &format!("hf://org/model@{}/config.json", commit(1)), one.path()).unwrap();
    assert_eq!(
        (how(&old), fs::read(one.path().join("config.json")).unwrap()),
        (vec![("config.json", How::Pulled)], b"{}".to_vec())
    );
    let error = pull(&store(), "hf://org/none", one.path()).unwrap_err();
    says(&error, &["RepoNotFound", "Check the name"]);
}

#[test]
fn a_hostile_listing_cannot_write_elsewhere() {
    let hub = Hub::start();
    let endpoint = hub.server.url("");
    let store =
        RemoteStore::new(Environment::of([("HF_ENDPOINT", &*endpoint), ("HF_HOME", "/nowhere")]), policy());
    for (number, path) in
        ["../evil", "a/../../evil", "/evil", "a//evil", "..", "a/./evil"].into_iter().enumerate()
    {
        hub.push("models/org/evil", 10 + number, &[("good", b"g"), (path, b"evil")]);
        let outer = tempfile::tempdir().unwrap();
        let error =
            pull(&store.clone().apart_from_pins(&endpoint), "hf://org/evil", &outer.path().join("to"))
                .unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Access | ErrorKind::NotFound), "{path}: {error}");
        assert_eq!(files(outer.path()), [], "{path}");
    }
}

trait Anew {
    fn apart_from_pins(&self, endpoint: &str) -> RemoteStore;
}

impl Anew for RemoteStore {
    /// A store that asks anew what a branch is.
    fn apart_from_pins(&self, endpoint: &str) -> RemoteStore {
        RemoteStore::new(Environment::of([("HF_ENDPOINT", endpoint), ("HF_HOME", "/nowhere")]), policy())
    }
}

#[test]
fn links_in_the_destination_are_not_followed() {
    let server = Server::start(Source::default());
    let url = server.put("/sub/m.bin", &content(100));
    let base = url.trim_end_matches("/sub/m.bin");
    let outer = tempfile::tempdir().unwrap();
    let (to, elsewhere) = (outer.path().join("to"), outer.path().join("elsewhere"));
    fs::create_dir_all(&to).unwrap();
    fs::create_dir_all(&elsewhere).unwrap();
    fs::write(elsewhere.join("target"), b"precious").unwrap();
    let store = web_store();
    let mut items = find(&store, &format!("{base}/sub/m.bin")).unwrap();
    items[0].path = "sub/m.bin".into();
    let begin = |to: &Path| end(&mut Pull::start(&store, items.clone(), to, None).unwrap());
    // A directory that is a link, a file that is a link, a link to nowhere, a directory where the file should be.
    let cases: [&dyn Fn(); 4] = [
        &|| std::os::unix::fs::symlink(&elsewhere, to.join("sub")).unwrap(),
        &|| {
            fs::create_dir(to.join("sub")).unwrap();
            std::os::unix::fs::symlink(elsewhere.join("target"), to.join("sub/m.bin")).unwrap();
        },
        &|| {
            fs::create_dir(to.join("sub")).unwrap();
            std::os::unix::fs::symlink(elsewhere.join("new"), to.join("sub/m.bin")).unwrap();
        },
        &|| fs::create_dir_all(to.join("sub/m.bin")).unwrap(),
    ];
    for prepare in cases {
        prepare();
        let error = begin(&to).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Access, "{error}");
        assert_eq!(files(&elsewhere), [(elsewhere.join("target"), b"precious".to_vec())]);
        let _ = fs::remove_file(to.join("sub")).or_else(|_| fs::remove_dir_all(to.join("sub")));
    }
    // The destination itself may be one.
    std::os::unix::fs::symlink(&elsewhere, outer.path().join("link")).unwrap();
    begin(&outer.path().join("link")).unwrap();
    assert!(fs::read(elsewhere.join("sub/m.bin")).unwrap() == content(100));
}

/// A server with a large object whose bytes after the first so many blocks never come, until told otherwise.
fn stuck(blocks: u64) -> (Server, String, Arc<AtomicBool>) {
    let server = Server::start(Source::default());
    let url = server.put("/m.bin", &content(LARGE));
    let free = Arc::new(AtomicBool::new(false));
    let freed = Arc::clone(&free);
    server.script(move |request, _| {
        let late = request.range().is_some_and(|(start, _)| start >= blocks * (8 << 20));
        if late && !freed.load(Ordering::SeqCst) { Act::StallAfter(0) } else { Act::Serve }
    });
    (server, url, free)
}

/// Pulls until so many bytes have come, then stops.
fn cut_off(store: &RemoteStore, url: &str, to: &Path, bytes: u64) {
    let mut pull = Pull::start(store, find(store, url).unwrap(), to, None).unwrap();
    let began = Instant::now();
    while pull.progress().done_bytes < bytes {
        assert!(pull.wait(Duration::from_millis(5)).unwrap().is_none());
        assert!(began.elapsed() < Duration::from_secs(30), "nothing comes");
    }
    let stopped = Instant::now();
    pull.stop();
    // Of a server that says nothing for ever.
    assert!(stopped.elapsed() < Duration::from_millis(1500), "{:?}", stopped.elapsed());
    assert_eq!(pull.wait(Duration::ZERO).unwrap_err().kind(), ErrorKind::Cancelled);
}

#[test]
fn a_pull_that_was_cut_off_goes_on_where_it_stopped() {
    let (server, url, free) = stuck(1);
    let (store, to) = (web_store(), tempfile::tempdir().unwrap());
    assert_eq!(would(&store, &url, to.path()), [("m.bin".to_owned(), LARGE as u64, How::Pulled)]);
    assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0, "a preview makes nothing");
    cut_off(&store, &url, to.path(), 8 << 20);
    assert_eq!(would(&store, &url, to.path()), [("m.bin".to_owned(), LARGE as u64, How::Resumed)]);
    // Half a file is not shown.
    assert_eq!(files(to.path()), []);
    assert_eq!(parts(to.path()), 2);
    free.store(true, Ordering::SeqCst);
    let pulled = pull(&store, &url, to.path()).unwrap();
    assert_eq!(would(&store, &url, to.path()), [("m.bin".to_owned(), LARGE as u64, How::Kept)]);
    assert_eq!(how(&pulled), [("m.bin", How::Resumed)]);
    assert_eq!(pulled.fetched_bytes, LARGE as u64 - (8 << 20));
    assert!(files(to.path()) == [(to.path().join("m.bin"), content(LARGE))]);
    assert_eq!(parts(to.path()), 0);
    drop(server);
}

#[test]
fn what_was_left_is_compared_before_it_is_taken() {
    let (_server, url, free) = stuck(2);
    let (store, to) = (web_store(), tempfile::tempdir().unwrap());
    cut_off(&store, &url, to.path(), 16 << 20);
    let mut part =
        fs::read_dir(to.path().join(".penstock/parts")).unwrap().flatten().map(|entry| entry.path());
    let part = part.find(|path| path.extension().is_none_or(|end| end != "map")).unwrap();
    // As after a power failure: the map says that a block is there, and the disk has something else.
    let file = fs::File::options().write(true).open(&part).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0; 4096], 1 << 20).unwrap();
    free.store(true, Ordering::SeqCst);
    let pulled = pull(&store, &url, to.path()).unwrap();
    // All but what was kept and is intact.
    assert_eq!(pulled.fetched_bytes, LARGE as u64 - (16 << 20) + (512 << 10));
    assert!(fs::read(to.path().join("m.bin")).unwrap() == content(LARGE));
}

#[test]
fn half_of_another_version_is_not_used() {
    let (server, url, free) = stuck(1);
    let (store, to) = (web_store(), tempfile::tempdir().unwrap());
    cut_off(&store, &url, to.path(), 8 << 20);
    let other: Vec<u8> = content(LARGE).iter().map(|byte| byte ^ 1).collect();
    server.put("/m.bin", &other);
    free.store(true, Ordering::SeqCst);
    assert_eq!(would(&store, &url, to.path()), [("m.bin".to_owned(), LARGE as u64, How::Pulled)]);
    let pulled = pull(&store, &url, to.path()).unwrap();
    assert_eq!((how(&pulled), pulled.fetched_bytes), (vec![("m.bin", How::Pulled)], LARGE as u64));
    assert!(fs::read(to.path().join("m.bin")).unwrap() == other);
}

#[test]
fn an_object_that_changes_meanwhile_is_an_error_and_no_file() {
    let server = Server::start(Source::default());
    let url = server.put("/m.bin", &content(LARGE));
    let (store, to) = (web_store(), tempfile::tempdir().unwrap());
    let objects = server.objects();
    server.script(move |_, number| {
        if number == 3 {
            objects
                .lock()
                .unwrap()
                .insert("/m.bin".into(), super::servers::http::Object::new(&content(LARGE)));
        }
        Act::Serve
    });
    let error = pull(&store, &url, to.path()).unwrap_err();
    assert_eq!((error.kind(), error.object_name()), (ErrorKind::Changed, Some(&*url)));
    assert_eq!(files(to.path()), []);
}

#[test]
fn faults_are_survived_and_those_that_stay_are_told() {
    let server = Server::start(Source::default());
    let url = server.put("/m.bin", &content(LARGE));
    let (store, to) = (web_store(), tempfile::tempdir().unwrap());
    let acts = [
        Act::Serve,
        Act::Serve,
        Act::ResetAtOnce,
        Act::CloseAfter(1 << 20),
        Act::Refuse(503, vec![], String::new()),
    ];
    server.script(move |_, number| acts.get(number).cloned().unwrap_or(Act::Serve));
    pull(&store, &url, to.path()).unwrap();
    assert!(fs::read(to.path().join("m.bin")).unwrap() == content(LARGE));
    server.script(|_, number| if number > 1 { Act::Refuse(403, vec![], "no".into()) } else { Act::Serve });
    let other = tempfile::tempdir().unwrap();
    let error: Error = pull(&store, &url, other.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Access);
    says(&error, &[&url, "403"]);
}

#[test]
fn a_stop_does_not_wait_for_a_server_that_is_being_opened() {
    let server = Server::start(Source::default());
    let url = server.put("/m.bin", b"x");
    let (store, to) = (web_store(), tempfile::tempdir().unwrap());
    let items = find(&store, &url).unwrap();
    server.script(|_, _| Act::StallAfter(0));
    let mut pull = Pull::start(&store, items, to.path(), None).unwrap();
    assert!(pull.wait(Duration::from_millis(200)).unwrap().is_none());
    let began = Instant::now();
    pull.stop();
    assert!(began.elapsed() < Duration::from_millis(1000), "{:?}", began.elapsed());
    // And the store goes on.
    server.script(|_, _| Act::Serve);
    assert_eq!(find(&store, &url).unwrap().len(), 1);
}

#[test]
fn two_pulls_to_one_directory_take_turns() {
    let server = Server::start(Source::default());
    let url = server.put("/m.bin", &content(LARGE));
    let to = tempfile::tempdir().unwrap();
    let pulled: Vec<_> = std::thread::scope(|scope| {
        let pulls: Vec<_> =
            (0..3).map(|_| scope.spawn(|| pull(&web_store(), &url, to.path()).unwrap())).collect();
        pulls.into_iter().map(|pull| pull.join().unwrap()).collect()
    });
    assert_eq!(pulled.iter().map(|pulled| pulled.fetched_bytes).sum::<u64>(), LARGE as u64);
    assert!(fs::read(to.path().join("m.bin")).unwrap() == content(LARGE));
}

#[test]
fn local_paths_are_not_pulled() {
    let error = pull(&web_store(), "/etc/hostname", Path::new("/nowhere")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    says(&error, &["only what is remote"]);
}

#[test]
fn a_file_as_the_destination_is_said_to_be_one() {
    let server = Server::start(Source::default());
    let url = server.put("/m.bin", b"x");
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "precious").unwrap();
    for to in [file.clone(), file.join("below/it")] {
        let error = pull(&web_store(), &url, &to).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Access, "{error}");
        says(&error, &["this is a file", file.to_str().unwrap()]);
    }
    assert_eq!(fs::read(&file).unwrap(), b"precious");
}

#[test]
fn a_file_written_to_with_its_time_put_back_is_pulled_again() {
    let server = Server::start(Source::default());
    let url = server.put("/m.bin", &content(LARGE));
    let to = tempfile::tempdir().unwrap();
    pull(&web_store(), &url, to.path()).unwrap();
    let path = to.path().join("m.bin");
    let before = fs::metadata(&path).unwrap().modified().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let file = fs::File::options().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0xEE; 10], 12 << 20).unwrap();
    file.set_modified(before).unwrap();
    let again = pull(&web_store(), &url, to.path()).unwrap();
    assert_eq!(how(&again), [("m.bin", How::Pulled)]);
    assert!(fs::read(&path).unwrap() == content(LARGE));
}

#[test]
fn a_file_whose_permissions_or_links_changed_is_kept() {
    let server = Server::start(Source::default());
    for len in [0, 10, LARGE] {
        let url = server.put(&format!("/m{len}.bin"), &content(len));
        let to = tempfile::tempdir().unwrap();
        pull(&web_store(), &url, to.path()).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let path = to.path().join(format!("m{len}.bin"));
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        fs::hard_link(&path, to.path().join("link")).unwrap();
        for _ in 0..2 {
            let again = pull(&web_store(), &url, to.path()).unwrap();
            assert_eq!((again.files[0].how, again.fetched_bytes), (How::Kept, 0), "{len}");
        }
    }
}

/// A pull over a link on which many bytes come a second, but few of each request.
#[test]
fn what_came_over_a_slow_link_is_kept() {
    let server = Server::start(Source::default());
    let url = server.put("/m.bin", &content(LARGE));
    let to = tempfile::tempdir().unwrap();
    // For each of 8 readers so little that a request of 8 MiB would take longer than this test waits.
    server.script(|_, _| Act::Drip(64 << 10, Duration::from_millis(200)));
    let store = web_store();
    let mut pulling = Pull::start(&store, find(&store, &url).unwrap(), to.path(), Some(8)).unwrap();
    let began = Instant::now();
    while pulling.progress().done_bytes < 6 << 20 {
        assert!(pulling.wait(Duration::from_millis(5)).unwrap().is_none());
        assert!(began.elapsed() < Duration::from_secs(20), "nothing is kept of what comes");
    }
    pulling.stop();
    server.script(|_, _| Act::Serve);
    let pulled = pull(&store, &url, to.path()).unwrap();
    assert_eq!(how(&pulled), [("m.bin", How::Resumed)]);
    assert!(pulled.fetched_bytes <= LARGE as u64 - (6 << 20), "{}", pulled.fetched_bytes);
    assert!(fs::read(to.path().join("m.bin")).unwrap() == content(LARGE));
}
