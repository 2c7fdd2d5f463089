//! A store over a directory for this module's tests, with nothing clever in it, and the writing of small files.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, Result};
use crate::memory::Window;
use crate::store::{Entry, Identity, LocalStore, Object, ReadContext, Store};

/// Opens and lists with `std::fs`; counts the reads.
#[derive(Default)]
pub(super) struct PlainStore {
    pub(super) reads: Arc<AtomicUsize>,
}

struct PlainObject {
    location: String,
    file: File,
    bytes: u64,
    reads: Arc<AtomicUsize>,
}

impl Store for PlainStore {
    fn open(&self, location: &str) -> Result<Arc<dyn Object>> {
        let fail = |error| Error::from_io("opening", &error).object(location);
        let file = File::open(location).map_err(fail)?;
        let bytes = file.metadata().map_err(fail)?.len();
        Ok(Arc::new(PlainObject { location: location.into(), file, bytes, reads: self.reads.clone() }))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        let fail = |error| Error::from_io("listing", &error).object(prefix);
        let mut entries = Vec::new();
        for entry in fs::read_dir(prefix).map_err(fail)? {
            let path = entry.map_err(fail)?.path();
            if path.is_file() {
                let bytes = fs::metadata(&path).map_err(fail)?.len();
                entries.push(Entry { location: path.to_str().unwrap().into(), bytes });
            }
        }
        entries.sort_by(|a, b| a.location.cmp(&b.location));
        Ok(entries)
    }

    fn directories(&self, prefix: &str) -> Vec<String> {
        LocalStore::default().directories(prefix)
    }
}

impl Object for PlainObject {
    fn location(&self) -> &str {
        &self.location
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn identity(&self) -> Identity {
        Identity(self.bytes.to_string())
    }

    fn read_into(&self, offset: u64, mut into: Window<'_>, _: &mut ReadContext) -> Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let mut bytes = vec![0; into.len()];
        self.file.read_exact_at(&mut bytes, offset).map_err(|error| Error::from_io("reading", &error))?;
        into.write(0, &bytes);
        Ok(())
    }

    fn read_to_staging(
        &self,
        range: Range<u64>,
        mut buffer: Window<'_>,
        cx: &mut ReadContext,
    ) -> Result<usize> {
        let length = usize::try_from(range.end - range.start).unwrap();
        self.read_into(range.start, buffer.part(0, length), cx).map(|()| 0)
    }

    fn verify_unchanged(&self) -> Result<()> {
        Ok(())
    }
}

/// A directory of a test's own, with the files a test needs.
pub(super) struct Files(tempfile::TempDir);

impl Files {
    pub(super) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// The path of `name` in the directory; of the directory itself for the empty name.
    pub(super) fn path(&self, name: &str) -> String {
        let root = self.0.path().to_str().unwrap();
        if name.is_empty() { root.into() } else { format!("{root}/{name}") }
    }

    pub(super) fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        fs::create_dir_all(Path::new(&path).parent().unwrap()).unwrap();
        fs::write(&path, contents).unwrap();
        path
    }

    /// A safetensors file of `U8` tensors, each of two bytes.
    pub(super) fn weights(&self, name: &str, tensors: &[&str]) -> String {
        self.write(name, weights(tensors, ""))
    }

    /// An index of `(tensor, file)`.
    pub(super) fn index(&self, name: &str, map: &[(&str, &str)]) -> String {
        let entries: Vec<_> = map.iter().map(|(tensor, file)| format!("{tensor:?}:{file:?}")).collect();
        self.write(
            name,
            format!(r#"{{"metadata":{{"total_size":1}},"weight_map":{{{}}}}}"#, entries.join(",")),
        )
    }
}

/// The bytes of a safetensors file of `U8` tensors of two bytes, after an entry of the header if one is given.
pub(super) fn weights(tensors: &[&str], first: &str) -> Vec<u8> {
    let mut entries: Vec<_> = tensors
        .iter()
        .enumerate()
        .map(|(i, name)| {
            format!(r#"{name:?}:{{"dtype":"U8","shape":[2],"data_offsets":[{},{}]}}"#, 2 * i, 2 * i + 2)
        })
        .collect();
    if !first.is_empty() {
        entries.insert(0, first.into());
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + 2 * tensors.len(), 7);
    file
}
