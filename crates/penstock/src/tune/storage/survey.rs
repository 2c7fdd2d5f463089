//! Where the bytes of a load are.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, TryLockError};

use super::{Storage, System};
use crate::store::{is_remote, path_of};

/// The storage of a checkpoint's directories, each looked at once, when a load first reads from it.
#[derive(Debug, Default)]
pub struct Survey {
    system: System,
    known: Mutex<HashMap<PathBuf, Arc<Storage>>>,
}

impl Survey {
    /// A survey of a machine whose kernel answers as `system` says.
    pub fn of(system: System) -> Self {
        Self { system, known: Mutex::default() }
    }

    /// The storage that holds most of the bytes of a load, given the location of each of its objects and how much is
    /// wanted of it. The largest object of a directory stands for the directory; its links are followed. Says in the
    /// notes where the rest is.
    pub fn heaviest<'a>(&self, objects: impl IntoIterator<Item = (&'a str, u64)>) -> Arc<Storage> {
        let mut directories: HashMap<&Path, (&Path, u64, u64)> = HashMap::new();
        for (location, bytes) in objects {
            let object = Path::new(location);
            let directory = object.parent().unwrap_or(object);
            let (largest, its_bytes, all) = directories.entry(directory).or_insert((object, bytes, 0));
            if bytes > *its_bytes {
                (*largest, *its_bytes) = (object, bytes);
            }
            *all += bytes;
        }
        let storages = self.look(directories.iter().map(|(directory, (object, ..))| (*directory, *object)));
        let mut shares: Vec<(Arc<Storage>, u64)> = Vec::new();
        for (storage, (_, _, bytes)) in storages.into_iter().zip(directories.values()) {
            match shares.iter_mut().find(|(other, _)| *other == storage) {
                Some((_, sum)) => *sum += bytes,
                None => shares.push((storage, *bytes)),
            }
        }
        // By name where bytes are equal, so that the same load has the same settings.
        shares.sort_by(|(a, a_bytes), (b, b_bytes)| b_bytes.cmp(a_bytes).then_with(|| a.name.cmp(&b.name)));
        let total: u64 = shares.iter().map(|(_, bytes)| bytes).sum();
        let mut shares = shares.into_iter();
        let Some((heaviest, _)) = shares.next() else { return Arc::new(Storage::unknown()) };
        let mut notes: Vec<_> = Vec::new();
        for (storage, bytes) in shares.filter(|(_, bytes)| *bytes > 0) {
            let percent = (bytes as f64 * 100.0 / total as f64).round();
            notes.push(format!("{percent:.0} % of the bytes lie on {}", storage.name));
            notes.extend(storage.notes.iter().cloned());
        }
        if notes.is_empty() {
            return heaviest;
        }
        let mut heaviest = Storage { mixed: true, ..Storage::clone(&heaviest) };
        for note in notes {
            if !heaviest.notes.contains(&note) {
                heaviest.notes.push(note);
            }
        }
        Arc::new(heaviest)
    }

    /// The storage of each directory, by a file in it. The mount table is read once, and only if it is needed.
    fn look<'a>(&self, files: impl Iterator<Item = (&'a Path, &'a Path)>) -> Vec<Arc<Storage>> {
        // Never waited for: another thread's mount may hang, and a forked child may have inherited the lock of a thread
        // that it does not have. Looking twice is no harm.
        let known = || match self.known.try_lock() {
            Ok(known) => Some(known),
            Err(TryLockError::Poisoned(known)) => Some(known.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        let mut mounts = None;
        files
            .map(|(directory, file)| {
                if let Some(storage) = known().and_then(|known| known.get(directory).cloned()) {
                    return storage;
                }
                let storage = Arc::new(match file.to_str().filter(|location| is_remote(location)) {
                    Some(url) => Storage::of_url(url),
                    None => {
                        self.system.look(&file_at(file), mounts.get_or_insert_with(|| self.system.mounts()))
                    }
                });
                if let Some(mut known) = known() {
                    known.insert(directory.to_owned(), Arc::clone(&storage));
                }
                storage
            })
            .collect()
    }
}

/// The file that a path of a location's text names.
fn file_at(location: &Path) -> Cow<'_, Path> {
    location.to_str().map_or(Cow::Borrowed(location), path_of)
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
