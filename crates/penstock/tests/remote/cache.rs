//! The disk cache: what it holds is used, and only that; what it cannot do costs time, never a load.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock::store::{
    CachePolicy, CachingStore, DiskCache, Environment, Object, RemoteStore, Store, flush_disk_caches,
};
use proptest::prelude::*;

use super::servers::http::{Act, Server, Source};
use super::servers::policy;
use super::{SIZE, content, read};

pub(super) const BLOCK: usize = 512 << 10;

/// One test at a time: the buffers on the way to disk are the process's, and what finds none free is not kept.
static ALONE: Mutex<()> = Mutex::new(());

pub(super) struct Cached {
    pub(super) server: Server,
    pub(super) directory: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Cached {
    pub(super) fn new() -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let (server, directory) = (Server::start(Source::default()), tempfile::tempdir().unwrap());
        Self { server, directory, _alone: alone }
    }

    /// A store as another process would make it.
    pub(super) fn store(&self) -> CachingStore {
        self.store_of(None)
    }

    pub(super) fn store_of(&self, bytes: Option<u64>) -> CachingStore {
        store_in(self.directory.path(), bytes)
    }

    /// Directories of entries.
    pub(super) fn entries(&self) -> Vec<PathBuf> {
        let all = fs::read_dir(self.directory.path().join("penstock-3")).map(|all| all.flatten().collect());
        let mut all: Vec<_> = all
            .unwrap_or_else(|_| Vec::new())
            .iter()
            .map(fs::DirEntry::path)
            .filter(|path| path.is_dir())
            .collect();
        all.sort();
        all
    }

    pub(super) fn is_complete(&self, path: &str) -> bool {
        let url = self.server.url(path);
        let identity = RemoteStore::new(Environment::default(), policy()).open(&url).unwrap().identity();
        self.store().file_of(&url, &identity).is_some()
    }

    /// Requests so far; counts anew from here.
    pub(super) fn requests(&self) -> usize {
        let requests = self.server.requests();
        self.server.script(|_, _| Act::Serve);
        requests
    }
}

pub(super) fn store_in(directory: &Path, bytes: Option<u64>) -> CachingStore {
    let cache = DiskCache { directory: directory.to_owned(), bytes };
    CachingStore::new(RemoteStore::new(Environment::default(), policy()), Some(cache), CachePolicy::Auto)
}

pub(super) fn flush() {
    assert!(flush_disk_caches(Duration::from_secs(60)));
}

/// Opens, reads all in blocks as a load does, and closes. Returns the remarks.
pub(super) fn load(store: &dyn Store, url: &str, expected: &[u8]) -> Vec<String> {
    let opened = store.open(url).unwrap();
    let object = store.reopen(url, &opened.identity()).unwrap();
    drop(opened);
    check(&*object, 0, expected);
    let notes = object.notes();
    drop(object);
    flush();
    notes
}

/// Reads from `from` on in pieces, and compares.
pub(super) fn check(object: &dyn Object, from: usize, expected: &[u8]) {
    for at in (from..expected.len()).step_by(1 << 20) {
        let len = (1 << 20).min(expected.len() - at);
        assert!(read(object, at, len).unwrap().0 == expected[at..at + len], "wrong bytes at {at}");
    }
}

#[test]
fn what_was_read_once_is_a_local_file_from_then_on() {
    let cached = Cached::new();
    let bytes = content(SIZE + 123);
    let url = cached.server.put("/m.safetensors", &bytes);
    let identity = cached.store().open(&url).unwrap().identity();
    assert_eq!(load(&cached.store(), &url, &bytes), Vec::<String>::new());
    assert!(cached.is_complete("/m.safetensors"));
    cached.requests();
    // Opened again by its version, no one is asked; opened by its name, only which version it is.
    let store = cached.store();
    let object = store.reopen(&url, &identity).unwrap();
    assert_eq!((object.location(), object.identity()), (&*url, identity.clone()));
    check(&*object, 0, &bytes);
    object.map().unwrap();
    object.verify_unchanged().unwrap();
    assert_eq!(cached.requests(), 0);
    check(&*store.open(&url).unwrap(), 0, &bytes);
    assert_eq!(cached.requests(), 1);
    assert_eq!(cached.entries().len(), 1);
}

#[test]
fn the_first_bytes_are_kept_when_an_object_is_opened() {
    let cached = Cached::new();
    let bytes = content(BLOCK + 100_000);
    let url = cached.server.put("/m", &bytes);
    let opened = cached.store().open(&url).unwrap();
    // A load reads no header again: its first read begins somewhere behind it.
    let object = cached.store().reopen(&url, &opened.identity()).unwrap();
    check(&*object, 5000, &bytes);
    drop((opened, object));
    flush();
    assert!(cached.is_complete("/m"));
}

#[test]
fn another_version_is_another_entry() {
    let cached = Cached::new();
    let (old, new) = (content(SIZE), content(SIZE + 1)[1..].to_vec());
    let url = cached.server.put("/m", &old);
    load(&cached.store(), &url, &old);
    cached.server.put("/m", &new);
    load(&cached.store(), &url, &new);
    assert_eq!(cached.entries().len(), 2);
    load(&cached.store(), &url, &new);
}

#[test]
fn gaps_are_filled_by_later_loads_and_by_other_readers() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    let (one, other) = (cached.store(), cached.store());
    let identity = one.open(&url).unwrap().identity();
    flush();
    // Two ranks at once, each with its half and some bytes of the other's.
    let (first, second) = (one.reopen(&url, &identity).unwrap(), other.reopen(&url, &identity).unwrap());
    let half = SIZE / 2 + 1000;
    assert!(read(&*first, 0, half).unwrap().0 == bytes[..half]);
    assert!(
        read(&*second, half - 3000, SIZE - half - BLOCK).unwrap().0
            == bytes[half - 3000..SIZE - 3000 - BLOCK]
    );
    drop((first, second));
    flush();
    assert!(!cached.is_complete("/m"));
    // What is there is not asked for again.
    cached.requests();
    let third = cached.store().reopen(&url, &identity).unwrap();
    let (all, cx) = read(&*third, 0, SIZE).unwrap();
    assert!(all == bytes);
    assert!(cx.network_bytes < 2 * BLOCK as u64, "{}", cx.network_bytes);
    drop(third);
    flush();
    assert!(cached.is_complete("/m"));
}

/// Leaves an entry of which all but the last block is there.
pub(super) fn partial(cached: &Cached, bytes: &[u8], url: &str) -> PathBuf {
    let store = cached.store();
    let opened = store.open(url).unwrap();
    let object = store.reopen(url, &opened.identity()).unwrap();
    let len = bytes.len() - BLOCK;
    assert!(read(&*object, 0, len).unwrap().0 == bytes[..len]);
    drop((opened, object));
    flush();
    assert_eq!(cached.entries().len(), 1);
    cached.entries().remove(0)
}

pub(super) fn overwrite(path: &Path, at: u64, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

#[test]
fn torn_and_foreign_entries_are_not_used() {
    let bytes = content(SIZE);
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 9] = [
        // As after a power failure: the map is there and the bytes are not.
        ("a block is zeros", |entry| overwrite(&entry.join("data"), BLOCK as u64, &[0; 4096])),
        ("one bit", |entry| overwrite(&entry.join("data"), 2 * BLOCK as u64 + 77, &[0x11])),
        ("the data is cut", |entry| {
            drop(File::options().write(true).open(entry.join("data")).unwrap().set_len(1000));
        }),
        ("the data is gone", |entry| fs::remove_file(entry.join("data")).unwrap()),
        ("the map is nonsense", |entry| fs::write(entry.join("map"), [7; 300]).unwrap()),
        ("the map is cut", |entry| {
            drop(File::options().write(true).open(entry.join("map")).unwrap().set_len(50));
        }),
        ("the map is gone", |entry| fs::remove_file(entry.join("map")).unwrap()),
        ("it claims to be complete", |entry| {
            fs::write(entry.join("complete"), "3145728 0.000000000\n").unwrap();
        }),
        ("the data is a link", |entry| {
            fs::rename(entry.join("data"), entry.join("elsewhere")).unwrap();
            std::os::unix::fs::symlink("elsewhere", entry.join("data")).unwrap();
        }),
    ];
    for complete in [false, true] {
        for (what, damage) in &damages {
            let cached = Cached::new();
            let url = cached.server.put("/m", &bytes);
            let entry = partial(&cached, &bytes, &url);
            if complete {
                load(&cached.store(), &url, &bytes);
                assert!(cached.is_complete("/m"));
            }
            // Timestamps are as fine as the kernel's clock ticks.
            std::thread::sleep(Duration::from_millis(20));
            damage(&entry);
            let notes = load(&cached.store(), &url, &bytes);
            assert_eq!(notes, Vec::<String>::new(), "{what}");
            load(&cached.store(), &url, &bytes);
            assert!(cached.is_complete("/m"), "{what}, complete: {complete}");
            assert!(fs::read(cached.entries()[0].join("data")).unwrap() == bytes, "{what}");
        }
    }
}

#[test]
fn an_entry_of_another_object_in_its_place_is_not_used() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    let entry = partial(&cached, &bytes, &url);
    let other = cached.server.put("/other", &content(SIZE + 5)[5..]);
    load(&cached.store(), &other, &content(SIZE + 5)[5..]);
    let theirs = cached.entries().into_iter().find(|path| *path != entry).unwrap();
    fs::remove_dir_all(&entry).unwrap();
    fs::rename(&theirs, &entry).unwrap();
    load(&cached.store(), &url, &bytes);
    assert!(cached.is_complete("/m"));
}

#[test]
fn those_used_longest_ago_go_first_and_none_that_is_in_use() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let urls: Vec<_> = (0..4).map(|n| cached.server.put(&format!("/m{n}"), &bytes)).collect();
    let most = 2 * SIZE as u64 + 1000;
    let bound = Some(most);
    let tick = || std::thread::sleep(Duration::from_millis(20));
    for url in &urls[..2] {
        load(&cached.store_of(bound), url, &bytes);
        tick();
    }
    // The first is used again, so the second goes.
    load(&cached.store_of(bound), &urls[0], &bytes);
    tick();
    load(&cached.store_of(bound), &urls[2], &bytes);
    let complete = |n: usize| cached.is_complete(&format!("/m{n}"));
    assert_eq!([complete(0), complete(1), complete(2)], [true, false, true]);
    assert_eq!(cached.entries().len(), 2);
    // What is open stays; where all is, the next is not kept, which is said.
    let store = cached.store_of(bound);
    let held: Vec<_> = [0, 2].map(|n| store.open(&urls[n]).unwrap()).into();
    let notes = load(&cached.store_of(bound), &urls[3], &bytes);
    assert!(notes.iter().any(|note| note.contains("in use")), "{notes:?}");
    check(&*held[0], 0, &bytes);
    check(&*held[1], 0, &bytes);
    drop(held);
    assert_eq!(load(&cached.store_of(bound), &urls[3], &bytes), Vec::<String>::new());
    assert!(complete(3));
    let all: u64 = cached.entries().iter().map(|entry| fs::metadata(entry.join("data")).unwrap().len()).sum();
    assert!(all <= most);
}

#[test]
fn what_cannot_be_kept_is_loaded_all_the_same_and_said() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    let notes = load(&cached.store_of(Some(1000)), &url, &bytes);
    assert!(notes[0].contains("the cache may have 1000"), "{notes:?}");
    let file = cached.directory.path().join("file");
    fs::write(&file, "").unwrap();
    let notes = load(&store_in(&file, None), &url, &bytes);
    assert!(notes[0].contains("cannot be written to"), "{notes:?}");
    // A server that does not say which version an object is.
    cached.server.objects().lock().unwrap().get_mut("/m").unwrap().e_tag = None;
    let notes = load(&cached.store(), &url, &bytes);
    assert!(notes[0].contains("no name"), "{notes:?}");
    assert_eq!(cached.entries(), Vec::<PathBuf>::new());
}

/// A file system of a few MiB, where this process may make one.
struct Small(PathBuf);

impl Small {
    fn mount(at: &Path) -> Option<Self> {
        let mount = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=2m", "tmpfs"])
            .arg(at)
            .output();
        mount.is_ok_and(|mount| mount.status.success()).then(|| Self(at.to_owned()))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        drop(std::process::Command::new("umount").arg(&self.0).output());
    }
}

#[test]
#[allow(clippy::print_stderr)]
fn a_full_disk_costs_no_load() {
    let cached = Cached::new();
    let Some(_small) = Small::mount(cached.directory.path()) else {
        eprintln!("SKIPPED: this process may not mount a small file system");
        return;
    };
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    let notes = load(&cached.store_of(Some(1 << 30)), &url, &bytes);
    assert!(notes[0].contains("full"), "{notes:?}");
    // It becomes full in the middle: room was there, and someone else took it.
    let (small, url) = (content(1_500_000), cached.server.put("/small", &content(1_500_000)));
    let store = cached.store_of(Some(1 << 30));
    let opened = store.open(&url).unwrap();
    fs::write(cached.directory.path().join("other"), vec![1; 400_000]).unwrap();
    check(&*opened, 0, &small);
    drop(opened);
    flush();
    load(&store, &url, &small);
}

#[test]
fn entries_left_half_removed_by_the_dead_are_cleared_away() {
    let cached = Cached::new();
    let root = cached.directory.path().join("penstock-3");
    for name in [".old-1-0", ".old-2-0"] {
        fs::create_dir_all(root.join(name)).unwrap();
        fs::write(root.join(name).join("data"), "x").unwrap();
    }
    // Someone else's, which is none of ours to remove.
    fs::create_dir_all(root.join("notes")).unwrap();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    load(&cached.store(), &url, &bytes);
    let names: Vec<_> = cached.entries().iter().map(|path| path.file_name().unwrap().to_owned()).collect();
    assert_eq!(names.len(), 2);
    assert!(names.contains(&"notes".into()));
}

#[test]
fn a_load_does_not_wait_for_the_disk_and_keeps_its_bound_of_memory() {
    // Many more bytes than there are buffers, as fast as they come: what does not fit is left out, and said.
    let cached = Cached::new();
    let bytes = content(24 << 20);
    let url = cached.server.put("/m", &bytes);
    let store = cached.store();
    let opened = store.open(&url).unwrap();
    std::thread::scope(|scope| {
        for part in 0..8 {
            let (opened, bytes) = (&opened, &bytes);
            scope.spawn(move || {
                let (begin, len) = (part * (3 << 20), 3 << 20);
                assert!(read(&**opened, begin, len).unwrap().0 == bytes[begin..begin + len]);
            });
        }
    });
    drop(opened);
    flush();
    load(&cached.store(), &url, &bytes);
    assert!(cached.is_complete("/m"));
}

#[test]
fn no_secret_is_written_to_disk() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes).replace("http://", "http://user:SENTINEL@")
        + "?X-Amz-Signature=SENTINEL";
    load(&cached.store(), &url, &bytes);
    for entry in cached.entries() {
        for file in ["map", "complete"] {
            let text = String::from_utf8_lossy(&fs::read(entry.join(file)).unwrap()).into_owned();
            assert!(!text.contains("SENTINEL"), "{text}");
        }
    }
    assert!(cached.entries().iter().any(|entry| entry.join("complete").exists()));
    // Without the user it may be another object.
    assert!(!cached.is_complete("/m"));
}

#[test]
fn faults_of_the_server_are_met_as_without_a_cache() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    let store = cached.store();
    let opened = store.open(&url).unwrap();
    cached.server.script(|_, n| if n == 0 { Act::ResetAfter(100_000) } else { Act::Serve });
    check(&*opened, 0, &bytes);
    drop(opened);
    flush();
    assert!(cached.is_complete("/m"));
    let other = cached.server.put("/n", &bytes);
    let opened = store.open(&other).unwrap();
    cached.server.script(|_, _| Act::Refuse(403, vec![], "no".into()));
    let error = read(&*opened, 0, SIZE).unwrap_err();
    assert_eq!(error.kind(), penstock::ErrorKind::Access);
    drop(opened);
    flush();
    cached.server.script(|_, _| Act::Serve);
    assert!(!cached.is_complete("/n"));
    load(&cached.store(), &other, &bytes);
}

/// What a store of another S3 endpoint opens; the server answers for buckets by path.
fn s3_store(directory: &Path, endpoint: &str) -> CachingStore {
    let environment = Environment::of([
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_SKIP_SIGNATURE", "true"),
        ("AWS_REGION", "us-east-1"),
    ]);
    let cache = DiskCache { directory: directory.to_owned(), bytes: None };
    CachingStore::new(RemoteStore::new(environment, policy()), Some(cache), CachePolicy::Auto)
}

#[test]
fn the_same_bucket_key_and_tag_at_another_endpoint_is_another_object() {
    let (dev, prod) = (Cached::new(), Server::start(Source::default()));
    let (ours, theirs) = (content(SIZE), content(SIZE + 1)[1..].to_vec());
    for (server, bytes) in [(&dev.server, &ours), (&prod, &theirs)] {
        server.put("/b/m", bytes);
        // As of a gateway that makes tags of times and sizes.
        server.objects().lock().unwrap().get_mut("/b/m").unwrap().e_tag = Some("\"size-time\"".into());
    }
    let directory = dev.directory.path();
    for _ in 0..2 {
        load(&s3_store(directory, &dev.server.url("")), "s3://b/m", &ours);
        load(&s3_store(directory, &prod.url("")), "s3://b/m", &theirs);
    }
    assert_eq!(dev.entries().len(), 2);
    assert!(dev.requests() > 0);
    load(&s3_store(directory, &dev.server.url("")), "s3://b/m", &ours);
    // Only which version it is.
    assert_eq!(dev.requests(), 1);
}

#[test]
fn a_query_that_names_an_object_tells_it_from_others_with_the_same_tag() {
    let cached = Cached::new();
    let urls = [1, 2].map(|id| (format!("/m?id={id}"), content(SIZE + id)[id..].to_vec()));
    for (path, bytes) in &urls {
        cached.server.put(path, bytes);
        cached.server.objects().lock().unwrap().get_mut(path).unwrap().e_tag = Some("\"t\"".into());
    }
    for _ in 0..2 {
        for (path, bytes) in &urls {
            load(&cached.store(), &cached.server.url(path), bytes);
        }
    }
}

#[test]
fn a_weak_tag_names_no_version() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    cached.server.objects().lock().unwrap().get_mut("/m").unwrap().e_tag = Some("W/\"t\"".into());
    let notes = load(&cached.store(), &url, &bytes);
    assert!(notes[0].contains("weak ETag"), "{notes:?}");
    assert_eq!(cached.entries(), Vec::<PathBuf>::new());
}

fn set_modified(path: &Path, time: std::time::SystemTime) {
    File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
}

#[test]
fn a_complete_entry_written_to_with_its_time_put_back_is_compared_again() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    load(&cached.store(), &url, &bytes);
    let data = cached.entries()[0].join("data");
    let before = fs::metadata(&data).unwrap().modified().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    overwrite(&data, 100, &[0xEE; 100]);
    set_modified(&data, before);
    assert_eq!(load(&cached.store(), &url, &bytes), Vec::<String>::new());
    assert!(cached.is_complete("/m"));
}

#[test]
fn a_complete_entry_whose_permissions_changed_is_compared_and_not_fetched() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    load(&cached.store(), &url, &bytes);
    std::thread::sleep(Duration::from_millis(20));
    let data = cached.entries()[0].join("data");
    fs::set_permissions(&data, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    assert!(!cached.is_complete("/m"));
    cached.requests();
    load(&cached.store(), &url, &bytes);
    // Only which version it is.
    assert_eq!(cached.requests(), 1);
    assert!(cached.is_complete("/m"));
}

#[test]
#[allow(clippy::print_stderr)]
fn entries_of_another_user_are_not_used() {
    if !rustix_is_root() {
        eprintln!("SKIPPED: this process may not give files away");
        return;
    }
    let chown = |path: &Path, user| std::os::unix::fs::chown(path, Some(user), None).unwrap();
    type Give = fn(&Path, &Path, &dyn Fn(&Path, u32));
    let cases: [(&str, Give); 6] = [
        ("the entry", |_, entry, chown| chown(entry, 1234)),
        ("the data", |_, entry, chown| chown(&entry.join("data"), 1234)),
        ("the map", |_, entry, chown| chown(&entry.join("map"), 1234)),
        ("the directory", |root, _, chown| chown(root, 1234)),
        ("the directory is a link", |root, _, _| {
            let elsewhere = root.with_extension("elsewhere");
            fs::rename(root, &elsewhere).unwrap();
            std::os::unix::fs::symlink(elsewhere, root).unwrap();
            std::os::unix::fs::lchown(root, Some(1234), None).unwrap();
        }),
        ("everyone's", |_, entry, _| {
            fs::set_permissions(entry, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        }),
    ];
    for (what, give) in cases {
        let cached = Cached::new();
        let bytes = content(SIZE);
        let url = cached.server.put("/m", &bytes);
        load(&cached.store(), &url, &bytes);
        let entry = cached.entries().remove(0);
        // Whoever owns it may have changed it, and made it look complete.
        overwrite(&entry.join("data"), 0, &[7; 4096]);
        let is = fs::metadata(entry.join("data")).unwrap();
        give(&cached.directory.path().join("penstock-3"), &entry, &chown);
        forge_complete(&entry);
        assert_eq!(is.len(), SIZE as u64);
        let notes = load(&cached.store(), &url, &bytes);
        let said = |word: &str| notes.iter().any(|note| note.contains(word));
        if what.starts_with("the directory") {
            assert!(said("belongs to user 1234") && !cached.is_complete("/m"), "{what}: {notes:?}");
        } else {
            // In a directory of this user's it is made anew.
            assert_eq!(notes, Vec::<String>::new(), "{what}");
            assert!(fs::read(cached.entries()[0].join("data")).unwrap() == bytes, "{what}");
        }
    }
}

fn rustix_is_root() -> bool {
    // As /proc has it.
    std::os::unix::fs::MetadataExt::uid(&fs::metadata("/proc/self").unwrap()) == 0
}

/// Says of an entry's data that it is complete as it is.
pub(super) fn forge_complete(entry: &Path) {
    use std::os::unix::fs::MetadataExt;
    let is = fs::metadata(entry.join("data")).unwrap();
    let said =
        format!("{} {}.{:09} {}.{:09}\n", is.len(), is.mtime(), is.mtime_nsec(), is.ctime(), is.ctime_nsec());
    fs::write(entry.join("complete"), said).unwrap();
}

#[test]
fn a_complete_entry_that_cannot_be_read_costs_no_load() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    load(&cached.store(), &url, &bytes);
    let store = cached.store();
    let opened = store.open(&url).unwrap();
    assert!(read(&*opened, 0, 1000).unwrap().0 == bytes[..1000]);
    // What a disk that fails and a file that is cut have in common: the bytes do not come.
    let data = cached.entries()[0].join("data");
    let before = fs::metadata(&data).unwrap().modified().unwrap();
    File::options().write(true).open(&data).unwrap().set_len(BLOCK as u64).unwrap();
    assert!(read(&*opened, 2 * BLOCK, 1000).unwrap().0 == bytes[2 * BLOCK..2 * BLOCK + 1000]);
    check(&*opened, 0, &bytes);
    assert!(opened.notes().iter().any(|note| note.contains("could not be read")), "{:?}", opened.notes());
    drop(opened);
    // And the entry heals.
    File::options().write(true).open(&data).unwrap().set_len(SIZE as u64).unwrap();
    set_modified(&data, before);
    load(&cached.store(), &url, &bytes);
    load(&cached.store(), &url, &bytes);
    assert!(cached.is_complete("/m"));
}

#[test]
fn a_block_that_was_compared_and_cannot_be_read_any_more_costs_no_load() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    let entry = partial(&cached, &bytes, &url);
    let store = cached.store();
    let object = store.open(&url).unwrap();
    let len = bytes.len() - BLOCK;
    check(&*object, 0, &bytes[..len]);
    File::options().write(true).open(entry.join("data")).unwrap().set_len(BLOCK as u64).unwrap();
    check(&*object, 0, &bytes[..len]);
    assert!(object.notes().iter().any(|note| note.contains("could not be read")), "{:?}", object.notes());
    drop(object);
    flush();
    load(&cached.store(), &url, &bytes);
    load(&cached.store(), &url, &bytes);
    assert!(cached.is_complete("/m"));
}

#[test]
fn an_entry_that_is_removed_during_a_load_is_no_failure() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    load(&cached.store(), &url, &bytes);
    let store = cached.store();
    let object = store.reopen(&url, &store.open(&url).unwrap().identity()).unwrap();
    check(&*object, 0, &bytes[..BLOCK]);
    fs::remove_dir_all(cached.directory.path().join("penstock-3")).unwrap();
    // And made anew by another process.
    load(&cached.store(), &url, &bytes);
    check(&*object, 0, &bytes);
    object.verify_unchanged().unwrap();
}

#[test]
fn a_process_that_holds_the_lock_for_ever_stops_no_load() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    let root = cached.directory.path().join("penstock-3");
    fs::create_dir_all(&root).unwrap();
    let lock = File::create(root.join("lock")).unwrap();
    lock.lock().unwrap();
    let store = cached.store();
    // As many as a large model has files: not each of them waits.
    let notes = super::soon(move || {
        let objects: Vec<_> = (0..100).map(|_| store.open(&url).unwrap()).collect();
        check(&*objects[99], 0, &bytes);
        objects[99].notes()
    });
    assert!(notes[0].contains("another process holds"), "{notes:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_reads_in_any_order_bring_the_right_bytes(
        reads in prop::collection::vec((0..SIZE, 0usize..900_000, any::<bool>()), 1..12),
    ) {
        let cached = Cached::new();
        let bytes = content(SIZE);
        let url = cached.server.put("/m", &bytes);
        let store = cached.store();
        let mut object: Arc<dyn Object> = store.open(&url).unwrap();
        let identity = object.identity();
        for (offset, len, again) in reads {
            let len = len.min(SIZE - offset);
            prop_assert!(read(&*object, offset, len).unwrap().0 == bytes[offset..offset + len]);
            if again {
                object = cached.store().reopen(&url, &identity).unwrap();
            }
        }
        drop(object);
        load(&cached.store(), &url, &bytes);
        prop_assert!(cached.is_complete("/m"));
    }
}
