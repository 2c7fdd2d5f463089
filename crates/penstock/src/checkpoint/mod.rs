//! What there is: the tensors of a checkpoint, from headers alone.
//!
//! * [`Checkpoint`]: the catalogue of all tensors, opened from files, directories, indexes, globs.
//! * [`Dtype`], [`TensorInfo`]: what a tensor is and where its bytes are.
//! * [`header`]: the header of one object, checked as strictly as safetensors checks it.
//! * [`ShardIndex`]: which shard holds which tensor.
//! * [`resolve`]: from what the user typed to the objects.
//!
//! * `source`: which objects a location means; `local_glob`, `location`: what it asks for that. `index`: the index of
//!   shards.
//! * `open_all`: the headers of many objects at once; `json`, `layout`: what is checked of one. `sniff`: what a file is
//!   that is no safetensors file. `errors`: what to say when there is nothing to load.
//! * `verifying`: the manifests beside objects, found before anything of those is read. `signed`: what a signature says
//!   of objects.
//! * `catalogue`: the tensors of all objects; `tensor`, `dtype`: one of them. `sharing`: what processes that load one
//!   checkpoint together have to know of it.
//!
//! Nothing here reads a tensor's bytes, and nothing knows where they will go.

mod catalogue;
mod dtype;
mod errors;
pub mod header;
mod index;
mod json;
mod layout;
mod local_glob;
mod location;
mod open_all;
mod sharing;
mod signed;
mod sniff;
mod source;
mod tensor;
mod verifying;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use catalogue::{Checkpoint, ObjectInfo};
pub use dtype::Dtype;
pub use errors::is_nearly_url;
pub use header::{Header, ParsedTensor};
pub use index::ShardIndex;
pub use location::without_file_scheme;
pub use signed::{Algorithm, Signed, SignedFile};
pub use source::{Resolved, ResolvedIndex, resolve};
pub use tensor::TensorInfo;
pub use verifying::{Verification, read_manifest};
