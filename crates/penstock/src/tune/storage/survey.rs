//! Where the bytes of a load are.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::Storage;
use crate::store::{is_remote, path_of};

/// The storage of a checkpoint's directories, each looked at once, when a load first reads from it.
#[derive(Debug, Default)]
pub struct Survey {
    known: Mutex<HashMap<PathBuf, Arc<Storage>>>,
}

impl Survey {
    /// The storage that holds most of the bytes of a load, given the location of each of its objects and how much is
    /// wanted of it. Says in the notes where the rest is.
    pub fn heaviest<'a>(&self, objects: impl IntoIterator<Item = (&'a str, u64)>) -> Arc<Storage> {
        let mut shares: Vec<(Arc<Storage>, u64)> = Vec::new();
        for (location, bytes) in objects {
            let storage = self.of_directory(location);
            match shares.iter_mut().find(|(other, _)| *other == storage) {
                Some((_, sum)) => *sum += bytes,
                None => shares.push((storage, bytes)),
            }
        }
        shares.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let total: u64 = shares.iter().map(|(_, bytes)| bytes).sum();
        let mut shares = shares.into_iter();
        let Some((heaviest, _)) = shares.next() else { return Arc::new(Storage::unknown()) };
        let elsewhere = |(storage, bytes): (Arc<Storage>, u64)| {
            let percent = (bytes as f64 * 100.0 / total as f64).round();
            format!("{percent:.0} % of the bytes lie on {}", storage.name)
        };
        let notes: Vec<_> = shares.filter(|(_, bytes)| *bytes > 0).map(elsewhere).collect();
        match notes.is_empty() {
            true => heaviest,
            false => Arc::new(Storage { mixed: true, notes, ..Storage::clone(&heaviest) }),
        }
    }

    /// The storage of the directory of an object, for which the first object of it stands; its links are followed.
    fn of_directory(&self, location: &str) -> Arc<Storage> {
        let directory = Path::new(location).parent().unwrap_or(Path::new(location));
        // The lock is never waited for: another thread's mount may hang, and a forked child may have inherited the lock of
        // a thread that it does not have. Looking twice is no harm.
        if let Ok(known) = self.known.try_lock()
            && let Some(storage) = known.get(directory)
        {
            return Arc::clone(storage);
        }
        let storage = Arc::new(match is_remote(location) {
            true => Storage::of_url(location),
            false => Storage::of(&path_of(location)),
        });
        if let Ok(mut known) = self.known.try_lock() {
            known.insert(directory.to_owned(), Arc::clone(&storage));
        }
        storage
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::StorageKind;

    /// Machine where /dev/shm is memory, and there is something else: the file system of the system's temporary files.
    fn two_storages() -> Option<(tempfile::TempDir, tempfile::TempDir)> {
        let memory = tempfile::tempdir_in("/dev/shm").ok()?;
        let other = tempfile::tempdir().ok()?;
        (Storage::of(memory.path()).name != Storage::of(other.path()).name).then_some((memory, other))
    }

    fn file(folder: &tempfile::TempDir, name: &str) -> String {
        let path = folder.path().join(name);
        std::fs::write(&path, "x").unwrap();
        path.display().to_string()
    }

    #[test]
    fn a_survey_does_not_wait_for_another_that_is_under_way() {
        let Some((memory, _other)) = two_storages() else { return };
        let in_memory = file(&memory, "a");
        let survey = Survey::default();
        let under_way = survey.known.lock().unwrap();
        assert_eq!(survey.heaviest([(&*in_memory, 1)]).kind, StorageKind::Memory);
        drop(under_way);
        assert_eq!(survey.heaviest([(&*in_memory, 1)]).kind, StorageKind::Memory);
    }

    #[test]
    fn the_storage_with_the_most_bytes_decides_and_the_others_are_noted() {
        let Some((memory, other)) = two_storages() else { return };
        let (in_memory, elsewhere) = (file(&memory, "a"), file(&other, "b"));
        let survey = Survey::default();
        let found = survey.heaviest([(in_memory.as_str(), 30), (elsewhere.as_str(), 70)]);
        assert_eq!(found.name, Storage::of(other.path()).name);
        assert!(found.notes.contains(&"30 % of the bytes lie on tmpfs".to_owned()), "{found:?}");
        // The same survey, another load of the same checkpoint.
        let found = survey.heaviest([(in_memory.as_str(), 30)]);
        assert_eq!((found.name.as_str(), found.notes.len()), ("tmpfs", 0));
    }

    #[test]
    fn links_are_followed_as_in_a_hugging_face_cache() {
        let Some((memory, other)) = two_storages() else { return };
        let (blob, link) = (file(&memory, "blob"), other.path().join("model.safetensors"));
        std::os::unix::fs::symlink(blob, &link).unwrap();
        assert_eq!(Survey::default().heaviest([(link.to_str().unwrap(), 1)]).name, "tmpfs");
    }

    #[test]
    fn of_urls_nobody_asks_the_file_system() {
        let found = Survey::default().heaviest([("S3://bucket/a/b", 1), ("s3://bucket/c", 2)]);
        assert_eq!((found.kind, found.name.as_str(), found.mixed), (StorageKind::Remote, "s3", false));
        assert!(found.is_network() && !Storage::unknown().is_network());
    }

    #[test]
    fn a_load_of_nothing_has_a_storage_too() {
        assert_eq!(*Survey::default().heaviest([]), Storage::unknown());
        assert_eq!(*Survey::default().heaviest([("/no/such/file", 1)]), Storage::unknown());
    }
}
