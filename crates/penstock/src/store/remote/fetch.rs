//! One range of an object: asked for, and asked for again from where it stopped, until it is complete or given up.
//!
//! The body's chunks are handed on as they arrive, so that they are copied once, to where they belong. Every answer is
//! checked against what was asked: the range, the object's size, its version. A version is pinned when the object is
//! opened and asked for with every range (`If-Match`, a GCS generation), so what comes is of one version or an error.

use std::ops::Range;

use futures_util::StreamExt;
use object_store::path::Path;
use object_store::{Error as StoreError, GetOptions, GetRange, ObjectMeta};

use super::address::Provider;
use super::backend::Backend;
use super::failure::{Verdict, changed, gave_up, judge};
use super::retry::{Attempts, Budget, Trouble};
use super::witness::Witness;
use crate::error::Error;

/// Why something was not had.
pub(super) enum Stop {
    /// The bucket is in this region.
    Region(String),
    /// The object has no bytes.
    Empty,
    /// For the caller.
    Tell(Error),
}

/// Why a single request failed.
pub(super) enum Fault {
    Store(StoreError),
    /// The answer was of another version.
    Changed,
    /// The answer was not what was asked for, or ended early.
    Trouble(Trouble),
}

impl From<StoreError> for Fault {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// Does `attempt` until it succeeds or is given up. It says with a failure whether it had brought any bytes.
pub(super) async fn persist<T>(
    backend: &Backend,
    budget: &Budget,
    known: bool,
    requests: &mut u64,
    mut attempt: impl AsyncFnMut() -> Result<T, (Fault, bool)>,
) -> Result<T, Stop> {
    let mut attempts = Attempts::new(&backend.patience, budget, !known);
    let mut renewed = false;
    loop {
        let (done, seen) = Witness::watch(attempt()).await;
        *requests += seen.requests;
        let (fault, progress) = match done {
            Ok(done) => return Ok(done),
            Err(failed) => failed,
        };
        let trouble = match fault {
            Fault::Changed => return Err(Stop::Tell(changed())),
            Fault::Trouble(trouble) => trouble,
            Fault::Store(error) => match judge(backend, &error, &seen, known) {
                Verdict::Again(trouble) => trouble,
                Verdict::Expired(error) if renewed => return Err(Stop::Tell(error)),
                Verdict::Expired(_) => {
                    renewed = true;
                    backend.renew();
                    continue;
                }
                Verdict::Region(region) => return Err(Stop::Region(region)),
                Verdict::Empty => return Err(Stop::Empty),
                Verdict::Tell(error) => return Err(Stop::Tell(error)),
            },
        };
        tracing::debug!(store = backend.provider.name(), failure = trouble.what, "a request failed");
        let pause = attempts.failed(trouble, progress).map_err(|given_up| Stop::Tell(gave_up(&given_up)))?;
        tokio::time::sleep(pause).await;
    }
}

/// What a range is asked with, so that it comes from the version `of` and no other.
///
/// Not with a date: gateways to file systems compare it with times finer than the seconds that they told. Every answer's
/// own date is compared anyway.
pub(super) fn pinned(provider: Provider, of: &ObjectMeta) -> GetOptions {
    let mut options = GetOptions::default();
    let strong = of.e_tag.as_ref().filter(|tag| !tag.starts_with("W/"));
    match (provider, &of.version, strong) {
        (Provider::Gcs, Some(generation), _) => options.version = Some(generation.clone()),
        (_, _, Some(tag)) => options.if_match = Some(tag.clone()),
        _ => {}
    }
    options
}

/// Without names that name nothing: gateways to file systems give an empty tag to files that they did not write.
pub(super) fn named(mut meta: ObjectMeta) -> ObjectMeta {
    meta.e_tag = meta.e_tag.filter(|tag| !tag.trim_matches('"').is_empty());
    meta.version = meta.version.filter(|version| !version.is_empty());
    meta
}

/// Whether two answers speak of the same version.
pub(super) fn is_same(one: &ObjectMeta, other: &ObjectMeta) -> bool {
    let differ = |one: &Option<String>, other: &Option<String>| match (one, other) {
        (Some(one), Some(other)) => one != other,
        _ => false,
    };
    one.size == other.size
        && !differ(&one.e_tag, &other.e_tag)
        && !differ(&one.version, &other.version)
        && one.last_modified == other.last_modified
}

/// Asks once for `range`, and hands its bytes to `put` with their offsets. `at` says how far it came.
///
/// The range may reach beyond the object's end only where its version is not known yet.
pub(super) async fn once(
    backend: &Backend,
    path: &Path,
    range: Range<u64>,
    of: Option<&ObjectMeta>,
    at: &mut u64,
    mut put: impl FnMut(u64, &[u8]),
) -> Result<ObjectMeta, Fault> {
    let options = of.map_or_else(GetOptions::default, |of| pinned(backend.provider, of));
    let options = GetOptions { range: Some(GetRange::Bounded(range.clone())), ..options };
    let answer = backend.store.get_opts(path, options).await?;
    let meta = named(answer.meta.clone());
    if of.is_some_and(|of| !is_same(of, &meta)) {
        return Err(Fault::Changed);
    }
    let end = range.end.min(meta.size);
    if answer.range != (range.start..end) {
        return Err(Fault::Trouble(Trouble::new("another range than was asked for")));
    }
    let mut body = answer.into_stream();
    while let Some(chunk) = body.next().await {
        let chunk = chunk?;
        if chunk.len() as u64 > end - *at {
            return Err(Fault::Trouble(Trouble::new("a body longer than was asked for")));
        }
        put(*at, &chunk);
        *at += chunk.len() as u64;
    }
    if *at < end {
        return Err(Fault::Trouble(Trouble::new("a body that ended early")));
    }
    Ok(meta)
}
