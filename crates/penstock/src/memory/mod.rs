//! Memory that bytes are read into: who owns it, how it is aligned, when it goes back.
//!
//! * [`Window`]: a borrowed span of raw, possibly uninitialised memory; what a store is told to fill.
//! * [`Region`]: an owned anonymous mapping, huge-paged where that pays.
//! * [`HostSlab`]: the final home of host tensors: laid out as the file is, each tensor freed when it is dropped.
//! * [`FileMapping`]: a private mapping of a file, for views without a copy.
//! * [`Arena`]: the staging slots of the process, reused by every load.
//!
//! Nothing here reads files or talks to a device: registering slots with one is a callback of its caller.
#![allow(unsafe_code)]

mod arena;
mod file_mapping;
mod region;
mod slab;
mod window;

pub use arena::{Arena, ArenaUse, Pinning, Slot};
pub use file_mapping::FileMapping;
pub use region::{HUGE_PAGE, PAGE, Region};
pub use slab::{HostSlab, HostTensor};
pub use window::Window;
