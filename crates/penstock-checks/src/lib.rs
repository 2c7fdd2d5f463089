//! Nothing by itself: a place for the checks of the core that need heavy dependencies, so that `make test` does not
//! compile them.
//!
//! * `tests/storage`: storage as the kernel describes it, with file systems mounted, FUSE among them (`fuser`).
//! * `benches`: parsing headers and planning loads (`criterion`).
