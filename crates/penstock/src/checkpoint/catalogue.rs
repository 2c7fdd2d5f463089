//! All tensors of a checkpoint, whatever number of objects they are spread over.
//!
//! Opening reads every header, at once, and nothing else. What comes out is consistent: each name stands for one tensor,
//! each tensor's bytes lie in an object that was there and whole, and where an index says what belongs to the
//! checkpoint, exactly that does. The catalogue does not keep the objects open: it remembers their
//! [identity](Identity), by which a load can tell that an object has been replaced since.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::header::ParsedTensor;
use super::location::shown;
use super::open_all::{Opened, open_all};
use super::source::{Resolved, ResolvedIndex, resolve};
use super::verifying::{Discovery, Manifests, Verification};
use super::{Dtype, TensorInfo};
use crate::closest::closest;
use crate::error::{Code, Error, ErrorKind, Result};
use crate::manifest::Verify;
use crate::store::{Identity, Object, ReadContext, Store, is_remote, location_of};

/// One object of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Where it is: a path, or a URL without secrets.
    pub location: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Which version of it the header was read from.
    pub identity: Identity,
    /// Where its data begins.
    pub data_start: u64,
    /// The strings its header carries.
    pub metadata: BTreeMap<String, String>,
}

/// The catalogue of a checkpoint.
#[derive(Clone)]
pub struct Checkpoint {
    /// Where the objects are read: verified, where there are manifests.
    store: Arc<dyn Store>,
    /// The same, unverified.
    plain: Arc<dyn Store>,
    /// What was found when it was opened; nothing where nobody looked.
    manifests: Option<Arc<Manifests>>,
    objects: Vec<ObjectInfo>,
    /// Where the objects are, in the form their store takes: URLs may carry secrets.
    locations: Vec<String>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<Arc<str>, u32>,
    metadata: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens the checkpoint that `inputs` name: files, directories, shard indexes, globs, in any mixture.
    ///
    /// # Errors
    /// `NotFound` where an input or a shard is missing; `Format` where an object is malformed, a name stands for two
    /// tensors, or an index does not fit its shards; what the store reports where reading fails.
    pub fn open(store: Arc<dyn Store>, inputs: &[String]) -> Result<Self> {
        Self::open_verified(store, inputs, Verify::Auto)
    }

    /// As [`Checkpoint::open`], with a word on manifests. Where there is one, headers and indexes are verified before they
    /// are parsed, and so is all that is loaded later.
    ///
    /// # Errors
    /// As [`Checkpoint::open`]; `Integrity` where bytes are not what a manifest says, a manifest is refused, or none is there
    /// and one is required; `Signature` where files have to be signed, and one is not.
    pub fn open_verified(
        store: Arc<dyn Store>,
        inputs: &[String],
        verification: impl Into<Verification>,
    ) -> Result<Self> {
        let ((resolved, opened), manifests) = discovering(&store, verification.into(), |store| {
            let resolved = resolve(store, inputs)?;
            let opened = open_all(store, &resolved.objects)
                .map_err(|(number, error)| blame_index(&resolved, number, error))?;
            Ok((resolved, opened))
        })?;
        let mut made = Self::empty(store, manifests);
        made.by_name.reserve(opened.iter().map(|opened| opened.header.tensors.len()).sum());
        let mut owners = vec![Vec::new(); opened.len()];
        for owning in &resolved.indexes {
            for (shard, object) in (0u32..).zip(&owning.objects) {
                if let Some(owners) = owners.get_mut(*object as usize) {
                    owners.push((owning, shard));
                }
            }
        }
        for ((location, opened), owners) in resolved.objects.iter().zip(opened).zip(owners) {
            made.add(location, opened, &owners)?;
        }
        resolved.indexes.iter().try_for_each(|index| made.check_index(index))?;
        Ok(made)
    }

    /// A catalogue of byte ranges of any objects, so that they can be loaded as tensors are: each is a tensor of bytes,
    /// called `object:range` by their numbers.
    ///
    /// # Errors
    /// `Selection` for a range that leaves its object; what the store fails with when it opens one; `Integrity` as for
    /// [`Checkpoint::open_verified`].
    pub fn of_ranges(
        store: Arc<dyn Store>,
        wanted: &[(String, Vec<Range<u64>>)],
        verification: impl Into<Verification>,
    ) -> Result<Self> {
        let (opened, manifests) = discovering(&store, verification.into(), |store| {
            let open = |(location, _): &(String, _)| {
                let object = store.open(location).map_err(|error| error.object(shown(location)))?;
                Ok((object.bytes(), object.identity()))
            };
            wanted.iter().map(open).collect::<Result<Vec<_>>>()
        })?;
        let mut made = Self::empty(store, manifests);
        for ((location, ranges), (bytes, identity)) in wanted.iter().zip(opened) {
            let number = countable(made.objects.len())?;
            let mut tensors = Vec::with_capacity(ranges.len());
            for (index, range) in ranges.iter().enumerate() {
                if range.start > range.end || range.end > bytes {
                    let cause = format!("the object ends at byte {bytes}");
                    let error = Error::new(ErrorKind::Selection, cause).object(shown(location));
                    return Err(error.range(range.clone()));
                }
                tensors.push(TensorInfo {
                    name: format!("{number}:{index}").into(),
                    dtype: Dtype::U8,
                    shape: vec![range.end - range.start],
                    object: number,
                    range: range.clone(),
                });
            }
            tensors.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));
            for tensor in tensors {
                made.by_name.insert(Arc::clone(&tensor.name), countable(made.tensors.len())?);
                made.tensors.push(tensor);
            }
            made.locations.push(location.clone());
            made.objects.push(ObjectInfo {
                location: shown(location).into_owned(),
                bytes,
                identity,
                data_start: 0,
                metadata: BTreeMap::new(),
            });
        }
        Ok(made)
    }

    fn empty(plain: Arc<dyn Store>, manifests: Option<Manifests>) -> Self {
        let manifests = manifests.map(Arc::new);
        let store =
            manifests.as_ref().map_or_else(|| Arc::clone(&plain), |found| found.over(Arc::clone(&plain)));
        Self {
            store,
            plain,
            manifests,
            objects: Vec::new(),
            locations: Vec::new(),
            tensors: Vec::new(),
            by_name: HashMap::new(),
            metadata: BTreeMap::new(),
        }
    }

    /// Adds an object and those of its tensors that the indexes in charge of it, if any, map to it.
    fn add(&mut self, location: &str, opened: Opened, owners: &[(&ResolvedIndex, u32)]) -> Result<()> {
        let Opened { bytes, identity, header } = opened;
        let number = countable(self.objects.len())?;
        let belongs = |tensor: &ParsedTensor| {
            let mapped = |(owning, shard): &(&ResolvedIndex, u32)| {
                owning.index.weight_map.get(&*tensor.name) == Some(shard)
            };
            owners.is_empty() || owners.iter().any(mapped)
        };
        for tensor in header.tensors.into_iter().filter(belongs) {
            let place = countable(self.tensors.len())?;
            if let Some(other) = self.by_name.insert(tensor.name.clone(), place) {
                let other = &self.objects[self.tensors[other as usize].object as usize].location;
                return Err(Error::new(
                    ErrorKind::Format,
                    format!("{other} holds a tensor of this name too"),
                )
                .object(shown(location))
                .tensor(&*tensor.name)
                .remedy("Name the files of one model only, or its shard index"));
            }
            let range = tensor.range.start + header.data_start..tensor.range.end + header.data_start;
            let ParsedTensor { name, dtype, shape, .. } = tensor;
            self.tensors.push(TensorInfo { name, dtype, shape, object: number, range });
        }
        for (key, value) in &header.metadata {
            self.metadata.entry(key.clone()).or_insert_with(|| value.clone());
        }
        self.locations.push(location.to_owned());
        self.objects.push(ObjectInfo {
            location: shown(location).into_owned(),
            bytes,
            identity,
            data_start: header.data_start,
            metadata: header.metadata,
        });
        Ok(())
    }

    /// Checks that every tensor an index maps is where it says.
    fn check_index(&self, resolved: &ResolvedIndex) -> Result<()> {
        for (name, shard) in &resolved.index.weight_map {
            let shard = *shard as usize;
            let found = self.tensor(name);
            if found.map(|tensor| tensor.object) == resolved.objects.get(shard).copied() {
                continue;
            }
            let file = resolved.index.shards.get(shard).map_or("", String::as_str);
            return Err(Error::new(
                ErrorKind::Format,
                format!("the index maps this tensor to {file:?}, which does not hold it"),
            )
            .object(shown(&resolved.location))
            .tensor(&**name)
            .remedy("The index and the shards are not of the same model or version: download them again"));
        }
        Ok(())
    }

    /// The objects, in the order they were given; the shards of an index in the order of their names.
    pub fn objects(&self) -> &[ObjectInfo] {
        &self.objects
    }

    /// The tensors, sorted by object, then by where they begin and end, then by name.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).and_then(|place| self.tensors.get(*place as usize))
    }

    /// The position of the tensor of that name among [`Checkpoint::tensors`].
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).map(|place| *place as usize)
    }

    /// The tensor of that name, or an error that says which names are like it.
    ///
    /// # Errors
    /// `TensorNotFound`.
    pub fn require(&self, name: &str) -> Result<&TensorInfo> {
        self.require_index(name).map(|index| &self.tensors[index])
    }

    /// As [`Checkpoint::index_of`], for a tensor that must be there.
    ///
    /// # Errors
    /// `TensorNotFound`, saying which names are like it.
    pub fn require_index(&self, name: &str) -> Result<usize> {
        self.index_of(name).ok_or_else(|| {
            let quoted: Vec<_> = closest(name, self.tensors.iter().map(|tensor| &*tensor.name))
                .into_iter()
                .map(|name| format!("{name:?}"))
                .collect();
            let remedy = match (&quoted[..], self.tensors.first()) {
                ([], None) => "The checkpoint holds no tensor at all".into(),
                ([], Some(first)) => format!(
                    "None of the {} names is like it; they look like {:?}",
                    self.tensors.len(),
                    first.name
                ),
                (like, _) => format!("Did you mean {}?", like.join(" or ")),
            };
            let error = Error::new(ErrorKind::TensorNotFound, "the checkpoint holds no tensor of this name")
                .tensor(name)
                .remedy(remedy);
            match &self.objects[..] {
                [only] => error.object(shown(&only.location)),
                _ => error,
            }
        })
    }

    /// Opens an object for reading, if it is still the version whose header was read.
    ///
    /// # Errors
    /// `Changed` if it is not; otherwise what the store fails with.
    pub fn open_object(&self, index: usize) -> Result<Arc<dyn Object>> {
        self.open_object_in(&*self.store, index)
    }

    /// As [`Checkpoint::open_object`], in [`Checkpoint::store_for_load`].
    pub(crate) fn open_object_in(&self, store: &dyn Store, index: usize) -> Result<Arc<dyn Object>> {
        let object = store.reopen(&self.locations[index], &self.objects[index].identity)?;
        if object.identity() != self.objects[index].identity {
            self.compare_header(index, &*object)?;
        }
        Ok(object)
    }

    /// Makes sure that the header is what it was, where the store cannot tell whether the object is.
    fn compare_header(&self, index: usize, object: &dyn Object) -> Result<()> {
        let number = countable(index)?;
        let mut ours = self.tensors.iter().filter(|tensor| tensor.object == number).peekable();
        // Ranges of an object that was taken without a header are its user's own.
        if self.objects[index].data_start == 0 || ours.peek().is_none() {
            return Ok(());
        }
        let header = match super::header::read(object, &mut ReadContext::default()) {
            Ok(header) => Some(header),
            // What was a header is none any more.
            Err(error) if error.kind() == ErrorKind::Format => None,
            Err(error) => return Err(error),
        };
        let is_same = header.is_some_and(|header| {
            let start = header.data_start;
            let there: HashMap<_, _> = header.tensors.iter().map(|tensor| (&*tensor.name, tensor)).collect();
            start == self.objects[index].data_start
                && ours.all(|ours| {
                    there.get(&*ours.name).is_some_and(|there| {
                        let as_bytes = ours.dtype == Dtype::U8 && ours.shape == [ours.bytes()];
                        ours.range == (there.range.start + start..there.range.end + start)
                            && (as_bytes || (ours.dtype, &ours.shape) == (there.dtype, &there.shape))
                    })
                })
        });
        if is_same {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Changed, "the file was written to since its header was read")
            .object(object.location())
            .remedy("Open the checkpoint again"))
    }

    /// The store that the objects are in, for one load.
    pub(crate) fn store_for_load(&self) -> Arc<dyn Store> {
        self.store.for_load().unwrap_or_else(|| Arc::clone(&self.store))
    }

    /// The same checkpoint, whose objects are read through another store.
    pub fn in_store(&self, plain: Arc<dyn Store>) -> Self {
        let verified = self.manifests.as_ref().map(|found| found.over(Arc::clone(&plain)));
        Self { store: verified.unwrap_or_else(|| Arc::clone(&plain)), plain, ..self.clone() }
    }

    /// The same checkpoint, whose loads are verified as `verify` says: with the manifests that were found when it was
    /// opened.
    ///
    /// # Errors
    /// `Integrity` where it is to be verified and cannot be; `Config` where it is signed and is not to be verified.
    pub fn verified(&self, verify: Verify) -> Result<Self> {
        let refuse = |cause, remedy| {
            let error = Error::new(ErrorKind::Integrity, cause).code(Code::NoManifest).remedy(remedy);
            match self.objects.first() {
                Some(first) => error.object(&*first.location),
                None => error,
            }
        };
        match (verify, &self.manifests) {
            (Verify::Off, Some(found)) if found.are_signed() => Err(must_be_verified()),
            (Verify::Off, _) => Ok(Self { store: Arc::clone(&self.plain), manifests: None, ..self.clone() }),
            (Verify::Require, None) => Err(refuse(
                "verification is required, and the checkpoint was opened without",
                "Open it with verify=\"require\" too: headers are verified before they are parsed",
            )),
            (Verify::Require, Some(found)) if !found.cover_all() => Err(refuse(
                "there was no manifest when the checkpoint was opened, and one is required",
                "Make one where the files are trusted (penstock manifest), and open the checkpoint again",
            )),
            _ => Ok(self.clone()),
        }
    }

    /// Bytes of the blocks in which its loads are verified, if they are.
    pub fn verification_block(&self) -> Option<u64> {
        self.manifests.as_ref()?.block_bytes()
    }

    /// The same checkpoint, of which each tensor is its bytes one after the other: for those who cut anywhere.
    pub fn as_bytes(&self) -> Self {
        let mut made = self.clone();
        for tensor in &mut made.tensors {
            (tensor.dtype, tensor.shape) = (Dtype::U8, vec![tensor.bytes()]);
        }
        made
    }

    /// Where an object's bytes lie now: a file of this machine, even if its location is a URL, else its location.
    pub fn local_path(&self, index: usize) -> Cow<'_, str> {
        let object = &self.objects[index];
        match self.store.file_of(&self.locations[index], &object.identity) {
            Some(file) => Cow::Owned(location_of(file)),
            None => Cow::Borrowed(&object.location),
        }
    }

    /// The strings of all objects' headers; where objects disagree, the first object's.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Bytes of all tensors together.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(TensorInfo::bytes).sum()
    }

    /// Where the objects live.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("objects", &self.objects.len())
            .field("tensors", &self.tensors.len())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

/// What `open` opens in `store`, and the manifests that were found meanwhile.
fn discovering<T>(
    store: &Arc<dyn Store>,
    verification: Verification,
    open: impl FnOnce(&dyn Store) -> Result<T>,
) -> Result<(T, Option<Manifests>)> {
    match (verification.verify, &verification.signed) {
        (Verify::Off, None) => return Ok((open(&**store)?, None)),
        (Verify::Off, Some(_)) => return Err(must_be_verified()),
        (Verify::Auto | Verify::Require, _) => {}
    }
    let discovery = Discovery::new(Arc::clone(store), verification);
    let opened = open(&discovery)?;
    Ok((opened, Some(discovery.into_manifests()?)))
}

/// The refusal to leave out what makes sure that files are the signed ones.
fn must_be_verified() -> Error {
    Error::new(ErrorKind::Config, "verify=\"off\", and the checkpoint has to be signed")
        .remedy("Leave verify out: what is signed is always verified")
}

/// Says of a missing object that an index names it, and for which tensor.
fn blame_index(resolved: &Resolved, number: usize, error: Error) -> Error {
    let named = |owning: &ResolvedIndex| owning.objects.iter().position(|object| *object as usize == number);
    let owning = resolved.indexes.iter().find_map(|owning| Some((owning, named(owning)?)));
    let (ErrorKind::NotFound, Some((owning, shard))) = (error.kind(), owning) else { return error };
    let cause = format!("the shard is missing, which {} names: {}", shown(&owning.location), error.cause());
    // A copy on this machine was brought here; what a store lacks, nobody has put there.
    let remedy = match is_remote(&resolved.objects[number]) {
        true => "The upload is incomplete: upload the shard, or correct the index",
        false => "The download is incomplete: download the model again",
    };
    let made = Error::new(ErrorKind::NotFound, cause).object(shown(&resolved.objects[number])).remedy(remedy);
    match owning.index.weight_map.iter().find(|(_, of)| **of as usize == shard) {
        Some((tensor, _)) => made.tensor(&**tensor),
        None => made,
    }
}

fn countable(count: usize) -> Result<u32> {
    u32::try_from(count).map_err(|_| Error::new(ErrorKind::Format, "more tensors than can be counted"))
}
