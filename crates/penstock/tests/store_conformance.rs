//! What every store promises, checked on each: reads fill exactly what they were given with the object's bytes, at any
//! offset, length and address; errors name the object and the range; listings are complete; changes are noticed.
//!
//! A store joins by adding a row to `stores`.
#![allow(unsafe_code, clippy::unwrap_used, clippy::panic)]

use std::path::Path;
use std::sync::Arc;

use penstock::ErrorKind;
use penstock::memory::{Region, Window};
use penstock::store::{CachePolicy, Lane, LocalStore, Object, SLOT_SLACK, Store};
use proptest::prelude::*;

/// A store under test: how to put an object where it finds it, and its location there.
struct Place {
    name: &'static str,
    store: Arc<dyn Store>,
    directory: tempfile::TempDir,
}

impl Place {
    fn put(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn prefix(&self) -> String {
        self.directory.path().to_str().unwrap().to_owned()
    }
}

fn stores() -> Vec<Place> {
    let local = |name, cache, parent: &Path| Place {
        name,
        store: Arc::new(LocalStore::new(cache)),
        directory: tempfile::tempdir_in(parent).unwrap(),
    };
    let disk = std::env::temp_dir();
    let memory = Path::new("/dev/shm");
    let mut stores = vec![
        local("local, auto", CachePolicy::Auto, &disk),
        local("local, through the cache", CachePolicy::Use, &disk),
        local("local, direct", CachePolicy::Bypass, &disk),
        local("local, filling the cache", CachePolicy::Populate, &disk),
    ];
    if memory.is_dir() {
        stores.push(local("tmpfs, auto", CachePolicy::Auto, memory));
        stores.push(local("tmpfs, direct", CachePolicy::Bypass, memory));
    }
    stores
}

fn content(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

fn forget_pages(location: &str) {
    let file = std::fs::File::open(location).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// Reads to the middle of a larger buffer and checks that nothing around it was touched.
fn check_read(object: &dyn Object, bytes: &[u8], offset: usize, len: usize, shift: usize) {
    let mut region = Region::reserve(len + shift + 64).unwrap();
    let size = region.len();
    region.window().write(0, &vec![0xA5; size]);
    object.read_into(offset as u64, region.window().part(shift, len), &mut Lane::default()).unwrap();
    let window = region.window();
    // SAFETY: all of the region was written above.
    let after = unsafe { window.assume_filled(0, size) };
    assert!(after[shift..shift + len] == bytes[offset..offset + len], "{offset}..+{len} at {shift}");
    assert!(after[..shift].iter().chain(&after[shift + len..]).all(|byte| *byte == 0xA5), "written outside");
}

fn check_slot(object: &dyn Object, bytes: &[u8], offset: usize, len: usize) {
    let mut region = Region::reserve(len + SLOT_SLACK).unwrap();
    let range = offset as u64..(offset + len) as u64;
    let start = object.read_to_slot(range, region.window(), &mut Lane::default()).unwrap();
    let window = region.window();
    // SAFETY: the store says that it filled these bytes.
    let filled = unsafe { window.assume_filled(start, len) };
    assert!(filled == &bytes[offset..offset + len], "slot {offset}..+{len}");
}

#[test]
fn reads_at_the_edges_of_pages_and_of_the_object_are_exact() {
    for place in stores() {
        let bytes = content(3 * 4096 + 123);
        let location = place.put("object", &bytes);
        let object = place.store.open(&location).unwrap();
        assert_eq!(object.bytes(), bytes.len() as u64, "{}", place.name);
        for (offset, len) in [
            (0, bytes.len()),
            (0, 0),
            (bytes.len(), 0),
            (0, 1),
            (4095, 2),
            (4096, 4096),
            (4096, 8192 + 123),
            (1, 4095),
            (8191, 4097),
            (bytes.len() - 1, 1),
            (5000, 3000),
        ] {
            for shift in [0, 1, 8, 512, 4095, offset % 4096] {
                forget_pages(&location);
                check_read(object.as_ref(), &bytes, offset, len, shift);
            }
            check_slot(object.as_ref(), &bytes, offset, len);
        }
    }
}

#[test]
fn an_object_larger_than_any_buffer_inside_is_read_whole() {
    for place in stores() {
        let bytes = content((5 << 20) + 17);
        let location = place.put("large", &bytes);
        let object = place.store.open(&location).unwrap();
        forget_pages(&location);
        check_read(object.as_ref(), &bytes, 3, bytes.len() - 5, 1);
        check_read(object.as_ref(), &bytes, 0, bytes.len(), 0);
        check_slot(object.as_ref(), &bytes, 7, bytes.len() - 9);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn reads_anywhere_are_exact(offset in 0usize..40_000, len in 0usize..40_000, shift in 0usize..5000) {
        for place in stores() {
            let bytes = content(40_000);
            let object = place.store.open(&place.put("object", &bytes)).unwrap();
            let len = len.min(bytes.len() - offset);
            check_read(object.as_ref(), &bytes, offset, len, shift);
            check_slot(object.as_ref(), &bytes, offset, len);
        }
    }
}

#[test]
fn a_read_beyond_the_end_is_an_error_that_names_object_and_range() {
    for place in stores() {
        let location = place.put("short", &content(100));
        let object = place.store.open(&location).unwrap();
        let mut memory = [0; 64];
        let error = object.read_into(80, Window::from_slice(&mut memory), &mut Lane::default()).unwrap_err();
        assert_eq!(
            (error.object_name(), error.byte_range()),
            (Some(&*location), Some(80..144)),
            "{}",
            place.name
        );
    }
}

#[test]
fn an_object_that_ends_early_is_a_changed_one() {
    for place in stores() {
        let location = place.put("cut", &content(100_000));
        let object = place.store.open(&location).unwrap();
        std::fs::File::options().write(true).open(&location).unwrap().set_len(50_000).unwrap();
        let mut memory = vec![0; 80_000];
        let error = object.read_into(10, Window::from_slice(&mut memory), &mut Lane::default()).unwrap_err();
        assert_eq!(
            (error.kind(), error.object_name()),
            (ErrorKind::Changed, Some(&*location)),
            "{}",
            place.name
        );
        assert_eq!(object.verify_unchanged().unwrap_err().kind(), ErrorKind::Changed);
    }
}

#[test]
fn identity_tells_versions_apart_and_only_those() {
    for place in stores() {
        let location = place.put("object", &content(10));
        let one = place.store.open(&location).unwrap();
        assert_eq!(one.identity(), place.store.open(&location).unwrap().identity());
        one.verify_unchanged().unwrap();
        let other = place.put("other", &content(10));
        assert_ne!(one.identity(), place.store.open(&other).unwrap().identity());
        std::fs::rename(&other, &location).unwrap();
        assert_ne!(one.identity(), place.store.open(&location).unwrap().identity());
        assert_eq!(one.verify_unchanged().unwrap_err().kind(), ErrorKind::Changed, "{}", place.name);
    }
}

#[test]
fn what_is_not_there_is_not_found() {
    for place in stores() {
        for location in [format!("{}/none", place.prefix()), "nowhere://x".to_owned()] {
            let error = place.store.open(&location).map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound, "{}", place.name);
        }
        assert_eq!(
            place.store.list(&format!("{}/none", place.prefix())).unwrap_err().kind(),
            ErrorKind::NotFound
        );
    }
}

#[test]
fn a_listing_is_sorted_has_sizes_and_is_not_recursive() {
    for place in stores() {
        assert_eq!(place.store.list(&place.prefix()).unwrap(), []);
        let (b, a) = (place.put("b", &content(2)), place.put("a", &content(1)));
        std::fs::create_dir(place.directory.path().join("c")).unwrap();
        std::fs::write(place.directory.path().join("c/inside"), b"x").unwrap();
        let listed = place.store.list(&place.prefix()).unwrap();
        let listed: Vec<_> = listed.iter().map(|entry| (entry.location.as_str(), entry.bytes)).collect();
        assert_eq!(listed, [(a.as_str(), 1), (b.as_str(), 2)], "{}", place.name);
    }
}

#[test]
fn many_threads_read_one_object_at_once() {
    for place in stores() {
        let bytes = content(2 << 20);
        let object = place.store.open(&place.put("object", &bytes)).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (object, bytes) = (&object, &bytes);
                scope.spawn(move || {
                    for i in 0..20 {
                        check_read(object.as_ref(), bytes, thread * 1000 + i * 4096, 70_000, i);
                    }
                });
            }
        });
    }
}
