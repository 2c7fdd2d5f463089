//! `penstock._native`: the core, as Python sees it.
//!
//! Bindings only: arguments are checked, the GIL is released around everything that may wait, and errors become the
//! exceptions of `penstock.errors`. What is convenient in Python is written in Python.
//!
//! * `checkpoint`: `Checkpoint`, `TensorInfo`: the catalogue.
//! * `prefetch`: `Prefetch`: files on their way into the page cache.
//! * `session`: `Session`, `Mapped`, `LoadStats`: loads under way.
//! * `host_array`: `HostArray`: the memory of one host tensor, for numpy and DLPack. `dlpack`: capsules.
//! * `device_memory`: `DeviceMemory`, `DeviceRange`: memory of a GPU at addresses that stay.
//! * `cache`: what is in a disk cache. `objects`: listings, and the bytes of small objects.
//! * `manifest`: manifests of directories. `signed`: files compared with what a signature says.
//! * `pull`: `Source`, `Pull`: remote objects brought to a directory.
//! * `save`: `Save`: memory brought to a store.
//! * `config`: `LoadOptions`. `environment`: variables and storage options. `errors`: exceptions. `paths`: paths and URLs as
//!   arguments and results. `logging`: the core's log. `signals`: Ctrl-C while waiting for a server.
//! * `detached`: what is dropped without the GIL.

// PyO3's macros expand to unsafe code of their own; ours is in `dlpack`, `host_array`, `device_memory`, and in
// `Session::attach` and `Save::add`.
#![allow(unsafe_code, unreachable_pub)]

mod cache;
mod checkpoint;
mod config;
mod detached;
mod device_memory;
mod dlpack;
mod environment;
mod errors;
mod host_array;
mod logging;
mod manifest;
mod objects;
mod paths;
mod prefetch;
mod pull;
mod save;
mod session;
mod signals;
mod signed;

use pyo3::prelude::*;

/// The core of Penstock. Import `penstock`, not this.
#[pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use super::cache::{cache_entries, cache_prune, cache_remove, cache_verify};
    #[pymodule_export]
    use super::checkpoint::{Checkpoint, TensorInfo};
    #[pymodule_export]
    use super::config::{LoadOptions, size_meant};
    #[pymodule_export]
    use super::device_memory::{DeviceMemory, DeviceRange};
    #[pymodule_export]
    use super::host_array::{HostArray, spare_memory};
    #[pymodule_export]
    use super::manifest::{make_manifest, read_manifest};
    #[pymodule_export]
    use super::objects::{list_objects, read_object, remedy_for_missing};
    #[pymodule_export]
    use super::prefetch::Prefetch;
    #[pymodule_export]
    use super::pull::{Pull, Source, flush_disk_cache, shown, shown_endpoint, without_file_scheme};
    #[pymodule_export]
    use super::save::Save;
    #[pymodule_export]
    use super::session::{LoadStats, Mapped, Session, release_staging, staging_usage};
    #[pymodule_export]
    use super::signed::check_signed;

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::logging::install();
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
