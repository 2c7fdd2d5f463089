//! The catalogue of a checkpoint.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::sync::Arc;

use penstock::checkpoint::{Verification, is_nearly_url};
use penstock::manifest::Verify;
use penstock::pipeline;
use penstock::plan::{Plan, Selection};
use penstock::store::{
    CachePolicy, DiskCache, Router, Store, is_doubtful_path, is_remote, location_of, path_of,
};
use penstock::tune::{Settings, Storage, StorageKind, Survey};
use penstock::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::config::LoadOptions;
use crate::environment::{Options, environment};
use crate::errors::{Failure, Outcome};
use crate::paths::{LocationArgument, to_python};
use crate::prefetch::Prefetch;
use crate::session::{Mapped, Session};
use crate::signals::interruptibly;
use crate::signed::{SignedTree, signed_of};

/// How an object is reached: provider, endpoint, region, and where the credentials come from.
type Reached = (&'static str, String, Option<String>, String);

/// What the header says of one tensor.
#[pyclass(frozen, module = "penstock._native")]
#[derive(Debug)]
pub struct TensorInfo {
    checkpoint: Arc<penstock::checkpoint::Checkpoint>,
    index: usize,
}

impl TensorInfo {
    fn info(&self) -> &penstock::checkpoint::TensorInfo {
        &self.checkpoint.tensors()[self.index]
    }
}

#[pymethods]
impl TensorInfo {
    /// Its name.
    #[getter]
    fn name(&self) -> &str {
        &self.info().name
    }

    /// Its dtype, as the header spells it: "BF16".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.info().dtype.name()
    }

    /// Its shape.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.info().shape)
    }

    /// Its bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.info().bytes()
    }

    /// The path or URL of the object that holds it.
    #[getter]
    fn location(&self) -> OsString {
        to_python(&self.checkpoint.objects()[self.info().object as usize].location)
    }

    /// Its first byte in the object, and the one after its last.
    #[getter]
    fn byte_range(&self) -> (u64, u64) {
        (self.info().range.start, self.info().range.end)
    }

    fn __repr__(&self) -> String {
        let info = self.info();
        format!("TensorInfo({:?}, {}, {:?})", info.name, info.dtype.name(), info.shape)
    }
}

/// A checkpoint: its tensors, where they are, and the way to load them.
#[pyclass(frozen, module = "penstock._native")]
pub struct Checkpoint {
    inner: Arc<penstock::checkpoint::Checkpoint>,
    survey: Survey,
    router: Router,
    disk_cache: Option<DiskCache>,
}

impl Checkpoint {
    /// What `open` makes of these locations in the stores that they are in.
    fn made(
        py: Python<'_>,
        locations: Vec<String>,
        config: &LoadOptions,
        storage_options: Option<Options>,
        signed: Option<Vec<SignedTree>>,
        open: impl FnOnce(
            Arc<dyn Store>,
            &[String],
            Verification,
        ) -> penstock::Result<penstock::checkpoint::Checkpoint>
        + Send,
    ) -> PyResult<Self> {
        let router = config.router(environment(&locations, storage_options)?);
        let store = Arc::new(router.clone());
        let locations = absolute(locations);
        let signed = signed.map(signed_of).transpose()?.map(Arc::new);
        let verification =
            Verification { verify: config.inner.verify.unwrap_or_default(), signed: signed.clone() };
        let open = || open(Arc::clone(&store) as _, &locations, verification);
        // What is signed may be read whole.
        let inner = match signed.is_some() || locations.iter().any(|location| is_remote(location)) {
            true => interruptibly(py, open, || {
                store.interrupt();
                signed.iter().for_each(|signed| signed.cancel());
            })?,
            false => py.detach(open).map_err(Failure)?,
        };
        Ok(Self {
            inner: Arc::new(inner),
            survey: Survey::default(),
            router,
            disk_cache: config.disk_cache(),
        })
    }

    /// Indices of the named tensors, or of all.
    fn select(&self, names: Option<&[String]>) -> Outcome<Vec<usize>> {
        let Some(names) = names else { return Ok((0..self.inner.tensors().len()).collect()) };
        let mut seen = vec![false; self.inner.tensors().len()];
        let mut indices = Vec::with_capacity(names.len());
        for name in names {
            let index = self.inner.require_index(name)?;
            // A name given twice is still one tensor.
            if !std::mem::replace(&mut seen[index], true) {
                indices.push(index);
            }
        }
        Ok(indices)
    }

    /// The checkpoint as a load with these settings reads it: through another disk cache than it was opened with, and
    /// verified or not, if they say so.
    fn for_load(&self, config: &LoadOptions) -> Outcome<Arc<penstock::checkpoint::Checkpoint>> {
        let verify = config.inner.verify.unwrap_or_default();
        let inner = match verify {
            Verify::Auto => Arc::clone(&self.inner),
            Verify::Require | Verify::Off => Arc::new(self.inner.verified(verify)?),
        };
        if config.disk_cache() == self.disk_cache {
            return Ok(inner);
        }
        let policy = config.inner.cache.unwrap_or_default();
        Ok(Arc::new(inner.in_store(Arc::new(self.router.cached_in(policy, config.disk_cache())))))
    }

    /// What most of these bytes lie on; each number belongs to an object.
    fn storage_of(
        &self,
        checkpoint: &penstock::checkpoint::Checkpoint,
        wanted: impl Iterator<Item = (u32, u64)>,
    ) -> Arc<Storage> {
        let mut bytes = vec![0; checkpoint.objects().len()];
        wanted.for_each(|(object, wanted)| bytes[object as usize] += wanted);
        let wanted = bytes.into_iter().enumerate().filter(|(_, bytes)| *bytes > 0);
        let places: Vec<_> = wanted.map(|(object, bytes)| (checkpoint.local_path(object), bytes)).collect();
        self.survey.heaviest(places.iter().map(|(place, bytes)| (&**place, *bytes)))
    }
}

#[pymethods]
impl Checkpoint {
    /// Opens the checkpoint that `inputs` name: reads headers only, all of them in parallel.
    ///
    /// The environment is copied here, with the GIL held, and serves the checkpoint's loads too. Looks for signals while it
    /// waits for a server, so Ctrl-C raises KeyboardInterrupt from here. With `signed`, all that is opened has to be what
    /// that says.
    #[new]
    #[pyo3(signature = (inputs, config, storage_options=None, signed=None))]
    fn new(
        py: Python<'_>,
        inputs: Vec<LocationArgument>,
        config: &LoadOptions,
        storage_options: Option<Options>,
        signed: Option<Vec<SignedTree>>,
    ) -> PyResult<Self> {
        let inputs = inputs.into_iter().map(|LocationArgument(input)| input).collect();
        Self::made(py, inputs, config, storage_options, signed, |store, inputs, verification| {
            penstock::checkpoint::Checkpoint::open_verified(store, inputs, verification)
        })
    }

    /// A catalogue of byte ranges (first, end) of any objects, each a tensor of bytes called "object:range" by their
    /// numbers. Headers are not read.
    #[staticmethod]
    #[pyo3(signature = (ranges, config, storage_options=None, signed=None))]
    fn of_ranges(
        py: Python<'_>,
        ranges: Vec<(LocationArgument, Vec<(u64, u64)>)>,
        config: &LoadOptions,
        storage_options: Option<Options>,
        signed: Option<Vec<SignedTree>>,
    ) -> PyResult<Self> {
        let span = |(start, end): (u64, u64)| start..end;
        let (locations, ranges): (Vec<_>, Vec<Vec<_>>) = ranges
            .into_iter()
            .map(|(location, ranges)| (location.0, ranges.into_iter().map(span).collect()))
            .unzip();
        Self::made(py, locations, config, storage_options, signed, |store, locations, verification| {
            let wanted: Vec<_> = locations.iter().cloned().zip(ranges).collect();
            penstock::checkpoint::Checkpoint::of_ranges(store, &wanted, verification)
        })
    }

    /// The same catalogue, of which each tensor is its bytes one after the other.
    fn as_bytes(&self) -> Self {
        let (router, disk_cache) = (self.router.clone(), self.disk_cache.clone());
        Self { inner: Arc::new(self.inner.as_bytes()), survey: Survey::default(), router, disk_cache }
    }

    /// Names of all tensors, sorted.
    fn keys(&self) -> Vec<&str> {
        let mut keys = self.offset_keys();
        keys.sort_unstable();
        keys
    }

    /// Names of all tensors, in the order of their bytes.
    fn offset_keys(&self) -> Vec<&str> {
        self.inner.tensors().iter().map(|tensor| &*tensor.name).collect()
    }

    /// The `__metadata__` of the objects; where two objects disagree on a key, the first one's value.
    fn metadata(&self) -> BTreeMap<String, String> {
        self.inner.metadata().clone()
    }

    /// Whether any object has `__metadata__`.
    #[getter]
    fn has_metadata(&self) -> bool {
        !self.inner.metadata().is_empty()
    }

    /// (location, bytes) of every object.
    #[getter]
    fn files(&self) -> Vec<(OsString, u64)> {
        self.inner.objects().iter().map(|object| (to_python(&object.location), object.bytes)).collect()
    }

    /// Bytes of all tensors.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.bytes()
    }

    /// What most of the checkpoint's bytes lie on, in a few words.
    fn storage(&self, py: Python<'_>) -> String {
        let tensors = self.inner.tensors().iter().map(|tensor| (tensor.object, tensor.bytes()));
        py.detach(|| self.storage_of(&self.inner, tensors)).name.clone()
    }

    /// What tells it from every other checkpoint: the same in all processes that opened the same versions of its objects.
    fn fingerprint(&self) -> u64 {
        self.inner.fingerprint()
    }

    /// Where most of its bytes come from: "memory" (the page cache, too), "disk" or "network"; and the largest gap between
    /// wanted bytes that a load reads rather than skips.
    fn locality(&self, py: Python<'_>, config: &LoadOptions) -> Outcome<(&'static str, u64)> {
        let checkpoint = self.for_load(config)?;
        Ok(py.detach(|| {
            let tensors = checkpoint.tensors().iter();
            let storage = self.storage_of(&checkpoint, tensors.map(|tensor| (tensor.object, tensor.bytes())));
            let coalesce_gap_bytes = Settings::choose(&config.inner, &storage, false).coalesce_gap_bytes;
            let origin = match storage.kind {
                StorageKind::Memory => "memory",
                _ if checkpoint.is_mostly_cached() => "memory",
                StorageKind::Remote
                | StorageKind::Nfs
                | StorageKind::Smb
                | StorageKind::Parallel
                | StorageKind::Fuse => "network",
                StorageKind::Disk | StorageKind::Virtiofs | StorageKind::NineP | StorageKind::Image => "disk",
            };
            (origin, coalesce_gap_bytes)
        }))
    }

    /// The share of it that the page cache holds, by so many looks at each of a few objects; None where that is not known.
    fn cached_share(&self, py: Python<'_>, places: u64) -> Option<f64> {
        py.detach(|| self.inner.cached_share(places))
    }

    /// How its first object is reached, whatever a disk cache holds of it. None for a file of this machine.
    fn access(&self, py: Python<'_>) -> Outcome<Option<Reached>> {
        py.detach(|| {
            let store = Arc::new(self.router.cached_in(CachePolicy::default(), None));
            let remote = self.inner.in_store(store);
            if remote.objects().is_empty() {
                return Ok(None);
            }
            let access = remote.open_object(0)?.access();
            Ok(access.map(|access| (access.provider, access.endpoint, access.region, access.credentials)))
        })
    }

    /// What the header says of the tensor `name`.
    fn tensor(&self, name: &str) -> Outcome<TensorInfo> {
        Ok(TensorInfo { checkpoint: Arc::clone(&self.inner), index: self.inner.require_index(name)? })
    }

    fn __contains__(&self, name: &str) -> bool {
        self.inner.index_of(name).is_some()
    }

    fn __len__(&self) -> usize {
        self.inner.tensors().len()
    }

    /// Begins a load of the named tensors (`None`: all), or of parts of them, to `target`: "slab" (fresh host memory),
    /// "host" (host memory of the caller) or a device such as "cuda:0".
    #[pyo3(signature = (names, slices, target, config))]
    fn session(
        &self,
        py: Python<'_>,
        names: Option<Vec<String>>,
        slices: HashMap<String, Vec<(u64, u64)>>,
        target: &str,
        config: &LoadOptions,
    ) -> Outcome<Session> {
        let indices = self.select(names.as_deref())?;
        let mut wanted = Vec::with_capacity(indices.len());
        for index in indices {
            let tensor = &self.inner.tensors()[index];
            wanted.push(wanted_of(tensor, slices.get(&*tensor.name).map(Vec::as_slice))?);
        }
        self.start(py, wanted, target, config)
    }

    /// Begins a load of parts of tensors, each with the ranges of its first dimensions; as often of one tensor as there
    /// are parts of it. `Session.items` says which of them each tensor of the session is. Targets are those of `session`.
    #[pyo3(signature = (parts, target, config))]
    fn session_of_parts(
        &self,
        py: Python<'_>,
        parts: Vec<(String, Vec<(u64, u64)>)>,
        target: &str,
        config: &LoadOptions,
    ) -> Outcome<Session> {
        let mut wanted = Vec::with_capacity(parts.len());
        for (name, ranges) in &parts {
            let tensor = &self.inner.tensors()[self.inner.require_index(name)?];
            wanted.push(wanted_of(tensor, Some(ranges))?);
        }
        self.start(py, wanted, target, config)
    }

    /// Maps the objects that hold the named tensors (`None`: all).
    #[pyo3(signature = (names, config))]
    fn map(&self, py: Python<'_>, names: Option<Vec<String>>, config: &LoadOptions) -> Outcome<Mapped> {
        let indices = self.select(names.as_deref())?;
        let checkpoint = self.for_load(config)?;
        py.detach(|| {
            let wanted = indices.iter().map(|index| &self.inner.tensors()[*index]);
            let storage = self.storage_of(&checkpoint, wanted.map(|tensor| (tensor.object, tensor.bytes())));
            let readers = Settings::choose(&config.inner, &storage, false).readers;
            Mapped::new(checkpoint, indices, readers.fetches.start)
        })
    }

    /// Begins to bring the bytes of the named tensors (`None`: all) into the page cache. Does nothing where a load would
    /// read them in another way.
    #[pyo3(signature = (names, config))]
    fn prefetch(
        &self,
        py: Python<'_>,
        names: Option<Vec<String>>,
        config: &LoadOptions,
    ) -> Outcome<Prefetch> {
        let indices = self.select(names.as_deref())?;
        let checkpoint = self.for_load(config)?;
        Ok(Prefetch::new(py.detach(|| {
            let wanted = indices.iter().map(|index| &self.inner.tensors()[*index]);
            let storage = self.storage_of(&checkpoint, wanted.map(|tensor| (tensor.object, tensor.bytes())));
            let passes = config.inner.cache == Some(CachePolicy::Bypass);
            match storage.kind {
                // Of object stores, what the disk cache has.
                StorageKind::Disk
                | StorageKind::Nfs
                | StorageKind::Smb
                | StorageKind::Virtiofs
                | StorageKind::NineP
                | StorageKind::Image
                    if !passes =>
                {
                    pipeline::Prefetch::begin(checkpoint, &indices)
                }
                _ => pipeline::Prefetch::none(),
            }
        })))
    }
}

impl Checkpoint {
    fn start(
        &self,
        py: Python<'_>,
        wanted: Vec<(&penstock::checkpoint::TensorInfo, Selection)>,
        target: &str,
        config: &LoadOptions,
    ) -> Outcome<Session> {
        let to_device = !matches!(target, "slab" | "host");
        let target = target.to_owned();
        let checkpoint = self.for_load(config)?;
        let trace = config.inner.trace.clone().filter(|file| !file.as_os_str().is_empty());
        py.detach(|| {
            let bytes = wanted.iter().map(|(tensor, selection)| (tensor.object, selection.bytes()));
            let storage = self.storage_of(&checkpoint, bytes);
            let bytes = wanted.iter().map(|(_, selection)| selection.bytes()).sum();
            let settings = Settings::choose(&config.inner, &storage, to_device).for_bytes(bytes);
            let settings = match checkpoint.verification_block() {
                Some(bytes) => settings.for_verification(bytes),
                None => settings,
            };
            let plan = Plan::new(wanted, settings.block_bytes, settings.coalesce_gap_bytes);
            Session::start(checkpoint, Arc::new(plan), &target, &settings, &storage, trace)
        })
    }
}

/// Paths as they are from any working directory: it may be another one when the load begins. Those that cannot be are
/// left as they are.
pub fn absolute(inputs: Vec<String>) -> Vec<String> {
    let absolute = |input: String| {
        // The empty path, `~` and mistyped URLs (`s3:/bucket`, `me:password@host`) are refused by what was typed.
        let kept = input.is_empty()
            || input.starts_with(['/', '~'])
            || input.contains("://")
            || ((is_nearly_url(&input) || is_doubtful_path(&input)) && !path_of(&input).exists());
        let made = (!kept).then(|| std::path::absolute(path_of(&input)).ok().map(location_of)).flatten();
        made.unwrap_or(input)
    };
    inputs.into_iter().map(absolute).collect()
}

/// The selection of `ranges` of a tensor, or of all of it.
fn wanted_of<'a>(
    tensor: &'a penstock::checkpoint::TensorInfo,
    ranges: Option<&[(u64, u64)]>,
) -> Outcome<(&'a penstock::checkpoint::TensorInfo, Selection)> {
    let selection = match ranges {
        Some(ranges) => {
            let ranges: Vec<_> = ranges.iter().map(|(start, end)| *start..*end).collect();
            Selection::of(tensor, &ranges)?
        }
        None => Selection::all(tensor),
    };
    Ok((tensor, selection))
}

/// The device ordinal of "cuda" or "cuda:3".
pub fn cuda_ordinal(target: &str) -> Outcome<i32> {
    let number = target.strip_prefix("cuda").map(|rest| rest.strip_prefix(':').unwrap_or(rest));
    match number {
        Some("") => Ok(0),
        Some(number) => number.parse().map_err(|_| unknown_device(target)),
        None => Err(unknown_device(target)),
    }
}

fn unknown_device(target: &str) -> crate::errors::Failure {
    Error::new(ErrorKind::Device, format!("{target:?} is not a device that Penstock can load to"))
        .remedy("Use \"cpu\" or \"cuda:N\"")
        .into()
}
