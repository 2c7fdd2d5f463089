//! Penstock's core: from a checkpoint to memory, at the limit of the hardware.
//!
//! A byte goes one way, through stations that know only their neighbours' interfaces:
//!
//! ```text
//! checkpoint  →  plan  →  store + reader  →  buffer  →  device copy  →  tensor (the caller's)
//! what there is  what goes  bytes come in    staging   host to device  delivered when landed
//!                where
//! ```
//!
//! * [`checkpoint`]: the catalogue of tensors, from headers alone.
//! * [`plan`]: which byte ranges go where, cut into equal blocks.
//! * [`store`]: where objects live; reads into memory it is given.
//! * [`memory`]: regions, the staging arena, host tensors, file mappings.
//! * [`manifest`]: what the bytes of a checkpoint should be; [`store`] compares what it reads with it.
//! * [`device`]: the CUDA driver, opened at run time.
//! * [`pipeline`]: readers that move blocks, and the delivery of finished tensors.
//! * `pull`: remote objects brought to a directory. [`save`]: bytes of memory brought to a store.
//! * [`tune`]: what storage is like, start values for it, and the search for the number of readers.
//! * [`config`], [`stats`], [`trace`], [`error`]: settings, figures, time lines, failures. [`threads`], `closest`: what several of these need.
//!
//! Dependencies point one way: `pipeline → plan → {checkpoint, store, memory, device}`. The crate knows no Python.
//! `unsafe` is allowed in `memory`, `device`, the file readers of `store` and its disk cache, and where `pipeline` takes
//! addresses of its caller (`session`, `landing`); it is denied everywhere else.

pub mod checkpoint;
mod closest;
pub mod config;
pub mod device;
pub mod error;
pub mod manifest;
pub mod memory;
pub mod pipeline;
pub mod plan;
#[cfg(feature = "remote")]
pub mod pull;
pub mod save;
pub mod stats;
pub mod store;
pub mod threads;
pub mod trace;
pub mod tune;

pub use error::{Code, Error, ErrorKind, Result};
