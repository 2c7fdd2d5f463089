//! Answers that do not say how large the object is that a part of it comes from: `Content-Range: bytes 0-99/*`, which HTTP
//! allows to a server that makes the object while it is read, or that sits in front of others.
//!
//! Where reading ends has to be known before it begins, so the server is asked for it with HEAD, once for each
//! version (or by each of those who read at once, before the first answer). A signed request cannot be asked so: its
//! signature is for reading.

use std::sync::{Arc, Mutex, PoisonError};

use http::header::{ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, LAST_MODIFIED};
use http::{HeaderMap, HeaderValue};
use url::Url;

use super::response_recorder::ResponseRecorder;

/// What was said last of the objects behind one client.
#[derive(Debug, Clone, Default)]
pub(crate) struct Totals(Arc<Mutex<Option<(Url, Version, u64)>>>);

/// What names a version: its tag and its date.
type Version = [Option<HeaderValue>; 2];

/// Whether an answer with a part of an object leaves open how large it is.
pub(crate) fn is_missing(headers: &HeaderMap) -> bool {
    range(headers).is_some_and(|range| range.ends_with("/*"))
}

/// Says in `headers`, which are of an answer from `url`, how large the object is. `signed` says that only what was asked
/// may be asked.
///
/// # Errors
/// Nothing says it.
pub(crate) async fn tell(
    headers: &mut HeaderMap,
    totals: &Totals,
    client: &reqwest::Client,
    url: Url,
    signed: bool,
) -> Result<(), Untold> {
    let version = version(headers);
    let known = totals.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
    // Without a name, another version would be taken for this one.
    let known = known.filter(|(of, named, _)| *of == url && *named == version && version != [None, None]);
    let total = match known {
        Some((_, _, total)) => Some(total),
        None if signed => None,
        None => ask(client, url.clone(), &version).await,
    };
    // Some answer HEAD with the length of the answer, which is none.
    let total = total.filter(|total| last_byte(headers).is_some_and(|last| last < *total));
    let told = total.zip(range(headers)).and_then(|(total, range)| {
        HeaderValue::try_from(format!("{}{total}", range.strip_suffix('*')?)).ok().map(|range| (total, range))
    });
    let Some((total, range)) = told else {
        ResponseRecorder::note(|seen| seen.no_total = true);
        return Err(Untold);
    };
    headers.insert(CONTENT_RANGE, range);
    *totals.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((url, version, total));
    Ok(())
}

async fn ask(client: &reqwest::Client, url: Url, version: &Version) -> Option<u64> {
    let request = client.head(url).header(ACCEPT_ENCODING, "identity");
    let answer = request.send().await.ok().filter(|answer| answer.status().is_success())?;
    let headers = answer.headers();
    let others = self::version(headers);
    let is_other = |(one, other): (&Option<HeaderValue>, &Option<HeaderValue>)| matches!((one, other), (Some(one), Some(other)) if one != other);
    if version.iter().zip(&others).any(is_other) {
        return None;
    }
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

fn version(headers: &HeaderMap) -> Version {
    [ETAG, LAST_MODIFIED].map(|name| headers.get(name).cloned())
}

fn range(headers: &HeaderMap) -> Option<String> {
    let range = headers.get(CONTENT_RANGE)?.to_str().ok()?.trim();
    range.starts_with("bytes ").then(|| range.to_owned())
}

/// The last byte of the part that an answer holds.
fn last_byte(headers: &HeaderMap) -> Option<u64> {
    range(headers)?.strip_suffix("/*")?.rsplit_once('-')?.1.trim().parse().ok()
}

/// Nothing says how large the object is.
#[derive(Debug)]
pub(crate) struct Untold;

impl std::fmt::Display for Untold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("nothing says how large the object is")
    }
}

impl std::error::Error for Untold {}
