//! One disk cache for several processes: what one of them does to an entry harms no other's load.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use penstock::store::{CacheManager, Store};
use proptest::prelude::*;

use super::cache::{BLOCK, Cached, check, flush, forge_complete, load, overwrite};
use super::servers::http::Act;
use super::{SIZE, content, read};

#[test]
fn who_is_done_with_an_entry_last_makes_it_complete() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    let slow = cached.store().open(&url).unwrap();
    check(&*slow, 0, &bytes[..BLOCK]);
    load(&cached.store(), &url, &bytes);
    // Whoever still fills it may write to it.
    assert!(!cached.is_complete("/m"));
    cached.requests();
    let other = cached.store().open(&url).unwrap();
    check(&*other, 0, &bytes);
    check(&*slow, BLOCK, &bytes);
    // Only which version it is.
    assert_eq!(cached.requests(), 1);
    drop(other);
    flush();
    assert!(!cached.is_complete("/m"));
    drop(slow);
    flush();
    assert!(cached.is_complete("/m"));
}

#[test]
fn what_two_processes_bring_at_once_is_written_once() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    let (one, other) = (cached.store().open(&url).unwrap(), cached.store().open(&url).unwrap());
    check(&*one, 0, &bytes);
    flush();
    let written = || fs::metadata(cached.entries()[0].join("data")).unwrap().modified().unwrap();
    let before = written();
    std::thread::sleep(Duration::from_millis(20));
    check(&*other, 0, &bytes);
    flush();
    assert_eq!(written(), before);
    drop((one, other));
    flush();
    assert!(cached.is_complete("/m"));
}

#[test]
fn closing_an_entry_that_is_not_whole_keeps_nobody_from_filling_it() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    let filling = cached.store().open(&url).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                drop(cached.store().open(&url).unwrap());
            }
        });
        check(&*filling, 0, &bytes);
        done.store(true, Ordering::Relaxed);
    });
    drop(filling);
    flush();
    assert!(cached.is_complete("/m"));
}

#[test]
fn looking_at_entries_keeps_nobody_from_completing_them() {
    let cached = Cached::new();
    let manager = CacheManager::new(cached.directory.path());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                manager.entries();
            }
        });
        let complete = (0..20).filter(|number| {
            let (path, bytes) = (format!("/{number}"), content(BLOCK));
            let url = cached.server.put(&path, &bytes);
            load(&cached.store(), &url, &bytes);
            cached.is_complete(&path)
        });
        let complete = complete.count();
        done.store(true, Ordering::Relaxed);
        assert_eq!(complete, 20);
    });
}

#[test]
fn what_is_written_to_an_entry_while_it_is_filled_is_found_before_it_is_complete() {
    for damage in [0, 1] {
        let cached = Cached::new();
        let bytes = content(SIZE);
        let url = cached.server.put("/m", &bytes);
        let filling = cached.store().open(&url).unwrap();
        check(&*filling, 0, &bytes[..3 * BLOCK]);
        flush();
        let data = cached.entries()[0].join("data");
        match damage {
            0 => overwrite(&data, BLOCK as u64 + 5, &[0xEE; 9]),
            // It is as long again when the rest has been written.
            _ => fs::File::options().write(true).open(&data).unwrap().set_len(0).unwrap(),
        }
        check(&*filling, 3 * BLOCK as u64 as usize, &bytes[3 * BLOCK..]);
        drop(filling);
        flush();
        assert!(!cached.is_complete("/m"));
        load(&cached.store(), &url, &bytes);
        flush();
        load(&cached.store(), &url, &bytes);
    }
}

#[test]
fn a_block_that_another_process_found_damaged_keeps_the_entry_from_being_complete() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    let first = cached.store().open(&url).unwrap();
    check(&*first, 0, &bytes);
    flush();
    overwrite(&cached.entries()[0].join("data"), 2 * BLOCK as u64 + 5, &[0xEE; 9]);
    // The other finds out, and cannot fetch it anew.
    let other = cached.store().open(&url).unwrap();
    cached.server.script(|_, _| Act::Refuse(403, vec![], "no".into()));
    read(&*other, 0, SIZE).unwrap_err();
    cached.server.script(|_, _| Act::Serve);
    drop((first, other));
    flush();
    assert!(!cached.is_complete("/m"));
    load(&cached.store(), &url, &bytes);
    assert!(cached.is_complete("/m"));
}

#[test]
fn a_mark_of_completeness_that_everyone_may_write_is_not_trusted() {
    let cached = Cached::new();
    let bytes = content(SIZE);
    let url = cached.server.put("/m", &bytes);
    load(&cached.store(), &url, &bytes);
    let mark = cached.entries()[0].join("complete");
    assert_eq!(fs::metadata(&mark).unwrap().permissions().mode() & 0o777, 0o600);
    overwrite(&cached.entries()[0].join("data"), 2 * BLOCK as u64, &[7; 4096]);
    forge_complete(&cached.entries()[0]);
    fs::set_permissions(&mark, fs::Permissions::from_mode(0o666)).unwrap();
    // Its blocks are compared, and it is made complete anew.
    assert_eq!(load(&cached.store(), &url, &bytes), Vec::<String>::new());
    assert!(fs::read(cached.entries()[0].join("data")).unwrap() == bytes);
    assert_eq!(fs::metadata(&mark).unwrap().permissions().mode() & 0o777, 0o600);
}

/// What one of several processes does next: read so many bytes from there on, or open the object anew.
#[derive(Debug, Clone)]
enum Step {
    Read(usize, usize),
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let step = prop_oneof![
        2 => (0..SIZE, 0usize..2_000_000).prop_map(|(at, len)| Step::Read(at, len)),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec((0..3usize, step), 1..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn processes_that_share_an_entry_in_any_order_read_the_right_bytes(steps in steps()) {
        let cached = Cached::new();
        let bytes = content(SIZE);
        let url = cached.server.put("/m", &bytes);
        let mut objects: Vec<_> = (0..3).map(|_| Some(cached.store().open(&url).unwrap())).collect();
        for (who, step) in steps {
            match step {
                Step::Read(at, len) => {
                    let len = len.min(SIZE - at);
                    let object = objects[who].as_ref().unwrap();
                    prop_assert!(read(&**object, at, len).unwrap().0 == bytes[at..at + len], "wrong bytes");
                    object.verify_unchanged().unwrap();
                }
                Step::Reopen => {
                    objects[who] = None;
                    objects[who] = Some(cached.store().open(&url).unwrap());
                }
            }
        }
        objects.iter().flatten().for_each(|object| object.verify_unchanged().unwrap());
        objects.clear();
        flush();
        load(&cached.store(), &url, &bytes);
        prop_assert!(cached.is_complete("/m"));
    }
}
