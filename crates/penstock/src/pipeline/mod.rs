//! Blocks in motion: readers, the way to host or device memory, and the delivery of finished tensors.
//!
//! * [`Session`] (`session`): one load. Its owner attaches destinations in plan order, as many as it wants in flight,
//!   and takes tensors as they land; readers wait for destinations (back-pressure) and for nothing else.
//! * [`Canceller`]: ends a load from another thread.
//! * [`Mapped`] (`mapped`): the other way to have tensors, as views of mapped files; nothing moves but pages.
//! * [`Prefetch`] (`prefetch`): what may be done before either, bringing files into the page cache.
//! * `reader`: the two loops, to host memory in place and to a device through staging buffers; `reader_pool`: their
//!   threads; `reader_stats`: what each counts and, for a trace, records.
//! * `shared`: what the owner and the readers share; `queue`: the blocks, and who takes which; `reader_ranges`: those
//!   that are to be fetched, as runs of neighbours.
//! * `sampler`: what readers bring in, told to the tuner, which says how many of them run.
//! * `landing`: where offsets of a plan become addresses; with `Session::attach`, which takes them from callers, the
//!   only unsafe code of this module.
//! * `objects`: the load's objects, opened when first needed and checked to be the version that was catalogued.
//!
//! A tensor has **landed** when its last byte is in its final memory, copies included: the reader saw the event of the
//! last copy done. Work that the consumer submits afterwards, to whatever stream, sees the bytes; no synchronisation
//! of any stream is left for the consumer to do. In the other direction, copies wait for a fence in the consumer's
//! stream, since memory from a caching allocator may still be in use by work queued there.
//!
//! Ending, in whatever way, means: readers stopped and joined, copies ended, buffers given back, files closed.

mod landing;
mod mapped;
mod objects;
mod prefetch;
mod queue;
mod reader;
mod reader_pool;
mod reader_ranges;
mod reader_stats;
mod sampler;
mod session;
mod shared;

pub use mapped::Mapped;
pub use prefetch::Prefetch;
pub use session::{Next, Session, Target};
pub use shared::Canceller;
