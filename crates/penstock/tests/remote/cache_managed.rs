//! What people do with a disk cache: see what is there, compare its bytes, remove some of it.

use std::fs;

use penstock::store::{CacheManager, Store};

use super::cache::{BLOCK, Cached, flush, load, overwrite};
use super::{SIZE, content, read};

#[test]
fn entries_are_told_with_their_locations_and_what_is_there_of_them() {
    let cached = Cached::new();
    let manager = CacheManager::new(cached.directory.path());
    assert_eq!(manager.entries(), []);
    let (whole, half) = (content(SIZE), content(4 * BLOCK + 5));
    let (whole_url, half_url) = (cached.server.put("/whole", &whole), cached.server.put("/half", &half));
    load(&cached.store(), &whole_url, &whole);
    let object = cached.store().open(&format!("{half_url}?sig=SECRET")).unwrap();
    read(&*object, 0, 2 * BLOCK).unwrap();
    drop(object);
    flush();
    fs::write(cached.directory.path().join("penstock-3/something"), "else").unwrap();
    let entries = manager.entries();
    let shown = |entry: &penstock::store::CacheEntry| {
        (entry.location.clone(), entry.bytes, entry.cached_bytes, entry.is_complete)
    };
    assert_eq!(entries.len(), 2);
    assert!(entries[0].location.starts_with(&half_url) && !entries[0].location.contains("SECRET"));
    assert_eq!((entries[0].bytes, entries[0].is_complete), (half.len() as u64, false));
    assert!(entries[0].cached_bytes >= 2 * BLOCK as u64 && entries[0].cached_bytes < half.len() as u64);
    assert_eq!(shown(&entries[1]), (whole_url, SIZE as u64, SIZE as u64, true));
}

#[test]
fn damaged_bytes_are_found_and_fetched_again() {
    let cached = Cached::new();
    let bytes = content(4 * BLOCK + 5);
    let url = cached.server.put("/m", &bytes);
    load(&cached.store(), &url, &bytes);
    let manager = CacheManager::new(cached.directory.path());
    let name = manager.entries()[0].name.clone();
    assert_eq!(manager.verify(&name).unwrap(), Some((bytes.len() as u64, 0)));
    assert!(cached.is_complete("/m"));
    overwrite(&cached.entries()[0].join("data"), BLOCK as u64 + 7, b"damaged");
    assert_eq!(manager.verify(&name).unwrap(), Some((bytes.len() as u64, BLOCK as u64)));
    assert_eq!(manager.entries()[0].cached_bytes, (bytes.len() - BLOCK) as u64);
    load(&cached.store(), &url, &bytes);
    assert_eq!(manager.verify(&name).unwrap(), Some((bytes.len() as u64, 0)));
    assert!(cached.is_complete("/m"));
}

#[test]
fn an_entry_goes_unless_it_is_in_use() {
    let cached = Cached::new();
    let bytes = content(BLOCK);
    let url = cached.server.put("/m", &bytes);
    load(&cached.store(), &url, &bytes);
    let manager = CacheManager::new(cached.directory.path());
    let name = manager.entries()[0].name.clone();
    let object = cached.store().open(&url).unwrap();
    assert!(!manager.remove(&name).unwrap(), "a load reads it");
    assert!(manager.prune(0).unwrap_err().to_string().contains("in use"));
    drop(object);
    flush();
    assert!(manager.remove(&name).unwrap());
    assert!(!manager.remove(&name).unwrap());
    assert_eq!(manager.verify(&name).unwrap(), None);
    assert_eq!(cached.entries().len(), 0);
}

#[test]
fn an_entry_whose_map_is_damaged_is_passed_over_until_a_load_makes_it_anew() {
    let cached = Cached::new();
    let bytes = content(2 * BLOCK);
    let url = cached.server.put("/m", &bytes);
    load(&cached.store(), &url, &bytes);
    let manager = CacheManager::new(cached.directory.path());
    let name = manager.entries()[0].name.clone();
    let map = cached.entries()[0].join("map");
    let intact = fs::read(&map).unwrap();
    // Magic, bytes of a block, bytes of the object, bytes of the label, the label.
    for (at, word) in [(8, 1_u64), (8, u64::MAX), (16, 1 << 40), (16, 0), (24, 0), (24, 8), (32, 0)] {
        fs::write(&map, &intact).unwrap();
        overwrite(&map, at, &word.to_le_bytes());
        assert_eq!(manager.entries(), [], "{word} at {at}");
        assert_eq!(manager.verify(&name).unwrap(), None, "{word} at {at}");
    }
    load(&cached.store(), &url, &bytes);
    assert_eq!(manager.verify(&name).unwrap(), Some((bytes.len() as u64, 0)));
}

#[test]
fn what_was_used_longest_ago_is_pruned_first() {
    let cached = Cached::new();
    let bytes = content(BLOCK);
    let urls = ["/a", "/b", "/c"].map(|path| cached.server.put(path, &bytes));
    urls.iter().for_each(|url| drop(load(&cached.store(), url, &bytes)));
    load(&cached.store(), &urls[0], &bytes);
    let manager = CacheManager::new(cached.directory.path());
    manager.prune(2 * BLOCK as u64).unwrap();
    let left: Vec<_> = manager.entries().into_iter().map(|entry| entry.location).collect();
    assert_eq!(left, [urls[0].clone(), urls[2].clone()]);
    manager.prune(0).unwrap();
    assert_eq!(manager.entries(), []);
}

#[test]
fn what_is_no_name_of_an_entry_leads_nowhere() {
    let outside = tempfile::tempdir().unwrap();
    let manager = CacheManager::new(&outside.path().join("cache"));
    manager.prune(0).unwrap();
    fs::create_dir_all(outside.path().join("cache/penstock-3")).unwrap();
    fs::write(outside.path().join("map"), "x").unwrap();
    for name in ["../..", "..", "", "/", "0123456789abcde/", "lock", "0123456789abcdef"] {
        assert!(!manager.remove(name).unwrap(), "{name}");
        assert_eq!(manager.verify(name).unwrap(), None, "{name}");
    }
    assert!(outside.path().join("map").exists());
}
