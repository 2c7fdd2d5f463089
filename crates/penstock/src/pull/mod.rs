//! Remote objects brought to a directory of this machine.
//!
//! A pull finds what a URL names, at any depth, and makes files of it: many ranges at once, each file under its own
//! name only when it is complete, so that a directory never shows half a file. A pull that is cut off (by Ctrl-C, a lost
//! machine, a kill) is taken up where it stopped by the next one: partial files lie in `.penstock` in the directory,
//! each with a map of its blocks' checksums, and a ledger says which version of an object each file is. What is there
//! already, of the same size and version, is left alone.
//!
//! Keys come from whoever may write to the bucket, and a directory may hold links. So a key that would lead out of the
//! directory is refused, and no link below the directory is followed.
//!
//! * `source`: what a URL names; whoever pulls chooses from that.
//! * `preview`: what a pull would do.
//! * `tree`: the directory, from which nothing escapes. * `ledger`: what was pulled before.
//! * `partial_file`: a file on its way. * `work`: who does what next. * `session`: threads, progress, endings.
//!
//! Pulls know stores; they know nothing of tensors or devices.

mod ledger;
mod partial_file;
mod preview;
mod session;
mod source;
mod tree;
mod work;

pub use preview::preview;
pub use session::{How, Progress, Pull, Pulled, PulledFile};
pub use source::{Item, find};
