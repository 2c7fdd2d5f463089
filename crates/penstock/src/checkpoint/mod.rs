//! What there is: the catalogue of a checkpoint's tensors, from headers alone.
//!
//! * [`Dtype`], [`TensorInfo`]: one tensor's entry.
//! * `header`: one object's header, checked as strictly as the `safetensors` crate does, and duplicates besides.
//! * `index`: the shard index (`model.safetensors.index.json`).
//! * `source`: from what a user gave (a file, a directory, a glob, a hub cache) to a list of objects.
//! * [`Checkpoint`]: all of it together; opened with all headers read in parallel.
//!
//! Nothing here reads tensor data, and nothing is trusted: every byte range in a catalogue was checked to lie in its
//! object and to have the size that its shape and dtype say.

mod catalogue;
mod dtype;
mod header;
mod index;
mod source;
mod tensor;

pub use catalogue::{Checkpoint, ObjectInfo};
pub use dtype::Dtype;
pub use header::{Header, MAX_HEADER_BYTES, ParsedTensor};
pub use index::ShardIndex;
pub use source::{Source, resolve};
pub use tensor::TensorInfo;
