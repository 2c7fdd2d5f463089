//! Memory that bytes are read into: who owns it, how it is aligned, when it goes back.
//!
//! * [`Window`] (`window`): a borrowed span of raw, possibly uninitialised memory; what a store is told to fill.
//! * [`Region`] (`region`): an owned anonymous mapping, huge-paged where that pays.
//! * [`HostSlab`] (`slab`): the final home of host tensors: laid out as the file is, each tensor freed when it is
//!   dropped.
//! * [`FileMapping`] (`file_mapping`): a private mapping of a file, for views without a copy.
//! * [`Arena`] (`staging`): the staging buffers of the process, reused by every load; a load has a [`Lease`] of one.
//! * [`PinnedSpan`] (`pinned`): bytes that lie in pinned memory already.
//! * [`HostBytes`] (`borrowed`): memory of the caller that is only read, to be saved.
//! * `headroom`: how much memory there is to spare.
//! * [`Owner`] (`fork`): which process something was made by, for children after `fork`.
//!
//! Nothing here reads files or talks to a device: registering buffers with one is a callback of its caller.
#![allow(unsafe_code)]

mod borrowed;
mod file_mapping;
mod fork;
mod headroom;
mod pinned;
mod region;
mod slab;
mod staging;
mod window;

pub use borrowed::HostBytes;
pub use file_mapping::FileMapping;
pub use fork::{Owner, PerProcess};
pub use headroom::{spare_bytes, spare_bytes_below};
pub use pinned::PinnedSpan;
pub(crate) use region::page_bytes;
pub use region::{HUGE_PAGE, PAGE, Region};
pub use slab::{HostSlab, HostTensor};
pub use staging::{Arena, ArenaUse, Lease, Pinning, StagingBuffer};
pub use window::Window;
