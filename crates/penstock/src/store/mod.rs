//! Where objects live, and how their bytes come in.
//!
//! A [`Store`] opens objects and lists prefixes; an [`Object`] reads byte ranges **into memory it is given**. Nothing
//! here allocates result buffers, knows what a tensor is, or has heard of a device: the pipeline decides where bytes
//! go, the store decides how they are fetched (cached or direct, one request or several).
//!
//! * `local`: files. `remote`: object stores and HTTP servers. `disk_cache`: a store in front of the remote one.
//! * `router`: which of them a location leads to. `location`: what can be said of one without asking anyone.
//! * [`sink`]: where what is saved goes; local here, remote in `remote`.
//! * `block_map`: which blocks of a partial copy are there.
//! * `verified`: an object around another one, whose bytes are compared with a manifest before anyone gets them.
//! * `locked_file`: a file that is locked by one process, and not by its forked children.
//!
//! Promises of every store, checked by one conformance suite (`tests/store_conformance.rs`):
//! a read fills exactly the memory it was given or fails; it never writes outside of it; an object that changed
//! since it was opened is an error, never a mixture of two versions; errors name the object and the range.

#[cfg(feature = "remote")]
pub(crate) mod block_map;
#[cfg(feature = "remote")]
mod disk_cache;
mod local;
mod location;
pub(crate) mod locked_file;
#[cfg(feature = "remote")]
mod remote;
mod router;
pub mod sink;
mod verified;

use std::any::Any;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::memory::{FileMapping, PinnedSpan, Window};

#[cfg(feature = "remote")]
pub use disk_cache::{CacheEntry, CacheManager, CachingStore, DiskCache, flush_disk_caches};
pub use local::{CachePolicy, LocalStore, location_of, path_of, readable};
#[cfg(feature = "remote")]
pub(crate) use location::is_key;
pub(crate) use location::{HIDDEN, is_http, is_known_scheme, is_url};
pub use location::{is_doubtful_path, shown, shown_setting};
#[cfg(feature = "remote")]
pub use remote::{Environment, ListedObject, Listing, RemoteStore, RetryPolicy, set_google_token_command};
pub use router::{Router, is_remote};
pub(crate) use verified::VerifiedObject;

/// What tells one version of an object from another: compared between opening a checkpoint and loading from it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Identity(pub String);

/// One entry of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Where the object is, in the form [`Store::open`] takes.
    pub location: String,
    /// Its size in bytes.
    pub bytes: u64,
}

/// How a remote object is reached. Holds no secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    /// Who serves it, as errors call it: `S3`.
    pub provider: &'static str,
    /// The URL of the server that a setting names, or the cloud's partition; empty where the location says it.
    pub endpoint: String,
    /// S3: the region that the bucket answers in.
    pub region: Option<String>,
    /// Where the credentials in use come from.
    pub credentials: String,
}

/// A place where objects live.
pub trait Store: Send + Sync {
    /// Opens the object at `location` for reading.
    ///
    /// # Errors
    /// `NotFound`, `Access` (unreadable, or not a regular object), or `Storage`.
    fn open(&self, location: &str) -> Result<Arc<dyn Object>>;

    /// Opens the object at `location` for reading if it is still the version with that identity.
    ///
    /// A store that can ask for a version by name does not ask what is there now: every read will. Where it cannot be told
    /// whether a file is the same (only its change time differs), it is opened, and its identity is another: whoever relies
    /// on what was read of it before has to compare that.
    ///
    /// # Errors
    /// `Changed` if it is not; as for [`Store::open`].
    fn reopen(&self, location: &str, identity: &Identity) -> Result<Arc<dyn Object>> {
        let object = self.open(location)?;
        if object.identity() == *identity {
            return Ok(object);
        }
        Err(replaced(object.location()))
    }

    /// The objects directly under `prefix` (a directory), sorted by location; not recursive.
    ///
    /// # Errors
    /// `NotFound` where there is no such prefix, `Access` or `Storage` as for [`Store::open`].
    fn list(&self, prefix: &str) -> Result<Vec<Entry>>;

    /// The names of the directories directly under `prefix`, sorted, for an error to name; none where they cannot be
    /// told. May cost a request.
    fn directories(&self, prefix: &str) -> Vec<String>;

    /// The file of this machine from which that version of the object at `location` would be read now, where there is
    /// one. How to read is decided by what it lies on.
    fn file_of(&self, _location: &str, _identity: &Identity) -> Option<PathBuf> {
        None
    }

    /// This store as one load uses it, where loads have something of their own in it, such as a budget of failures or
    /// an end.
    fn for_load(&self) -> Option<Arc<dyn Store>> {
        None
    }

    /// Has what waits for this store end now, with `Cancelled`, and later reads and openings not begin. A hint: what takes
    /// no longer than a disk does may go on.
    fn interrupt(&self) {}
}

/// The failure of [`Store::reopen`] where another version is there.
fn replaced(location: &str) -> Error {
    Error::new(ErrorKind::Changed, "the file was replaced or written to since its header was read")
        .object(location)
        .remedy("Open the checkpoint again")
}

/// An open object: a fixed sequence of bytes that many threads may read at once.
pub trait Object: Send + Sync {
    /// Where it is: a path, or a URL without secrets. Used in errors and statistics.
    fn location(&self) -> &str;

    /// Its size in bytes when it was opened.
    fn bytes(&self) -> u64;

    /// Which version of the object this is.
    fn identity(&self) -> Identity;

    /// Fills `into` with the bytes that start at `offset`.
    ///
    /// # Errors
    /// `Storage` where reading fails, `Changed` where the object ends before `into` is full or is another version by
    /// now, `Cancelled` after [`Store::interrupt`].
    fn read_into(&self, offset: u64, into: Window<'_>, cx: &mut ReadContext) -> Result<()>;

    /// Fills each window with the bytes that start at its offset; offsets rise, and neither windows nor the ranges of the
    /// object that they are filled from overlap.
    ///
    /// # Errors
    /// As [`Object::read_into`].
    fn read_scattered(&self, into: &mut [(u64, Window<'_>)], cx: &mut ReadContext) -> Result<()> {
        into.iter_mut().try_for_each(|(offset, window)| {
            let len = window.len();
            self.read_into(*offset, window.part(0, len), cx)
        })
    }

    /// Whether filling several windows costs one call, which brings the gaps between them too, rather than one for each.
    fn scatters(&self) -> bool {
        false
    }

    /// Reads `range` to wherever in `buffer` suits this store's alignment, and says where in the buffer it begins.
    ///
    /// `buffer` must hold the range and [`ALIGNMENT_PADDING`] bytes more. This is how a store that reads whole sectors avoids
    /// copying: the pipeline takes the bytes from where they landed.
    ///
    /// # Errors
    /// As [`Object::read_into`].
    fn read_to_staging(&self, range: Range<u64>, buffer: Window<'_>, cx: &mut ReadContext) -> Result<usize>;

    /// Maps the object's bytes into memory, where they are a file of this machine.
    ///
    /// # Errors
    /// `Config` for a store that has no files, `Memory` or `Storage` where the kernel refuses.
    fn map(&self) -> Result<FileMapping> {
        Err(Error::new(ErrorKind::Config, "only local files can be mapped")
            .object(self.location())
            .remedy("Load without mmap=True"))
    }

    /// Whether reading `range` would be a copy from memory rather than a wait for storage, where the store knows.
    fn is_cached(&self, _range: &Range<u64>) -> Option<bool> {
        None
    }

    /// The bytes of `range`, where they lie in pinned host memory already: then a load to a device copies them from there,
    /// and neither reads nor takes a staging buffer for them. Reading them into host memory is expected to be a copy too.
    fn pinned(&self, _range: &Range<u64>) -> Option<PinnedSpan> {
        None
    }

    /// Tells the store that `range` will be wanted in the page cache soon, and says whether any of it still has to come
    /// in. A hint: what is no file of this machine does nothing.
    fn prefetch(&self, _range: Range<u64>) -> bool {
        false
    }

    /// How the object is reached, where that is over a network.
    fn access(&self) -> Option<Access> {
        None
    }

    /// Whether bytes that came damaged may come whole when they are asked for once more: a network is on their way.
    fn may_come_better(&self) -> bool {
        self.access().is_some()
    }

    /// Tells the store that direct reads of this object would gain nothing. A hint, for objects that have such a choice.
    fn avoid_direct(&self) {}

    /// What reading came upon that the load's owner may want to know: a faster way that was refused.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// The bytes of the blocks in which reads of this object are verified, if they are: a range is read in whole blocks, so
    /// what is cut at multiples of them is not read twice.
    fn verification_block(&self) -> Option<u64> {
        None
    }

    /// Verifies `range` of a mapping that [`Object::map`] made, where reads of this object are verified: to be called before
    /// anyone sees it.
    ///
    /// # Errors
    /// `Integrity` where the bytes are not what they should be, `Storage` or `Changed` where a page cannot be read.
    fn verify_mapped(&self, _mapping: &FileMapping, _range: &Range<u64>) -> Result<()> {
        Ok(())
    }

    /// Fails with `Changed` if what was read may not be of the version that was opened.
    ///
    /// # Errors
    /// `Changed`, or `Storage` where the store cannot tell.
    fn verify_unchanged(&self) -> Result<()>;
}

/// How much longer than its block a buffer must be, so that a store may read whole sectors around it.
pub const ALIGNMENT_PADDING: usize = 2 * 4096;

/// The range of a read of `len` bytes, which must lie in the object: anything else is a bug of the plan.
///
/// # Errors
/// `Storage` for what lies beyond its end.
pub(crate) fn checked_range(object: &(impl Object + ?Sized), offset: u64, len: usize) -> Result<Range<u64>> {
    let bytes = object.bytes();
    let end = offset.checked_add(len as u64).filter(|end| *end <= bytes);
    end.map(|end| offset..end).ok_or_else(|| {
        Error::new(ErrorKind::Storage, format!("a read beyond the end of the file's {bytes} bytes"))
            .object(object.location())
            .range(offset..offset.saturating_add(len as u64))
    })
}

/// What one reader brings to every read it makes: scratch memory, an open file of its own, and counters. Not shared between threads.
#[derive(Debug, Default)]
pub struct ReadContext {
    /// Bytes that came from the page cache, by copying.
    pub cached_bytes: u64,
    /// Bytes that came straight from the storage device, by-passing the page cache.
    pub direct_bytes: u64,
    /// Bytes read with the page cache in between although they were not in it.
    pub buffered_bytes: u64,
    /// Bytes that came from an object store or HTTP server.
    pub network_bytes: u64,
    /// Bytes that were compared with a manifest.
    pub verified_bytes: u64,
    /// Bytes that were read only because blocks are verified whole.
    pub verification_excess_bytes: u64,
    /// Calls made to the store: system calls or requests.
    pub calls: u64,
    /// Answers of a store that it is asked too often.
    pub throttled: u64,
    /// Whether this context wants open files of its own, so that the storage sees each reader go from front to back. A hint:
    /// a store that has no open files has nothing to do.
    pub per_reader_fd: bool,
    /// What [`Object::is_cached`] has said of what is read next, so that the object need not find out again.
    pub cached: Option<bool>,
    /// Whether what was kept of the object before does not count: it was found to be damaged.
    pub(crate) afresh: bool,
    pub(crate) scratch: Option<crate::memory::Region>,
    pub(crate) verification_scratch: Option<crate::memory::Region>,
    /// What a store keeps for this reader from one read to the next, such as a file open for it alone.
    pub(crate) kept: Option<Box<dyn Any + Send>>,
}

impl ReadContext {
    /// All bytes that came in, by whatever route.
    pub fn bytes(&self) -> u64 {
        self.cached_bytes + self.direct_bytes + self.buffered_bytes + self.network_bytes
    }
}
