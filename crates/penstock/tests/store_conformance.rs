//! What every store promises, checked on each: reads fill exactly what they were given with the object's bytes, at any
//! offset, length and address; errors name the object and the range; listings are complete; changes are noticed.
//!
//! A store joins by adding a row to `stores`. Remote stores are real servers; one that cannot be had here says so and is
//! left out.
#![allow(unsafe_code, clippy::unwrap_used, clippy::panic)]

#[cfg(feature = "remote")]
mod servers;

use std::path::Path;
use std::sync::Arc;

use penstock::ErrorKind;
use penstock::memory::{Region, Window};
use penstock::store::{ALIGNMENT_PADDING, CachePolicy, LocalStore, Object, ReadContext, Store};
#[cfg(feature = "remote")]
use penstock::store::{CachingStore, DiskCache};
use proptest::prelude::*;

/// A store under test: how to put an object where it finds it, and its location there.
struct Place {
    name: &'static str,
    store: Arc<dyn Store>,
    prefix: String,
    holder: Holder,
}

enum Holder {
    Directory(tempfile::TempDir),
    /// A server, and a prefix of this place's own.
    #[cfg(feature = "remote")]
    Remote(&'static servers::Remote, String),
}

impl Place {
    fn put(&self, name: &str, bytes: &[u8]) -> String {
        match &self.holder {
            Holder::Directory(directory) => {
                let path = directory.path().join(name);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(&path, bytes).unwrap();
                path.to_str().unwrap().to_owned()
            }
            #[cfg(feature = "remote")]
            Holder::Remote(remote, prefix) => remote.put(&format!("{prefix}/{name}"), bytes),
        }
    }

    /// Puts another object in the place of one, as a whole.
    fn replace(&self, name: &str, bytes: &[u8]) {
        match &self.holder {
            Holder::Directory(_) => std::fs::rename(self.put("other", bytes), self.location(name)).unwrap(),
            #[cfg(feature = "remote")]
            Holder::Remote(..) => drop(self.put(name, bytes)),
        }
    }

    /// Makes an object end earlier.
    fn cut(&self, name: &str, bytes: &[u8]) {
        match &self.holder {
            Holder::Directory(_) => {
                let file = std::fs::File::options().write(true).open(self.location(name)).unwrap();
                file.set_len(bytes.len() as u64).unwrap();
            }
            #[cfg(feature = "remote")]
            Holder::Remote(..) => drop(self.put(name, bytes)),
        }
    }

    fn location(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix)
    }

    /// Whether objects are files: they have a page cache, empty directories, and no version that reads can ask for.
    fn is_local(&self) -> bool {
        matches!(self.holder, Holder::Directory(_))
    }

    /// Whether versions are kept that the server has no longer.
    fn keeps(&self) -> bool {
        self.name.ends_with("cached")
    }

    /// Whether prefixes can be listed.
    fn lists(&self) -> bool {
        !self.name.starts_with("HTTP")
    }

    fn forget_pages(&self, location: &str) {
        if self.is_local() {
            let file = std::fs::File::open(location).unwrap();
            file.sync_all().unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        }
    }
}

fn stores() -> Vec<Place> {
    let local = |name, cache, parent: &Path| {
        let directory = tempfile::tempdir_in(parent).unwrap();
        let prefix = directory.path().to_str().unwrap().to_owned();
        Place { name, store: Arc::new(LocalStore::new(cache)), prefix, holder: Holder::Directory(directory) }
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
    #[cfg(feature = "remote")]
    stores.extend(servers::all().into_iter().map(|remote| {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static PLACES: AtomicUsize = AtomicUsize::new(0);
        let own = format!("conformance/{}", PLACES.fetch_add(1, Ordering::Relaxed));
        let (store, prefix) = (Arc::new(remote.store.clone()), format!("{}/{own}", remote.root));
        Place { name: remote.name, store, prefix, holder: Holder::Remote(remote, own) }
    }));
    // The same behind a disk cache: what is read the first time comes from the server, later from disk, or from both.
    #[cfg(feature = "remote")]
    stores.extend(servers::all().into_iter().filter(|remote| remote.name != "Azure").map(|remote| {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static PLACES: AtomicUsize = AtomicUsize::new(0);
        static CACHE: std::sync::LazyLock<tempfile::TempDir> =
            std::sync::LazyLock::new(|| tempfile::tempdir().unwrap());
        let own = format!("cached/{}", PLACES.fetch_add(1, Ordering::Relaxed));
        let cache = DiskCache { directory: CACHE.path().to_owned(), bytes: Some(1 << 30) };
        let store = Arc::new(CachingStore::new(remote.store.clone(), Some(cache), CachePolicy::Auto));
        let prefix = format!("{}/{own}", remote.root);
        let name = match remote.name {
            "HTTP" => "HTTP, cached",
            "S3" => "S3, cached",
            _ => "GCS, cached",
        };
        Place { name, store, prefix, holder: Holder::Remote(remote, own) }
    }));
    stores
}

fn content(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

/// Reads to the middle of a larger buffer and checks that nothing around it was touched.
fn check_read(object: &dyn Object, bytes: &[u8], offset: usize, len: usize, shift: usize) {
    let mut region = Region::reserve(len + shift + 64).unwrap();
    let size = region.len();
    region.window().write(0, &vec![0xA5; size]);
    object.read_into(offset as u64, region.window().part(shift, len), &mut ReadContext::default()).unwrap();
    let window = region.window();
    // SAFETY: all of the region was written above.
    let after = unsafe { window.assume_filled(0, size) };
    assert!(after[shift..shift + len] == bytes[offset..offset + len], "{offset}..+{len} at {shift}");
    assert!(after[..shift].iter().chain(&after[shift + len..]).all(|byte| *byte == 0xA5), "written outside");
}

fn check_buffer(object: &dyn Object, bytes: &[u8], offset: usize, len: usize) {
    let mut region = Region::reserve(len + ALIGNMENT_PADDING).unwrap();
    let range = offset as u64..(offset + len) as u64;
    let start = object.read_to_staging(range, region.window(), &mut ReadContext::default()).unwrap();
    let window = region.window();
    // SAFETY: the store says that it filled these bytes.
    let filled = unsafe { window.assume_filled(start, len) };
    assert!(filled == &bytes[offset..offset + len], "buffer {offset}..+{len}");
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
                place.forget_pages(&location);
                check_read(object.as_ref(), &bytes, offset, len, shift);
            }
            check_buffer(object.as_ref(), &bytes, offset, len);
        }
    }
}

#[test]
fn an_object_larger_than_any_buffer_inside_is_read_whole() {
    for place in stores() {
        let bytes = content((5 << 20) + 17);
        let location = place.put("large", &bytes);
        let object = place.store.open(&location).unwrap();
        place.forget_pages(&location);
        check_read(object.as_ref(), &bytes, 3, bytes.len() - 5, 1);
        check_read(object.as_ref(), &bytes, 0, bytes.len(), 0);
        check_buffer(object.as_ref(), &bytes, 7, bytes.len() - 9);
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
            check_buffer(object.as_ref(), &bytes, offset, len);
        }
    }
}

#[test]
fn windows_far_from_each_other_get_their_bytes_and_nothing_else_is_touched() {
    for place in stores() {
        let bytes = content(2 << 20);
        let object = place.store.open(&place.put("object", &bytes)).unwrap();
        let spans = [(0, 1), (4095, 4098), (10_000, 0), (600_000, 700_001), (bytes.len() - 1, 1)];
        let mut memory: Vec<_> = spans.iter().map(|(_, len)| vec![0xA5; len + 64]).collect();
        let windows = spans.iter().zip(&mut memory);
        let mut into: Vec<_> = windows
            .map(|((offset, len), memory)| (*offset as u64, Window::from_slice(&mut memory[..*len])))
            .collect();
        object.read_scattered(&mut into, &mut ReadContext::default()).unwrap();
        for ((offset, len), memory) in spans.iter().zip(&memory) {
            assert!(memory[..*len] == bytes[*offset..offset + len], "{}: {offset}", place.name);
            assert!(memory[*len..].iter().all(|byte| *byte == 0xA5), "{}: {offset}", place.name);
        }
    }
}

#[test]
fn a_read_beyond_the_end_is_an_error_that_names_object_and_range() {
    for place in stores() {
        let location = place.put("short", &content(100));
        let object = place.store.open(&location).unwrap();
        let mut memory = [0; 64];
        let error =
            object.read_into(80, Window::from_slice(&mut memory), &mut ReadContext::default()).unwrap_err();
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
        let location = place.put("cut", &content(2_000_000));
        let object = place.store.open(&location).unwrap();
        place.cut("cut", &content(1_000_000));
        let mut memory = vec![0; 1_900_000];
        let error =
            object.read_into(10, Window::from_slice(&mut memory), &mut ReadContext::default()).unwrap_err();
        assert_eq!(
            (error.kind(), error.object_name()),
            (ErrorKind::Changed, Some(&*location)),
            "{}",
            place.name
        );
        if place.is_local() {
            assert_eq!(object.verify_unchanged().unwrap_err().kind(), ErrorKind::Changed);
        }
    }
}

#[test]
fn identity_tells_versions_apart_and_only_those() {
    for place in stores() {
        let location = place.put("object", &content(10));
        let one = place.store.open(&location).unwrap();
        assert_eq!(one.identity(), place.store.open(&location).unwrap().identity());
        one.verify_unchanged().unwrap();
        place.store.reopen(&location, &one.identity()).unwrap().verify_unchanged().unwrap();
        place.replace("object", &[7; 10]);
        assert_ne!(one.identity(), place.store.open(&location).unwrap().identity(), "{}", place.name);
        // A store whose reads name their version has nothing to verify afterwards: they fail.
        let read = one.read_into(0, Window::from_slice(&mut [0; 10]), &mut ReadContext::default());
        let mut bytes = [0; 10];
        let again = place.store.reopen(&location, &one.identity()).and_then(|again| {
            again.read_into(0, Window::from_slice(&mut bytes), &mut ReadContext::default())
        });
        if place.keeps() && again.is_ok() {
            assert_eq!(bytes, *content(10), "{}", place.name);
            continue;
        }
        let told = if place.is_local() { one.verify_unchanged() } else { again.clone() };
        assert_eq!(told.unwrap_err().kind(), ErrorKind::Changed, "{}", place.name);
        assert_eq!(again.unwrap_err().kind(), ErrorKind::Changed, "{}", place.name);
        // The first object may hold the bytes that opening it brought: they are of its version.
        read.unwrap();
    }
}

#[test]
fn what_is_not_there_is_not_found() {
    for place in stores() {
        for location in [place.location("none"), "nowhere://x".to_owned()] {
            let error = place.store.open(&location).map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound, "{}", place.name);
        }
        assert_eq!(place.store.list(&place.location("none")).unwrap_err().kind(), ErrorKind::NotFound);
    }
}

#[test]
fn a_listing_is_sorted_has_sizes_and_is_not_recursive() {
    for place in stores().into_iter().filter(Place::lists) {
        if place.is_local() {
            assert_eq!(place.store.list(&place.prefix).unwrap(), []);
        }
        let (b, a) = (place.put("b", &content(2)), place.put("a", &content(1)));
        place.put("c/inside", b"x");
        for prefix in [place.prefix.clone(), format!("{}/", place.prefix)] {
            let listed = place.store.list(&prefix).unwrap();
            let listed: Vec<_> =
                listed.iter().map(|entry| (entry.location.replace("//", "/"), entry.bytes)).collect();
            let expected = [(a.replace("//", "/"), 1), (b.replace("//", "/"), 2)];
            assert_eq!(listed, expected, "{}", place.name);
        }
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
