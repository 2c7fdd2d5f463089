//! All tensors of a checkpoint, from the headers of all its objects.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::source::{Source, resolve};
use super::{Header, ShardIndex, TensorInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::store::{Identity, Lane, Object, Store};

/// Headers read at once.
const THREADS: usize = 16;

/// One object of a checkpoint.
#[derive(Debug, Clone)]
pub struct ObjectInfo {
    /// Where it is.
    pub location: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Which version of it was read.
    pub identity: Identity,
    /// Where its data begins.
    pub data_start: u64,
    /// Its `__metadata__`, if it has any.
    pub metadata: Option<BTreeMap<String, String>>,
}

/// A checkpoint: what tensors there are, and where. Holds no file open.
pub struct Checkpoint {
    store: Arc<dyn Store>,
    objects: Vec<ObjectInfo>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<Arc<str>, usize>,
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Checkpoint")
            .field("objects", &self.objects)
            .field("tensors", &self.tensors.len())
            .finish()
    }
}

impl Checkpoint {
    /// Opens the checkpoint that `inputs` name, by reading all headers in parallel.
    ///
    /// # Errors
    /// `NotFound`, `Access`, `Storage` or `Format`; of several failures, the one of the first object.
    pub fn open(store: Arc<dyn Store>, inputs: &[String]) -> Result<Self> {
        let source = resolve(store.as_ref(), inputs)?;
        let headers = read_headers(store.as_ref(), &source)?;
        let mut objects = Vec::with_capacity(headers.len());
        let mut tensors: Vec<TensorInfo> = Vec::new();
        for (index, (object, header)) in headers.into_iter().enumerate() {
            let index = u32::try_from(index).unwrap_or(u32::MAX);
            tensors.extend(header.tensors.into_iter().map(|tensor| TensorInfo {
                name: tensor.name,
                dtype: tensor.dtype,
                shape: tensor.shape,
                object: index,
                range: tensor.range,
            }));
            objects.push(ObjectInfo {
                location: object.location().to_owned(),
                bytes: object.bytes(),
                identity: object.identity(),
                data_start: header.data_start,
                metadata: header.metadata,
            });
        }
        if let Some((location, index)) = &source.index {
            tensors.retain(|tensor| is_in(index, location, tensor, &objects));
        }
        let by_name = name_all(&tensors, &objects)?;
        if let Some((location, index)) = &source.index {
            all_there(index, location, &by_name)?;
        }
        Ok(Self { store, objects, tensors, by_name })
    }

    /// Where the objects live.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The objects, in the order given, or sorted.
    pub fn objects(&self) -> &[ObjectInfo] {
        &self.objects
    }

    /// The tensors, in the order of their bytes, object by object.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The position of the tensor `name` among [`Checkpoint::tensors`].
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// As [`Checkpoint::index_of`], for a tensor that must be there.
    ///
    /// # Errors
    /// `TensorNotFound`, suggesting the closest name.
    pub fn require_index(&self, name: &str) -> Result<usize> {
        self.index_of(name).ok_or_else(|| {
            let error = Error::new(
                ErrorKind::TensorNotFound,
                format!("the checkpoint has no tensor of this name (it has {})", self.tensors.len()),
            )
            .tensor(name);
            let error = match self.objects.as_slice() {
                [only] => error.object(&only.location),
                _ => error,
            };
            match self.closest(name) {
                Some(closest) => error.remedy(format!("Did you mean {closest:?}?")),
                None => error,
            }
        })
    }

    /// The tensor `name`.
    ///
    /// # Errors
    /// `TensorNotFound`, suggesting the closest name.
    pub fn require(&self, name: &str) -> Result<&TensorInfo> {
        self.require_index(name).map(|index| &self.tensors[index])
    }

    /// The `__metadata__` of all objects; where two disagree on a key, the first one's value.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        let mut merged = BTreeMap::new();
        for (key, value) in self.objects.iter().filter_map(|object| object.metadata.as_ref()).flatten() {
            merged.entry(key.clone()).or_insert_with(|| value.clone());
        }
        merged
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(TensorInfo::bytes).sum()
    }

    /// Opens an object for reading, if it is still the version whose header was read.
    ///
    /// # Errors
    /// `Changed` if it is not; otherwise what the store fails with.
    pub fn open_object(&self, index: usize) -> Result<Arc<dyn Object>> {
        let info = &self.objects[index];
        let object = self.store.open(&info.location)?;
        if object.identity() != info.identity {
            return Err(Error::new(
                ErrorKind::Changed,
                "the file was replaced or written to since its header was read",
            )
            .object(&info.location)
            .remedy("Open the checkpoint again"));
        }
        Ok(object)
    }

    /// The name that is likest to `name`, if any is at all alike.
    fn closest(&self, name: &str) -> Option<&str> {
        let likeness = |tensor: &TensorInfo| strsim::normalized_levenshtein(name, &tensor.name);
        // Comparing is quadratic in the names' length: not for the largest checkpoints.
        let candidates = self.tensors.iter().take(20_000).map(|tensor| (likeness(tensor), tensor));
        let best = candidates.max_by(|(a, _), (b, _)| a.total_cmp(b));
        best.filter(|(likeness, _)| *likeness > 0.6).map(|(_, tensor)| &*tensor.name)
    }
}

/// Reads the header of every object, several at once.
fn read_headers(store: &dyn Store, source: &Source) -> Result<Vec<(Arc<dyn Object>, Header)>> {
    type Read = Result<(Arc<dyn Object>, Header)>;
    let results: Vec<OnceLock<Read>> = source.locations.iter().map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut lane = Lane::default();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(location) = source.locations.get(index) else { break };
            let read = store.open(location).and_then(|object| {
                let header = Header::read(object.as_ref(), &mut lane)?;
                Ok((object, header))
            });
            // Each index is taken by one thread only.
            let _ = results[index].set(read);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..source.locations.len().min(THREADS) {
            // Too few threads are a slower opening, not a failed one: this thread reads on.
            if std::thread::Builder::new().name("penstock-header".into()).spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    let missing = || Error::new(ErrorKind::Storage, "a header was not read; this is a bug of Penstock");
    let read: Result<Vec<_>> =
        results.into_iter().map(|r| r.into_inner().unwrap_or_else(|| Err(missing()))).collect();
    read.map_err(|error| match &source.index {
        Some((location, _)) if error.kind() == ErrorKind::NotFound => {
            error.remedy(format!("The index {location} names this file: the download is incomplete"))
        }
        _ => error,
    })
}

/// Whether the index places the tensor where it was found: the index decides what belongs to the checkpoint.
fn is_in(index: &ShardIndex, location: &str, tensor: &TensorInfo, objects: &[ObjectInfo]) -> bool {
    let directory = location.rsplit_once('/').map_or("", |(directory, _)| directory);
    let found = objects[tensor.object as usize].location.strip_prefix(directory).unwrap_or_default();
    index.file_of(&tensor.name) == Some(found.trim_start_matches('/'))
}

fn name_all(tensors: &[TensorInfo], objects: &[ObjectInfo]) -> Result<HashMap<Arc<str>, usize>> {
    let mut by_name = HashMap::with_capacity(tensors.len());
    for (index, tensor) in tensors.iter().enumerate() {
        if let Some(first) = by_name.insert(Arc::clone(&tensor.name), index) {
            let first: &TensorInfo = &tensors[first];
            let cause = format!("the tensor is also in {}", objects[first.object as usize].location);
            return Err(Error::new(ErrorKind::Format, cause)
                .object(&objects[tensor.object as usize].location)
                .tensor(&*tensor.name)
                .remedy("Give the files of one checkpoint only, or its shard index"));
        }
    }
    Ok(by_name)
}

fn all_there(index: &ShardIndex, location: &str, by_name: &HashMap<Arc<str>, usize>) -> Result<()> {
    match index.entries().find(|(tensor, _)| !by_name.contains_key(*tensor)) {
        None => Ok(()),
        Some((tensor, file)) => Err(Error::new(
            ErrorKind::Format,
            format!("the index places the tensor in {file:?}, which does not hold it"),
        )
        .object(location)
        .tensor(tensor)
        .remedy("The files are of different versions: download the checkpoint again")),
    }
}
