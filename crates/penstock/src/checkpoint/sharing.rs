//! What processes that load one checkpoint together have to know of it: that it is the same for all of them, and whether
//! its bytes are dear enough to be read once and handed on.
//!
//! Nothing is read and no server is asked. What cannot be told counts as dear.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::Checkpoint;

/// So many places of so many objects are looked at for what the page cache holds.
const OBJECTS: usize = 8;
const PLACES: u64 = 8;
const PLACE: u64 = 1 << 20;

impl Checkpoint {
    /// A number that is the same in all processes that opened the same versions of the same objects, and in no others.
    /// Where the objects are called what does not count.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for object in self.objects() {
            (object.bytes, &object.identity, object.data_start).hash(&mut hasher);
        }
        for tensor in self.tensors() {
            (&tensor.name, tensor.dtype.name(), &tensor.shape, tensor.object, &tensor.range)
                .hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Whether the page cache holds most of it, by a few looks.
    pub fn is_mostly_cached(&self) -> bool {
        self.cached_share(PLACES).is_some_and(|share| share > 0.5)
    }

    /// The share of it that the page cache holds, by so many looks at each of a few objects; nothing where the kernel does
    /// not say, or there is nothing to look at.
    pub fn cached_share(&self, places: u64) -> Option<f64> {
        let step = self.objects().len().div_ceil(OBJECTS).max(1);
        let (mut looks, mut cached) = (0_u32, 0_u32);
        for index in (0..self.objects().len()).step_by(step) {
            let object = self.open_object(index).ok()?;
            for place in 0..places {
                let start = object.bytes() / places * place;
                let range = start..(start + PLACE).min(object.bytes());
                if range.is_empty() {
                    continue;
                }
                looks += 1;
                cached += u32::from(object.is_cached(&range)?);
            }
        }
        (looks > 0).then(|| f64::from(cached) / f64::from(looks))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::testing::Files;
    use super::*;
    use crate::store::LocalStore;

    fn open(path: &str) -> Checkpoint {
        Checkpoint::open(Arc::new(LocalStore::default()), &[path.to_owned()]).unwrap()
    }

    #[test]
    fn the_fingerprint_is_of_the_version_and_not_of_the_opening() {
        let files = Files::new();
        let one = files.weights("a.safetensors", &["x", "y"]);
        let other = files.weights("b.safetensors", &["x", "z"]);
        assert_eq!(open(&one).fingerprint(), open(&one).fingerprint());
        assert_ne!(open(&one).fingerprint(), open(&other).fingerprint());
        let before = open(&one).fingerprint();
        files.weights("c.safetensors", &["x", "y"]);
        std::fs::rename(files.path("c.safetensors"), &one).unwrap();
        assert_ne!(open(&one).fingerprint(), before, "another file of the same contents");
    }

    #[test]
    fn what_was_just_written_is_in_the_page_cache_or_nobody_knows() {
        let files = Files::new();
        let path = files.weights("a.safetensors", &["x", "y"]);
        let checkpoint = open(&path);
        let known = checkpoint.open_object(0).unwrap().is_cached(&(0..1)).is_some();
        assert_eq!(checkpoint.is_mostly_cached(), known);
    }

    #[test]
    fn what_cannot_be_opened_is_not_called_cached() {
        let files = Files::new();
        let path = files.weights("a.safetensors", &["x"]);
        let checkpoint = open(&path);
        std::fs::remove_file(&path).unwrap();
        assert!(!checkpoint.is_mostly_cached());
    }
}
