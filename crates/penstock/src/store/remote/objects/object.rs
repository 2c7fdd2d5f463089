//! An open object of a remote store.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use object_store::ObjectMeta;
use object_store::path::Path;

use super::fetch::{Counters, add, once, with_retries};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Window;
use crate::store::block_map::to_usize;
use crate::store::remote::http::context::LoadContext;
use crate::store::remote::provider::backend::Backend;
use crate::store::remote::request::latency::HedgePermit;
use crate::store::remote::request::outcome::Stop;
use crate::store::{Access, Identity, Object, ReadContext};

/// A pinned version of an object.
pub(crate) struct RemoteObject {
    pub(crate) location: String,
    pub(crate) backend: Arc<Backend>,
    pub(crate) path: Path,
    pub(crate) meta: ObjectMeta,
    /// Its first bytes, if opening it brought them.
    pub(crate) head: Vec<u8>,
    pub(crate) context: Arc<LoadContext>,
}

impl RemoteObject {
    /// Hands the bytes of `range` to `write` with their offsets, as they come.
    fn read(&self, range: Range<u64>, cx: &mut ReadContext, mut write: impl FnMut(u64, &[u8])) -> Result<()> {
        if range.end > self.meta.size {
            let cause = format!("a read beyond the end of the object's {} bytes", self.meta.size);
            return Err(Error::new(ErrorKind::Storage, cause).object(&self.location).range(range));
        }
        let head = if cx.afresh { &[][..] } else { &self.head[..] };
        let held = head.len().clamp(to_usize(range.start), to_usize(range.end));
        if let Some(held) = head.get(to_usize(range.start)..held).filter(|held| !held.is_empty()) {
            write(range.start, held);
        }
        let rest = range.start.max(head.len() as u64)..range.end;
        if rest.is_empty() { Ok(()) } else { self.fetch(rest, cx, write) }
    }

    /// As [`RemoteObject::read`], from the store. Where that takes far longer than ranges usually do, a second request
    /// goes for what is missing, and the one that is done first counts. Both are driven by this thread, and both bring
    /// the same bytes to the same places, so neither can do the other any harm.
    fn fetch(&self, range: Range<u64>, cx: &mut ReadContext, write: impl FnMut(u64, &[u8])) -> Result<()> {
        let (counters, reached, hedged) = (Counters::default(), Cell::new(range.start), Cell::new(false));
        let (write, taken_back) = (RefCell::new(write), Cell::new(false));
        let put = |offset, bytes: &[u8]| {
            (write.borrow_mut())(offset, bytes);
            add(&counters.bytes, bytes.len() as u64);
            taken_back.set(taken_back.get() || bytes.is_empty());
        };
        let put_first = |offset, bytes: &[u8]| {
            put(offset, bytes);
            reached.set(offset + bytes.len() as u64);
        };
        let began = Instant::now();
        let work = async {
            let done = {
                let first = self.fetch_range(range.clone(), &counters, put_first);
                let second = async {
                    let _hedge = self.until_slow(began).await;
                    hedged.set(true);
                    self.fetch_range(reached.get()..range.end, &counters, put).await
                };
                tokio::pin!(first, second);
                // Where one gives up the other goes on. What the first says of it counts.
                tokio::select! {
                    biased;
                    done = &mut first => match done {
                        Err(error) if hedged.get() => second.await.map_err(|_| error),
                        done => done,
                    },
                    done = &mut second => match done {
                        Err(_) => first.await,
                        done => done,
                    },
                }
            };
            match done {
                // What one took back may lie over what the other had brought.
                Ok(()) if hedged.get() && taken_back.get() => {
                    self.fetch_range(range.clone(), &counters, put).await
                }
                done => done,
            }
        };
        let done = self.context.block_on(work, |done| done.is_ok() && !hedged.get());
        cx.calls += counters.requests.get();
        cx.throttled += counters.throttled.get();
        cx.network_bytes += counters.bytes.get();
        match done {
            Ok(Ok(())) => {
                self.context.latency.came(range.end - range.start, began.elapsed());
                Ok(())
            }
            Ok(Err(Stop::Tell(error))) | Err(error) => Err(error),
            Ok(Err(Stop::Region(_) | Stop::Empty)) => Err(super::failure::changed()),
        }
        .map_err(|error| error.object(&self.location).range(range.clone()))
    }

    /// Asks for `range`, and again from where it stopped, and hands its bytes to `put`.
    async fn fetch_range(
        &self,
        range: Range<u64>,
        counters: &Counters,
        mut put: impl FnMut(u64, &[u8]),
    ) -> Result<(), Stop> {
        let mut at = range.start;
        with_retries(&self.backend, &self.context, true, counters, async || {
            let before = at;
            if before >= range.end {
                // The last answer went wrong after all of it had come.
                return Ok(());
            }
            let done =
                once(&self.backend, &self.path, before..range.end, Some(&self.meta), &mut at, &mut put).await;
            done.map(drop).map_err(|fault| (fault, at > before))
        })
        .await
    }

    /// Waits until a range that was first asked for at `began` is slow for this load, and may be asked for again.
    async fn until_slow(&self, began: Instant) -> HedgePermit<'_> {
        let floor = self.backend.policy.hedge_after;
        loop {
            let due = self.context.latency.hedge_after(floor);
            match due.map(|due| due.saturating_sub(began.elapsed())) {
                Some(Duration::ZERO) => match self.context.latency.hedge() {
                    Some(hedge) => return hedge,
                    None => tokio::time::sleep(floor).await,
                },
                // What is slow may be another time by then.
                Some(rest) => tokio::time::sleep(rest).await,
                None => tokio::time::sleep(floor).await,
            }
        }
    }
}

impl Object for RemoteObject {
    fn location(&self) -> &str {
        &self.location
    }

    fn bytes(&self) -> u64 {
        self.meta.size
    }

    fn identity(&self) -> Identity {
        identity(&self.meta)
    }

    fn access(&self) -> Option<Access> {
        Some(Access {
            provider: self.backend.provider.name(),
            endpoint: self.backend.endpoint.clone(),
            region: self.backend.region.clone(),
            credentials: self.backend.credentials().into_owned(),
        })
    }

    fn read_into(&self, offset: u64, mut into: Window<'_>, cx: &mut ReadContext) -> Result<()> {
        let range = offset..offset.saturating_add(into.len() as u64);
        self.read(range, cx, |at, bytes| into.write(to_usize(at - offset), bytes))
    }

    fn read_scattered(&self, into: &mut [(u64, Window<'_>)], cx: &mut ReadContext) -> Result<()> {
        let end = |(offset, window): &(u64, Window<'_>)| offset.saturating_add(window.len() as u64);
        let (Some((begin, _)), Some(last)) = (into.first(), into.last()) else { return Ok(()) };
        self.read(*begin..end(last), cx, |at, bytes| scatter(into, at, bytes))
    }

    fn scatters(&self) -> bool {
        true
    }

    fn read_to_staging(
        &self,
        range: Range<u64>,
        mut buffer: Window<'_>,
        cx: &mut ReadContext,
    ) -> Result<usize> {
        let len = to_usize(range.end - range.start);
        self.read_into(range.start, buffer.part(0, len), cx).map(|()| 0)
    }

    fn is_cached(&self, _: &Range<u64>) -> Option<bool> {
        Some(false)
    }

    /// There is nothing left to ask: every answer was compared with the pinned version, whatever the store holds by now.
    fn verify_unchanged(&self) -> Result<()> {
        Ok(())
    }
}

/// What stands for a version, in a form from which [`version`] makes it again.
pub(crate) fn identity(meta: &ObjectMeta) -> Identity {
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    Identity(format!("{}\n{}\n{}\n{}", meta.size, text(&meta.e_tag), text(&meta.version), meta.last_modified))
}

/// The identity of an object that is known by its size and a digest.
pub(crate) fn tagged(bytes: u64, tag: &str) -> Identity {
    // As an object that has no date: the epoch stands for that.
    Identity(format!("{bytes}\n\"{tag}\"\n\n1970-01-01 00:00:00 UTC"))
}

/// Whether an object that was listed is the version that was once opened, as far as both say: listings give finer times
/// than answers, and not all name a tag. Weak tags must be of the same time too: alike, they mean bytes of the same meaning.
/// Where neither tag nor version nor time can be compared, it may not be.
pub(crate) fn is_likely(listed: &Identity, opened: &Identity) -> bool {
    let path = Path::default();
    let (Some(listed), Some(opened)) = (version(&path, listed), version(&path, opened)) else { return false };
    let time = |meta: &ObjectMeta| Some(meta.last_modified.timestamp()).filter(|time| *time > 0);
    let of_one_time = || time(&listed).is_some() && time(&listed) == time(&opened);
    let equal = match (&listed.e_tag, &opened.e_tag, &listed.version, &opened.version) {
        (Some(one), Some(other), ..) if is_strong(one) && is_strong(other) => opaque(one) == opaque(other),
        (Some(one), Some(other), ..) => opaque(one) == opaque(other) && of_one_time(),
        (_, _, Some(listed), Some(opened)) => listed == opened,
        _ => of_one_time(),
    };
    equal && listed.size == opened.size
}

/// Whether a tag says that bytes are the same, and not only what they mean (RFC 9110, 8.8.1).
pub(crate) fn is_strong(tag: &str) -> bool {
    !tag.starts_with("W/")
}

/// A tag without what stands around it. Azure's listings leave the quotes out.
fn opaque(tag: &str) -> &str {
    tag.trim_start_matches("W/").trim_matches('"')
}

/// Bytes of the version that an identity stands for, if something names these bytes and no others: a strong tag, a
/// version, or a date after which more than a minute has passed (RFC 9110, 8.8.2.2).
///
/// # Errors
/// What is missing.
pub(crate) fn bytes_of_named(identity: &Identity) -> Result<u64, Cow<'static, str>> {
    const SETTLED: i64 = 60;
    let Some(meta) = version(&Path::default(), identity) else {
        return Err("it is no version of a remote object".into());
    };
    if meta.version.is_some() || meta.e_tag.as_deref().is_some_and(is_strong) {
        return Ok(meta.size);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    match meta.last_modified.timestamp() {
        // The epoch stands for a date that was not given.
        0 if meta.e_tag.is_some() => {
            Err("the server gives this object's versions no name but a weak ETag".into())
        }
        0 => Err("the server gives this object's versions no name".into()),
        written if i64::try_from(now).unwrap_or(i64::MAX) - written < SETTLED => {
            Err("the object was written less than a minute ago, and only its date names its version".into())
        }
        _ => Ok(meta.size),
    }
}

/// The version that an identity stands for.
pub(crate) fn version(path: &Path, identity: &Identity) -> Option<ObjectMeta> {
    let mut parts = identity.0.split('\n');
    let size = parts.next()?.parse().ok()?;
    let mut text = || parts.next().map(|part| Some(part.to_owned()).filter(|part| !part.is_empty()));
    let (e_tag, version) = (text()?, text()?);
    let last_modified = parts.next()?.parse().ok()?;
    Some(ObjectMeta { location: path.clone(), last_modified, size, e_tag, version })
}

/// Writes those of `bytes`, which begin at `at`, that windows want.
fn scatter(into: &mut [(u64, Window<'_>)], at: u64, bytes: &[u8]) {
    let end = at + bytes.len() as u64;
    let first = into.partition_point(|(offset, window)| offset + window.len() as u64 <= at);
    for (offset, window) in into[first..].iter_mut().take_while(|(offset, _)| *offset < end) {
        let (from, to) = (at.max(*offset), end.min(*offset + window.len() as u64));
        window.write(to_usize(from - *offset), &bytes[to_usize(from - at)..to_usize(to - at)]);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// However bytes come in, every window has its own in the end, and nothing else was touched.
        #[test]
        fn windows_get_their_bytes_from_chunks_of_any_size(
            spans in prop::collection::vec((0usize..5, 0usize..9), 0..8), chunks in prop::collection::vec(1usize..11, 1..60),
        ) {
            let mut memory = [[0xEE; 9]; 8];
            let (mut into, mut at) = (Vec::new(), 0);
            for (row, (gap, len)) in memory.iter_mut().zip(&spans) {
                into.push(((at + gap) as u64, Window::from_slice(&mut row[..*len])));
                at += gap + len;
            }
            let (object, mut from) = ((0..at as u8).collect::<Vec<_>>(), 0);
            for chunk in chunks.into_iter().cycle().take(at) {
                let to = (from + chunk).min(at);
                scatter(&mut into, from as u64, &object[from..to]);
                from = to;
            }
            let mut at = 0;
            for (row, (gap, len)) in memory.iter().zip(&spans) {
                at += gap;
                prop_assert_eq!(&row[..*len], &object[at..at + len]);
                prop_assert!(row[*len..].iter().all(|byte| *byte == 0xEE));
                at += len;
            }
        }
    }

    #[test]
    fn an_identity_can_be_turned_back_into_the_version_it_stands_for() {
        for (e_tag, version_id) in [(Some("\"a\""), Some("7")), (None, None), (Some("W/\"x\""), None)] {
            let meta = ObjectMeta {
                location: Path::from("a/b"),
                last_modified: "2026-11-21T06:47:41.123Z".parse().unwrap(),
                size: 12,
                e_tag: e_tag.map(str::to_owned),
                version: version_id.map(str::to_owned),
            };
            assert_eq!(version(&meta.location, &identity(&meta)), Some(meta));
        }
        assert_eq!(version(&Path::from("a"), &Identity("12".into())), None);
        let digest = version(&Path::from("a"), &tagged(12, "abc")).unwrap();
        assert_eq!((digest.e_tag.as_deref(), digest.last_modified.timestamp()), (Some("\"abc\""), 0));
        assert_eq!(identity(&digest), tagged(12, "abc"));
    }

    #[test]
    fn what_was_listed_is_compared_by_what_both_sides_say() {
        let of = |size, tag: &str, version: &str, time: &str| {
            Identity(format!("{size}\n{tag}\n{version}\n2026-11-21 06:47:{time} UTC"))
        };
        let opened = of(1, "\"a\"", "7", "41");
        // A weak tag is a hint, and the time has to be the same too.
        assert!(is_likely(&of(1, "W/\"a\"", "", "41"), &opened));
        assert!(!is_likely(&of(1, "W/\"a\"", "", "59"), &opened));
        let undated = Identity("1\nW/\"a\"\n\n1970-01-01 00:00:00 UTC".into());
        assert!(!is_likely(&undated, &undated));
        assert!(!is_likely(&of(1, "\"b\"", "7", "41"), &opened));
        assert!(is_likely(&of(1, "", "7", "59"), &opened));
        // Without a tag or a version, the second of the last change has to do.
        assert!(is_likely(&of(1, "", "", "41.300"), &opened));
        assert!(!is_likely(&of(1, "", "", "42"), &opened));
        assert!(!is_likely(&of(2, "\"a\"", "7", "41"), &opened));
        assert!(!is_likely(&Identity(String::new()), &opened));
    }
}
