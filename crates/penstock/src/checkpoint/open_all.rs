//! Reading the headers of many objects at once.
//!
//! Opening a checkpoint of a hundred shards is a hundred small reads, each of which waits: for a disk, for a server. The
//! error reported is that of the first faulty object, the same on every run.

use super::header::{self, Header};
use super::location::shown;
use crate::error::{Error, Result};
use crate::store::{Identity, ReadContext, Store};
use crate::threads;

/// Threads that read headers, at most: enough to hide the latency of a remote store.
const MAX_THREADS: usize = 16;

/// What was learnt from an object. It is not kept open: a checkpoint may have more shards than a process may have files.
pub(super) struct Opened {
    pub(super) bytes: u64,
    pub(super) identity: Identity,
    pub(super) header: Header,
}

/// Opens all objects and reads their headers, in the order given; or says which is the first that fails.
pub(super) fn open_all(store: &dyn Store, locations: &[String]) -> Result<Vec<Opened>, (usize, Error)> {
    threads::in_order(locations, MAX_THREADS, "penstock-open", |location| open(store, location))
}

fn open(store: &dyn Store, location: &str) -> Result<Opened> {
    let object = store.open(location).map_err(|error| error.object(shown(location)))?;
    let header = header::read(&*object, &mut ReadContext::default())?;
    Ok(Opened { bytes: object.bytes(), identity: object.identity(), header })
}
