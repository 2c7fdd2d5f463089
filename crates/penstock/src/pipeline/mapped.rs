//! Tensors as views of mapped files: no copy, no memory of their own, pages shared with every process that maps them.
//!
//! Touching a page that is not in memory stops the thread that touches it, and one thread faulting alone is the
//! slowest way to read a file. [`Mapped::prefault`] therefore brings pages in with many threads before anyone touches
//! them: it asks for reading ahead (so that the disk sees large requests), then makes the pages present. A page that
//! cannot be read is an error there; for whoever touches it unprepared it is a SIGBUS, which ends the process.

use std::ops::Range;
use std::sync::Arc;

use super::reader_pool::guarded;
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::FileMapping;
use crate::store::Object;
use crate::threads::in_order;

/// Bytes that one thread makes present at a time.
const STEP: u64 = 8 << 20;

/// A checkpoint's files, mapped.
pub struct Mapped {
    checkpoint: Arc<Checkpoint>,
    files: Vec<Option<File>>,
}

impl Mapped {
    /// Maps the objects that hold any of `tensors` (indices into the checkpoint's tensors).
    ///
    /// # Errors
    /// `Changed` where a file is no longer the one whose header was read; otherwise as [`Object::map`].
    pub fn new(checkpoint: Arc<Checkpoint>, tensors: &[usize]) -> Result<Self> {
        let mut files: Vec<_> = checkpoint.objects().iter().map(|_| None).collect();
        for tensor in tensors {
            let index = checkpoint.tensors()[*tensor].object as usize;
            if files[index].is_none() {
                let object = checkpoint.open_object(index)?;
                let mapping = Arc::new(object.map()?);
                // Views are made of addresses, so what the store says is checked.
                if (mapping.len() as u64) < checkpoint.objects()[index].bytes {
                    let cause = format!("only {} bytes of it were mapped", mapping.len());
                    return Err(Error::new(ErrorKind::Storage, cause).object(object.location()));
                }
                files[index] = Some((object, mapping));
            }
        }
        Ok(Self { checkpoint, files })
    }

    /// Verifies the bytes of `tensors` with `threads` threads, where there is a manifest: else each [`Mapped::view`] would, in
    /// its own.
    ///
    /// # Errors
    /// `Integrity` where they are not what they should be; as [`Mapped::prefault`] where a page cannot be read.
    pub fn verify(&self, tensors: &[usize], threads: usize) -> Result<()> {
        if self.checkpoint.verification_block().is_none() {
            return Ok(());
        }
        let steps = steps(&self.checkpoint, tensors).into_iter();
        let steps: Vec<_> =
            steps.filter_map(|(file, range)| Some((file, self.files[file].as_ref()?, range))).collect();
        in_parallel(threads, &steps, |(_, (object, _), range)| Ok(object.prefetch(range.clone())))?;
        in_parallel(threads, &steps, |(file, (object, mapping), range)| {
            object.verify_mapped(mapping, range).map_err(|error| self.name_all(error, tensors, *file))
        })?;
        Ok(())
    }

    /// The mapping that holds the tensor, and where its bytes begin there: verified, where there is a manifest.
    ///
    /// # Errors
    /// `TensorNotFound` for a tensor whose object was not mapped; as [`Mapped::verify`].
    pub fn view(&self, tensor: usize) -> Result<(Arc<FileMapping>, Range<u64>)> {
        let info = &self.checkpoint.tensors()[tensor];
        match &self.files[info.object as usize] {
            Some((object, mapping)) => {
                object
                    .verify_mapped(mapping, &info.range)
                    .map_err(|error| self.name_all(error, &[tensor], info.object as usize))?;
                Ok((Arc::clone(mapping), info.range.clone()))
            }
            None => Err(Error::new(ErrorKind::TensorNotFound, "its file was not mapped").tensor(&*info.name)),
        }
    }

    /// Makes the pages of `tensors` present, with `threads` threads.
    ///
    /// # Errors
    /// `Storage` where a page cannot be read, `Changed` where a file is no longer the one that was mapped.
    pub fn prefault(&self, tensors: &[usize], threads: usize) -> Result<()> {
        let steps = steps(&self.checkpoint, tensors).into_iter();
        let steps: Vec<_> =
            steps.filter_map(|(file, range)| Some((self.files[file].as_ref()?, range))).collect();
        // First everything is asked for, and only then is anything waited for: alternating the two leaves the disk idle
        // between steps (1.0 s instead of 0.7 s for 2 GiB on the 2-core machine of benchmarks/NOTEBOOK.md).
        let missing =
            in_parallel(threads, &steps, |((object, _), range)| Ok(object.prefetch(range.clone())))?;
        // What is cached already costs the thread that touches it less than populating would.
        let missing: Vec<_> = steps.iter().zip(missing).filter(|(_, missing)| *missing).collect();
        in_parallel(threads, &missing, |(((object, mapping), range), _)| {
            let (start, len) = (to_usize(range.start), to_usize(range.end - range.start));
            // Where an old kernel cannot do it, the pages are at least being read ahead.
            mapping.populate(start, len).map(drop).map_err(|error| {
                // The kernel does not tell a page that is gone from one that cannot be read.
                let error = object.verify_unchanged().err().unwrap_or(error);
                self.name_tensor(error.object(object.location()), tensors, object.as_ref(), mapping, range)
            })
        })?;
        // What was cached was not touched, and may be gone by now.
        self.files.iter().flatten().try_for_each(|(object, _)| object.verify_unchanged())
    }

    /// Adds those of `tensors` that the failed bytes of a file belong to.
    fn name_all(&self, error: Error, tensors: &[usize], file: usize) -> Error {
        let Some(range) = error.byte_range() else { return error };
        let infos = tensors.iter().map(|tensor| &self.checkpoint.tensors()[*tensor]);
        let touched = infos.filter(|info| {
            info.object as usize == file && info.range.start < range.end && range.start < info.range.end
        });
        let names: Vec<_> = touched.map(|info| &*info.name).collect();
        let error = error.detail("tensors", names.join(", "));
        match names.first() {
            Some(name) => error.tensor(*name),
            None => error,
        }
    }

    /// Adds the first tensor of `range` whose pages cannot be made present.
    fn name_tensor(
        &self,
        error: Error,
        tensors: &[usize],
        object: &dyn Object,
        mapping: &FileMapping,
        range: &Range<u64>,
    ) -> Error {
        let infos = tensors.iter().map(|tensor| &self.checkpoint.tensors()[*tensor]);
        let of_range = infos.filter(|info| {
            let same = self.checkpoint.objects()[info.object as usize].location == object.location();
            same && info.range.start < range.end && range.start < info.range.end
        });
        let part = |info: &TensorInfo| info.range.start.max(range.start)..info.range.end.min(range.end);
        let mut failing = of_range.filter(|info| {
            let part = part(info);
            mapping.populate(to_usize(part.start), to_usize(part.end - part.start)).is_err()
        });
        match failing.next() {
            Some(info) => error.tensor(&*info.name).range(part(info)),
            None => error.range(range.clone()),
        }
    }
}

/// The bytes of `tensors` (indices into the checkpoint's), merged and cut into steps, in the order of the objects: the
/// numbers of objects, and ranges.
pub(super) fn steps(checkpoint: &Checkpoint, tensors: &[usize]) -> Vec<(usize, Range<u64>)> {
    let infos = tensors.iter().map(|tensor| &checkpoint.tensors()[*tensor]);
    let mut ranges: Vec<_> = infos.map(|info| (info.object as usize, info.range.clone())).collect();
    ranges.sort_by_key(|(object, range)| (*object, range.start));
    let mut steps: Vec<(usize, Range<u64>)> = Vec::new();
    for (object, range) in ranges {
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min((start / STEP + 1) * STEP);
            match steps.last_mut() {
                Some((last, step)) if *last == object && step.end == start && start % STEP != 0 => {
                    step.end = end;
                }
                _ => steps.push((object, start..end)),
            }
            start = end;
        }
    }
    steps
}

type File = (Arc<dyn Object>, Arc<FileMapping>);

/// What `work` makes of each item, with several threads. A panic is its failure.
fn in_parallel<T: Sync, R: Send>(
    threads: usize,
    items: &[T],
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let guarded = |item: &T| guarded(|| work(item));
    in_order(items, threads, "penstock-map", guarded).map_err(|(_, error)| error)
}

fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
