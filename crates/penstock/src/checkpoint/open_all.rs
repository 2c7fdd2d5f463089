//! Reading the headers of many objects at once.
//!
//! Opening a checkpoint of a hundred shards is a hundred small reads, each of which waits: for a disk, for a server. A
//! few threads take objects from a counter, in order. When one fails, no new object is taken; those taken before it are
//! finished, so the error reported is that of the first faulty object, the same on every run.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::header::{self, Header};
use super::location::shown;
use crate::error::{Error, Result};
use crate::store::{Identity, ReadContext, Store};

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
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let work = || {
        let mut cx = ReadContext::default();
        let mut done = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(location) = locations.get(number) else { break };
            let opened = open(store, location, &mut cx);
            if opened.is_err() {
                failed.store(true, Ordering::Relaxed);
            }
            done.push((number, opened));
        }
        done
    };
    let mut done = std::thread::scope(|scope| {
        // This thread works too, so a machine that grants no more threads is only slower.
        let helpers: Vec<_> = (1..locations.len().min(MAX_THREADS))
            .map_while(|_| {
                std::thread::Builder::new().name("penstock-open".into()).spawn_scoped(scope, work).ok()
            })
            .collect();
        let mut done = work();
        for helper in helpers {
            match helper.join() {
                Ok(more) => done.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    done.sort_unstable_by_key(|(number, _)| *number);
    done.into_iter().map(|(number, opened)| opened.map_err(|error| (number, error))).collect()
}

fn open(store: &dyn Store, location: &str, cx: &mut ReadContext) -> Result<Opened> {
    let object = store.open(location).map_err(|error| error.object(shown(location)))?;
    let header = header::read(&*object, cx)?;
    Ok(Opened { bytes: object.bytes(), identity: object.identity(), header })
}
