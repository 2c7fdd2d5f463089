//! One range of an object: asked for, and asked for again from where it stopped, until it is complete or given up.
//!
//! The body's chunks are handed on as they arrive, so that they are copied once, to where they belong. Every answer is
//! checked against what was asked: the range, the object's size, its version. A version is pinned when the object is
//! opened and asked for with every range (`If-Match`, a GCS generation), so what comes is of one version or an error.

use std::cell::Cell;
use std::ops::Range;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use object_store::path::Path;
use object_store::{Attribute, Attributes, GetOptions, GetRange, ObjectMeta};

use super::failure::{Verdict, changed, encoded, gave_up, judge};
use crate::store::remote::http::context::LoadContext;
use crate::store::remote::http::response_recorder::ResponseRecorder;
use crate::store::remote::provider::backend::Backend;
use crate::store::remote::request::outcome::{Fault, Stop};
use crate::store::remote::request::retry::{Attempts, TransientError};
use crate::store::remote::settings::address::Provider;

/// What was done for one range, by one request or by two.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) requests: Cell<u64>,
    /// Answers that said "too fast".
    pub(crate) throttled: Cell<u64>,
    pub(crate) bytes: Cell<u64>,
}

/// Waiting for a server is logged when it takes so long, once for each load.
const WORTH_A_WORD: Duration = Duration::from_secs(5);

/// Adds to a count.
pub(crate) fn add(count: &Cell<u64>, more: u64) {
    count.set(count.get() + more);
}

/// Does `attempt` until it succeeds or is given up. It says with a failure whether it had brought any bytes. `known` says
/// that something had come from the object before.
pub(crate) async fn with_retries<T>(
    backend: &Backend,
    context: &LoadContext,
    known: bool,
    counters: &Counters,
    mut attempt: impl AsyncFnMut() -> Result<T, (Fault, bool)>,
) -> Result<T, Stop> {
    let mut attempts = Attempts::new(&backend.policy, &context.budget, !known);
    let began = Instant::now();
    // Since when nothing has come.
    let mut since = None;
    let mut renewed = false;
    loop {
        let asked = Instant::now();
        add(&counters.requests, 1);
        let (done, seen) = ResponseRecorder::watch(attempt()).await;
        let (fault, progress) = match done {
            Ok(done) => {
                context.budget.came();
                return Ok(done);
            }
            Err(failed) => failed,
        };
        let error = match fault {
            Fault::Tell(error) => return Err(Stop::Tell(error)),
            Fault::TransientError(error) => error,
            Fault::Store(error) => match judge(backend, &error, &seen, known) {
                Verdict::Again(error) => error,
                Verdict::Expired(_) if !renewed => {
                    renewed = true;
                    backend.renew(asked);
                    continue;
                }
                Verdict::Expired(error) => return Err(Stop::Tell(error)),
                Verdict::Stop(stop) => return Err(stop),
            },
        };
        tracing::debug!(store = backend.provider.name(), failure = error.what, "a request failed");
        add(&counters.throttled, u64::from(error.throttled));
        let pause = attempts.failed(&error, progress, began.elapsed());
        let pause = pause.map_err(|exhausted| Stop::Tell(gave_up(backend, &exhausted, known)))?;
        let failing = if progress { asked } else { *since.get_or_insert(asked) };
        since = Some(failing);
        if failing.elapsed() + pause >= WORTH_A_WORD && context.is_first_warning() {
            tracing::warn!(
                "{} has kept this load waiting for {:.0} s ({}); the request is repeated until it succeeds or is given up",
                backend.provider.name(),
                failing.elapsed().as_secs_f64(),
                error.what
            );
        }
        tokio::time::sleep(pause).await;
    }
}

/// What a range is asked with, so that it comes from the version `of` and no other.
///
/// Not with a date: gateways to file systems compare it with times finer than the seconds that they told. Every answer's
/// own date is compared anyway.
pub(crate) fn pinned(provider: Provider, of: &ObjectMeta) -> GetOptions {
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
pub(crate) fn named(mut meta: ObjectMeta) -> ObjectMeta {
    meta.e_tag = meta.e_tag.filter(|tag| !tag.trim_matches('"').is_empty());
    meta.version = meta.version.filter(|version| !version.is_empty());
    meta
}

/// Whether two answers speak of the same version.
fn is_same(one: &ObjectMeta, other: &ObjectMeta) -> bool {
    let differ = |one: &Option<String>, other: &Option<String>| match (one, other) {
        (Some(one), Some(other)) => one != other,
        _ => false,
    };
    one.size == other.size
        && !differ(&one.e_tag, &other.e_tag)
        && !differ(&one.version, &other.version)
        && one.last_modified == other.last_modified
}

/// How the object is stored compressed, if it is: its bytes are not those that its reader is to get.
fn encoding(attributes: &Attributes) -> Option<String> {
    // Some programs leave the framing of their upload there, which the store has taken off.
    const NONE: [&str; 3] = ["", "identity", "aws-chunked"];
    let told = attributes.get(&Attribute::ContentEncoding)?.as_ref();
    let how =
        told.split(',').map(str::trim).find(|how| !NONE.iter().any(|none| how.eq_ignore_ascii_case(none)))?;
    Some(how.chars().filter(|c| !c.is_control()).take(40).collect())
}

/// How long to wait for the end of a body of which all bytes have come.
const END_PATIENCE: Duration = Duration::from_secs(1);

/// Asks once for `range`, and hands its bytes to `put` with their offsets. `at` says how far it came. Where the body
/// turns out not to be what was asked for, `put` gets no bytes at the offset from which on they have to come again.
///
/// The range may reach beyond the object's end only where its version is not known yet.
pub(crate) async fn once(
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
        return Err(Fault::Tell(changed()));
    }
    if let Some(how) = encoding(&answer.attributes) {
        return Err(Fault::Tell(encoded(backend.provider, &how)));
    }
    let end = range.end.min(meta.size);
    if answer.range != (range.start..end) {
        return Err(Fault::TransientError(TransientError::new("another range than was asked for")));
    }
    let mut body = answer.into_stream();
    loop {
        // All of it is there: its end is waited for so that the connection can be used again, and not for long.
        let next = match *at < end {
            true => body.next().await,
            false => tokio::time::timeout(END_PATIENCE, body.next()).await.unwrap_or(None),
        };
        let Some(chunk) = next else { break };
        let chunk = chunk?;
        if chunk.len() as u64 > end - *at {
            // Nor what came before that is taken for what was asked for: it is taken back.
            *at = range.start;
            put(*at, &[]);
            return Err(Fault::TransientError(TransientError::new("a body longer than was asked for")));
        }
        put(*at, &chunk);
        *at += chunk.len() as u64;
    }
    if *at < end {
        return Err(Fault::TransientError(TransientError::new("a body that ended early")));
    }
    Ok(meta)
}
