//! An object whose bytes are compared with a manifest before anyone gets them.
//!
//! It stands around another object and reads as that one does, but in whole blocks of the manifest. The thread that reads
//! hashes each block where it landed. Every read returns bytes that were verified, or fails: there is no way around it, so
//! headers, indexes and tensors are covered alike. Nothing is read a second time, but for a block that came damaged over
//! a network.
//!
//! What a read does not want of its first and last block goes to scratch memory, or to the room that is left in a staging
//! buffer.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use super::block_map::to_usize;
use super::{ALIGNMENT_PADDING, Access, Identity, Object, ReadContext, checked_range};
use crate::error::{Error, ErrorKind, Result};
use crate::manifest::{FileHashes, Manifest};
use crate::memory::{FileMapping, PinnedSpan, Region, Window};

/// An object that is what its manifest says.
pub(crate) struct VerifiedObject {
    inner: Arc<dyn Object>,
    manifest: Arc<Manifest>,
    /// Which of the manifest's files it is.
    place: usize,
    /// Of a mapping: which blocks were verified.
    mapped: OnceLock<Box<[AtomicBool]>>,
    /// How many blocks were fetched once more.
    again: AtomicU64,
}

impl VerifiedObject {
    /// `inner`, which is the file called `name` of `manifest`.
    ///
    /// # Errors
    /// `Integrity` where the manifest has no such file, or one of another size.
    pub(crate) fn new(inner: Arc<dyn Object>, manifest: &Arc<Manifest>, name: &str) -> Result<Self> {
        let Some(place) = manifest.index_of(name) else {
            return Err(Error::new(ErrorKind::Integrity, "the manifest does not have this file")
                .object(inner.location())
                .remedy(
                    "Take away what does not belong there, or make the manifest again (penstock manifest)",
                ));
        };
        let (is, should) = (inner.bytes(), manifest.files()[place].bytes());
        if is != should {
            let cause = format!("the file has {is} bytes, and the manifest says {should}");
            return Err(Error::new(ErrorKind::Integrity, cause)
                .object(inner.location())
                .range(is.min(should)..is.max(should))
                .remedy(REMEDY));
        }
        let (mapped, again) = (OnceLock::new(), AtomicU64::new(0));
        Ok(Self { inner, manifest: Arc::clone(manifest), place, mapped, again })
    }

    fn hashes(&self) -> &FileHashes {
        &self.manifest.files()[self.place]
    }

    fn block_bytes(&self) -> u64 {
        self.hashes().block_bytes()
    }

    /// The bytes of the block with that number.
    fn range(&self, block: u64) -> Range<u64> {
        let start = block * self.block_bytes();
        start..self.hashes().bytes().min(start + self.block_bytes())
    }

    /// The whole blocks that `range` touches.
    fn whole(&self, range: &Range<u64>) -> Range<u64> {
        let (block, bytes) = (self.block_bytes(), self.hashes().bytes());
        range.start / block * block..bytes.min(range.end.next_multiple_of(block))
    }

    /// Fills the windows, whose offsets rise, and verifies every block that they touch.
    fn read(&self, into: &mut [(u64, Window<'_>)], cx: &mut ReadContext) -> Result<()> {
        let mut wanted = Vec::with_capacity(into.len());
        for (offset, window) in into.iter().filter(|(_, window)| !window.is_empty()) {
            wanted.push(checked_range(self, *offset, window.len())?);
        }
        let gaps = gaps(&wanted, self.block_bytes(), self.hashes().bytes());
        let excess: u64 = gaps.iter().map(|gap| gap.end - gap.start).sum();
        let mut scratch = scratch(to_usize(excess), cx)?;
        let done = self.read_parts(into, &gaps, scratch.as_mut(), cx);
        cx.verification_scratch = scratch.or(cx.verification_scratch.take());
        cx.verification_excess_bytes += excess;
        done
    }

    fn read_parts(
        &self,
        into: &mut [(u64, Window<'_>)],
        gaps: &[Range<u64>],
        scratch: Option<&mut Region>,
        cx: &mut ReadContext,
    ) -> Result<()> {
        let mut parts = Vec::with_capacity(into.len() + gaps.len());
        for (offset, window) in into.iter_mut().filter(|(_, window)| !window.is_empty()) {
            let len = window.len();
            // Hashed right after it was written.
            parts.push((*offset, window.part(0, len).temporal()));
        }
        if let Some(scratch) = scratch {
            let mut room = scratch.window();
            for gap in gaps {
                let (part, rest) = room.split_at(to_usize(gap.end - gap.start));
                parts.push((gap.start, part));
                room = rest;
            }
        }
        parts.sort_unstable_by_key(|(offset, _)| *offset);
        match &mut parts[..] {
            [] => return Ok(()),
            [(offset, window)] => {
                let len = window.len();
                self.inner.read_into(*offset, window.part(0, len), cx)?;
            }
            parts => self.inner.read_scattered(parts, cx)?,
        }
        self.verify(&mut parts, cx)
    }

    /// Verifies whole blocks that were read: their bytes are in `parts`, in order. A block that came damaged over a network is
    /// fetched once more.
    fn verify(&self, parts: &mut [(u64, Window<'_>)], cx: &mut ReadContext) -> Result<()> {
        let (block_bytes, bytes) = (self.block_bytes(), self.hashes().bytes());
        let mut damaged = Vec::new();
        let mut hasher = None;
        let (mut read, mut verified) = (0, 0);
        for (offset, window) in parts.iter() {
            read += window.len() as u64;
            let mut at = 0;
            while at < window.len() {
                let place = *offset + at as u64;
                let block = place / block_bytes;
                let end = bytes.min((block + 1) * block_bytes);
                let take = (window.len() - at).min(to_usize(end - place));
                if place.is_multiple_of(block_bytes) {
                    hasher = Some((place, self.hashes().hasher(block)));
                }
                // A part that does not go on where the last one ended is a bug of this file: what is not hashed to its end
                // is not counted, and so refused below.
                if let Some((next, hasher)) = hasher.as_mut().filter(|(next, _)| *next == place) {
                    // SAFETY: whoever read this part has filled it.
                    hasher.update(unsafe { window.assume_filled(at, take) });
                    *next += take as u64;
                    if *next == end {
                        if self.hashes().value(block) != Some(&hasher.value()) {
                            damaged.push(block);
                        }
                        verified += end - block * block_bytes;
                    }
                }
                at += take;
            }
        }
        if verified != read {
            let cause = format!("only {verified} of {read} bytes were verified: this is a bug of Penstock");
            return Err(Error::new(ErrorKind::Integrity, cause).object(self.location()));
        }
        for block in damaged {
            let range = self.range(block);
            let fresh = self.fetch_again(block, cx)?;
            for (offset, window) in parts.iter_mut() {
                let end = *offset + window.len() as u64;
                let (from, to) = (range.start.max(*offset), range.end.min(end));
                if from < to {
                    let bytes = &fresh[to_usize(from - range.start)..to_usize(to - range.start)];
                    window.write(to_usize(from - *offset), bytes);
                }
            }
        }
        cx.verified_bytes += verified;
        Ok(())
    }

    /// The bytes of a block that came damaged: fetched once more where a network may have damaged them, and verified.
    fn fetch_again(&self, block: u64, cx: &mut ReadContext) -> Result<Vec<u8>> {
        let range = self.range(block);
        if !self.inner.may_come_better() {
            return Err(self.mismatch(range));
        }
        let mut bytes = Vec::new();
        let len = to_usize(range.end - range.start);
        bytes
            .try_reserve_exact(len)
            .map_err(|error| Error::new(ErrorKind::Memory, format!("reading {len} bytes failed: {error}")))?;
        bytes.resize(len, 0);
        cx.afresh = true;
        let read = self.inner.read_into(range.start, Window::from_slice(&mut bytes), cx);
        cx.afresh = false;
        read?;
        let mut hasher = self.hashes().hasher(block);
        hasher.update(&bytes);
        if self.hashes().value(block) != Some(&hasher.value()) {
            return Err(self.mismatch(range).detail("fetched", 2));
        }
        self.again.fetch_add(1, Ordering::Relaxed);
        Ok(bytes)
    }

    fn mismatch(&self, range: Range<u64>) -> Error {
        Error::new(ErrorKind::Integrity, "these bytes are not what the manifest says")
            .object(self.location())
            .range(range)
            .remedy(REMEDY)
    }
}

const REMEDY: &str =
    "The file is damaged, was changed, or is not the manifest's: fetch it again from whoever published it";

/// Memory for `bytes` that no one wants: the context's, if it is long enough.
fn scratch(bytes: usize, cx: &mut ReadContext) -> Result<Option<Region>> {
    if bytes == 0 {
        return Ok(None);
    }
    match cx.verification_scratch.take().filter(|region| region.len() >= bytes) {
        Some(region) => Ok(Some(region)),
        None => Region::reserve(bytes).map(Some),
    }
}

/// What of the blocks that `wanted` touches is not wanted. Ranges rise and are apart.
fn gaps(wanted: &[Range<u64>], block: u64, bytes: u64) -> Vec<Range<u64>> {
    let mut gaps = Vec::new();
    let mut covered = 0;
    let mut add = |gap: Range<u64>| {
        if gap.start < gap.end {
            gaps.push(gap);
        }
    };
    let block_end = |at: u64| bytes.min(at.next_multiple_of(block));
    for range in wanted {
        let begin = range.start / block * block;
        if begin < block_end(covered) {
            add(covered..range.start);
        } else {
            add(covered..block_end(covered));
            add(begin..range.start);
        }
        covered = range.end;
    }
    add(covered..block_end(covered));
    gaps
}

impl Object for VerifiedObject {
    fn location(&self) -> &str {
        self.inner.location()
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn identity(&self) -> Identity {
        self.inner.identity()
    }

    fn read_into(&self, offset: u64, mut into: Window<'_>, cx: &mut ReadContext) -> Result<()> {
        let range = checked_range(self, offset, into.len())?;
        if cx.cached != Some(true) {
            let len = into.len();
            return self.read(&mut [(offset, into.part(0, len))], cx);
        }
        // What is copied from the page cache is hashed while it is in the processor's.
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min((at / self.block_bytes() + 1) * self.block_bytes());
            self.read(&mut [(at, into.part(to_usize(at - offset), to_usize(end - at)))], cx)?;
            at = end;
        }
        Ok(())
    }

    fn read_scattered(&self, into: &mut [(u64, Window<'_>)], cx: &mut ReadContext) -> Result<()> {
        self.read(into, cx)
    }

    fn scatters(&self) -> bool {
        self.inner.scatters()
    }

    fn read_to_staging(
        &self,
        range: Range<u64>,
        mut buffer: Window<'_>,
        cx: &mut ReadContext,
    ) -> Result<usize> {
        let len = to_usize(range.end - range.start);
        checked_range(self, range.start, len)?;
        let whole = self.whole(&range);
        let (blocks_len, room) = (to_usize(whole.end - whole.start), buffer.len());
        if len == 0 || blocks_len.saturating_add(ALIGNMENT_PADDING) > room {
            // A plan that was not made for blocks of this size.
            return self.read(&mut [(range.start, buffer.part(0, len))], cx).map(|()| 0);
        }
        let lead = to_usize(range.start - whole.start);
        cx.verification_excess_bytes += (blocks_len - len) as u64;
        if cx.cached == Some(true) {
            let mut at = whole.start;
            while at < whole.end {
                let end = whole.end.min(at + self.block_bytes());
                self.read(&mut [(at, buffer.part(to_usize(at - whole.start), to_usize(end - at)))], cx)?;
                at = end;
            }
            return Ok(lead);
        }
        let start = self.inner.read_to_staging(whole.clone(), buffer.part(0, room), cx)?;
        if start.checked_add(blocks_len).is_none_or(|end| end > room) {
            let cause =
                format!("the store says that it put {blocks_len} bytes at position {start} of {room}");
            return Err(Error::new(ErrorKind::Storage, cause).object(self.location()).range(range));
        }
        self.verify(&mut [(whole.start, buffer.part(start, blocks_len))], cx)?;
        Ok(start + lead)
    }

    fn map(&self) -> Result<FileMapping> {
        self.inner.map()
    }

    fn is_cached(&self, range: &Range<u64>) -> Option<bool> {
        self.inner.is_cached(range)
    }

    /// Nothing: what is pinned already was not verified, and is read as anything else.
    fn pinned(&self, _range: &Range<u64>) -> Option<PinnedSpan> {
        None
    }

    fn prefetch(&self, range: Range<u64>) -> bool {
        self.inner.prefetch(range)
    }

    fn access(&self) -> Option<Access> {
        self.inner.access()
    }

    fn may_come_better(&self) -> bool {
        self.inner.may_come_better()
    }

    fn avoid_direct(&self) {
        self.inner.avoid_direct();
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = self.inner.notes();
        if self.again.load(Ordering::Relaxed) > 0 {
            notes.push("blocks came damaged over the network and were fetched once more".into());
        }
        notes
    }

    fn verify_unchanged(&self) -> Result<()> {
        self.inner.verify_unchanged()
    }

    fn verification_block(&self) -> Option<u64> {
        Some(self.block_bytes())
    }

    fn verify_mapped(&self, mapping: &FileMapping, range: &Range<u64>) -> Result<()> {
        checked_range(self, range.start, to_usize(range.end.saturating_sub(range.start)))?;
        if (mapping.len() as u64) < self.hashes().bytes() {
            let cause = format!("only {} bytes of it were mapped", mapping.len());
            return Err(Error::new(ErrorKind::Storage, cause).object(self.location()));
        }
        let verified =
            self.mapped.get_or_init(|| (0..self.hashes().blocks()).map(|_| AtomicBool::new(false)).collect());
        if range.is_empty() {
            return Ok(());
        }
        let blocks = range.start / self.block_bytes()..range.end.div_ceil(self.block_bytes());
        for block in blocks {
            let is_verified = || verified[to_usize(block)].load(Ordering::Acquire);
            if is_verified() {
                continue;
            }
            let span = self.range(block);
            let (start, len) = (to_usize(span.start), to_usize(span.end - span.start));
            // A page that is gone is an error here, and for whoever touches it a SIGBUS.
            mapping.populate(start, len).map_err(|error| {
                let error = self.inner.verify_unchanged().err().unwrap_or(error);
                error.object(self.location()).range(span.clone())
            })?;
            let mut hasher = self.hashes().hasher(block);
            // SAFETY: the span lies in the mapping. Whoever writes to the file meanwhile changes what is hashed, but nothing here
            // relies on the bytes being the same twice: each is read once.
            hasher.update(unsafe { std::slice::from_raw_parts(mapping.as_ptr().add(start), len) });
            if self.hashes().value(block) != Some(&hasher.value()) {
                // Who got a view of a verified block may write to it: then another thread had verified it before.
                fence(Ordering::SeqCst);
                if !is_verified() {
                    return Err(self.mismatch(span));
                }
            }
            verified[to_usize(block)].store(true, Ordering::Release);
            fence(Ordering::SeqCst);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
