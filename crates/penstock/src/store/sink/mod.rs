//! Where what is saved goes: a directory or file of this machine, or a prefix of an object store.
//!
//! A [`Sink`] takes objects in parts, from many threads at once, and shows them all at once or not at all:
//! [`Sink::publish`] is the one step that makes them visible, [`Sink::discard`] leaves nothing. Whoever is killed in between
//! leaves what [`is_unfinished`] and [`INCOMPLETE_MARKER`] tell: loaders refuse it, and the next save of this machine's
//! files clears it away.
//!
//! * `directory`: directories and files of this machine, written beside their place and renamed. `file`: one file of them.
//! * The remote one is `remote/sink`.
//!
//! A sink knows neither tensors nor hashes: who saves decides what is written where.

mod directory;
mod file;

use std::path::PathBuf;
use std::sync::Arc;

use crate::error::{Code, Error, ErrorKind, Result};

pub use directory::LocalSink;

/// The object that is in a prefix as long as what is saved there is not complete.
pub const INCOMPLETE_MARKER: &str = "penstock-save.incomplete";

/// How names of what is being written on this machine end; they begin with a dot.
const TEMPORARY_SUFFIX: &str = ".penstock-save";
/// The same of what was there before, for the moment of a replacement in two steps.
const PREVIOUS_SUFFIX: &str = ".penstock-save-previous";

/// The alignment of offsets and lengths of direct writes.
pub const DIRECT_ALIGNMENT: usize = crate::memory::PAGE;

/// A place that objects are saved to, taken for one save.
pub trait Sink: Send + Sync {
    /// Where it is, without secrets.
    fn location(&self) -> &str;

    /// Begins the object `name` of `bytes` bytes.
    ///
    /// # Errors
    /// `Storage` where there is no room or the store fails, `Access`.
    fn begin(&self, name: &str, bytes: u64) -> Result<Arc<dyn SinkObject>>;

    /// Writes a small object whole.
    ///
    /// # Errors
    /// `Exists` where there is one of that name; as [`Sink::begin`].
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// Files that will be there besides those that are saved: what was there before and stays. Names relative to the
    /// location, and where each can be read now.
    fn kept(&self) -> Vec<(String, PathBuf)> {
        Vec::new()
    }

    /// Shows what was saved, in one step. After a failure nothing of it is visible, but where the error says otherwise.
    ///
    /// # Errors
    /// `Exists` where something was put there meanwhile, `Storage`, `Access`.
    fn publish(&self) -> Result<()>;

    /// Takes back everything that was not published. Nothing to do after [`Sink::publish`].
    fn discard(&self);

    /// Has what waits for the store end now, with `Cancelled`.
    fn interrupt(&self) {}

    /// How many parts it is worth writing at once.
    fn writers(&self) -> usize;

    /// What a save's owner may want to know: a faster way that was refused.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
}

/// An object on its way.
pub trait SinkObject: Send + Sync {
    /// Bytes of its parts, but for the last: a multiple of 1 MiB.
    fn part_bytes(&self) -> u64;

    /// What lengths of parts are multiples of: the last is padded with zeros, which do not become part of the object.
    fn alignment(&self) -> usize {
        1
    }

    /// Whether a part may be written in several calls, of consecutive pieces.
    fn takes_pieces(&self) -> bool {
        false
    }

    /// Writes the part that begins at `offset`. Parts may be written in any order, by many threads, each once.
    ///
    /// # Errors
    /// `Storage` where the disk is full or the store fails, `Access`, `Cancelled` after [`Sink::interrupt`].
    fn write(&self, offset: u64, part: &[u8]) -> Result<()>;

    /// Ends the object once all parts are written: it is on stable storage then, as far as that was asked for.
    ///
    /// # Errors
    /// As [`SinkObject::write`].
    fn finish(&self) -> Result<()>;
}

/// Whether the last name of a path, or the one before it, is that of a save that is not complete.
pub fn is_unfinished(location: &str) -> bool {
    let ours = |name: &str| {
        name.starts_with('.') && (name.ends_with(TEMPORARY_SUFFIX) || name.ends_with(PREVIOUS_SUFFIX))
    };
    location.trim_end_matches('/').rsplit('/').take(2).any(ours)
}

/// The refusal of a place that holds what a save left that was cut off, or is still writing.
pub(crate) fn incomplete(location: &str) -> Error {
    Error::new(
        ErrorKind::Format,
        "a save to this place was cut off, or has not ended yet: it is not complete",
    )
    .code(Code::IncompleteSave)
    .object(location)
    .remedy("Wait for the save to end; if it was cut off, delete what is there and save again")
}

/// The refusal to replace what is there.
pub(crate) fn exists(location: &str, remedy: &'static str) -> Error {
    Error::new(ErrorKind::Exists, "something is there already").object(location).remedy(remedy)
}

/// The refusal of the second of two saves to one place.
pub(crate) fn being_saved(location: &str, remedy: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Exists, "another save is writing to this place")
        .code(Code::BeingSaved)
        .object(location)
        .remedy(remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_save_is_writing_is_told_by_its_name() {
        for unfinished in [
            "/m/.model.penstock-save",
            "/m/.model.penstock-save/",
            "/m/.model.penstock-save/model.safetensors",
            ".model.safetensors.penstock-save",
            "/m/.model.penstock-save-previous/model.safetensors.index.json",
        ] {
            assert!(is_unfinished(unfinished), "{unfinished}");
        }
        for finished in
            ["/m/model", "/m/model.penstock-save", "/m/.model", "/m/.x.penstock-save/a/b", "/", ""]
        {
            assert!(!is_unfinished(finished), "{finished}");
        }
    }
}
