//! What can go wrong, in one type.
//!
//! Every failure says five things where they are known: which **object** (file or URL), which **tensor**, which byte
//! **range** of the object, the **cause**, and the **remedy** (what to try). [`ErrorKind`] is what callers branch on, [`Code`] where that is too coarse;
//! the Python package turns each kind into an exception class of its own.
//!
//! This module knows nothing of stores, devices or Python. It must not be given secrets: whoever builds an error from
//! a URL strips credentials and query strings first.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use crate::store::readable;

/// The result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The class of a failure: what a caller may want to treat differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An object, directory or glob that is not there.
    NotFound,
    /// An object that is there but may not be read, or is not something that can be read (a FIFO, a device).
    Access,
    /// A store failed while reading: an I/O error, a mount that went away.
    Storage,
    /// An object was truncated, rewritten or replaced between opening it and the end of the load.
    Changed,
    /// Bytes that are not what a manifest says they are, or a manifest that is missing or refused.
    Integrity,
    /// A file that has to be signed and is not.
    Signature,
    /// Bytes that are not a valid safetensors file or shard index.
    Format,
    /// A tensor name that the checkpoint does not hold.
    TensorNotFound,
    /// A selection (slice, filter, dtype) that does not fit the tensor.
    Selection,
    /// A destination of the wrong shape, dtype, device or layout.
    Destination,
    /// A device that is missing or failed.
    Device,
    /// Host or device memory could not be had.
    Memory,
    /// Something is there that a save would replace, or that another save is writing.
    Exists,
    /// A setting with an impossible value.
    Config,
    /// A package that is not installed.
    Dependency,
    /// The load was cancelled by its owner.
    Cancelled,
}

/// What went wrong, finer than by [`ErrorKind`]: for programs that decide by it. Codes are added to, never renamed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// Nothing is there.
    NotFound,
    /// It is there and may not be read.
    AccessDenied,
    /// There are no credentials, or they are refused as such: unknown, expired, of someone else.
    Credentials,
    /// Reading failed in some other way.
    Storage,
    /// A server says that it is asked too often (429, 503, `SlowDown`).
    Throttled,
    /// A server fails (5xx).
    ServerError,
    /// No connection, or one that was lost: unknown host, refused, reset, TLS, proxy.
    Connection,
    /// Nothing came in time.
    Timeout,
    /// A listing that does not end.
    EndlessListing,
    /// The disk is full, or a quota or a limit of file sizes is met.
    StorageFull,
    /// Something is there already.
    Exists,
    /// Another save is writing there, or one was cut off and left its marker.
    BeingSaved,
    /// What a save left that was cut off, or has not ended yet.
    IncompleteSave,
    /// The object is not what it was when it was opened.
    Changed,
    /// Bytes, a size or a file that the manifest does not have.
    Integrity,
    /// There is no manifest, and one is required.
    NoManifest,
    /// A manifest that is malformed, damaged or no regular file.
    BadManifest,
    /// A file that the signature does not have.
    NotSigned,
    /// A file, or its manifest, that is not the signed one.
    SignatureMismatch,
    /// A file that is malformed in some other way.
    BadFormat,
    /// A file that ends before its header says so.
    Truncated,
    /// A file with bytes that its header does not account for.
    TrailingBytes,
    /// Bytes between tensors that belong to none.
    Gap,
    /// Tensors whose bytes overlap.
    Overlap,
    /// A header longer than any is.
    HeaderTooLarge,
    /// A header that is not the JSON of a header.
    BadHeader,
    /// A header that is not UTF-8.
    HeaderNotUtf8,
    /// A tensor whose shape and dtype need another number of bytes than it has.
    SizeMismatch,
    /// A dtype that is not known.
    UnknownDtype,
    /// A shard index that is malformed.
    BadIndex,
    /// The checkpoint holds no such tensor.
    TensorNotFound,
    /// A selection that does not fit.
    Selection,
    /// A destination that does not fit.
    Destination,
    /// A device is missing or failed.
    Device,
    /// No memory.
    OutOfMemory,
    /// A setting with an impossible value.
    Config,
    /// A package is not installed.
    MissingDependency,
    /// Stopped by its owner.
    Cancelled,
}

impl Code {
    /// The code as programs in other languages see it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::AccessDenied => "access_denied",
            Self::Credentials => "credentials",
            Self::Storage => "storage",
            Self::Throttled => "throttled",
            Self::ServerError => "server_error",
            Self::Connection => "connection",
            Self::Timeout => "timeout",
            Self::EndlessListing => "endless_listing",
            Self::StorageFull => "storage_full",
            Self::Exists => "exists",
            Self::BeingSaved => "being_saved",
            Self::IncompleteSave => "incomplete_save",
            Self::Changed => "changed",
            Self::Integrity => "integrity",
            Self::NoManifest => "no_manifest",
            Self::BadManifest => "bad_manifest",
            Self::NotSigned => "not_signed",
            Self::SignatureMismatch => "signature_mismatch",
            Self::BadFormat => "bad_format",
            Self::Truncated => "truncated",
            Self::TrailingBytes => "trailing_bytes",
            Self::Gap => "gap",
            Self::Overlap => "overlap",
            Self::HeaderTooLarge => "header_too_large",
            Self::BadHeader => "bad_header",
            Self::HeaderNotUtf8 => "header_not_utf8",
            Self::SizeMismatch => "size_mismatch",
            Self::UnknownDtype => "unknown_dtype",
            Self::BadIndex => "bad_index",
            Self::TensorNotFound => "tensor_not_found",
            Self::Selection => "selection",
            Self::Destination => "destination",
            Self::Device => "device",
            Self::OutOfMemory => "out_of_memory",
            Self::Config => "config",
            Self::MissingDependency => "missing_dependency",
            Self::Cancelled => "cancelled",
        }
    }
}

impl ErrorKind {
    /// The code of a failure of which nothing finer is known.
    fn code(self) -> Code {
        match self {
            Self::NotFound => Code::NotFound,
            Self::Access => Code::AccessDenied,
            Self::Storage => Code::Storage,
            Self::Changed => Code::Changed,
            Self::Integrity => Code::Integrity,
            Self::Signature => Code::SignatureMismatch,
            Self::Format => Code::BadFormat,
            Self::TensorNotFound => Code::TensorNotFound,
            Self::Selection => Code::Selection,
            Self::Destination => Code::Destination,
            Self::Device => Code::Device,
            Self::Memory => Code::OutOfMemory,
            Self::Exists => Code::Exists,
            Self::Config => Code::Config,
            Self::Dependency => Code::MissingDependency,
            Self::Cancelled => Code::Cancelled,
        }
    }
}

/// A failure with its context. Cheap to move: one pointer.
#[derive(Debug, Clone)]
pub struct Error(Box<Inner>);

#[derive(Debug, Clone)]
struct Inner {
    kind: ErrorKind,
    code: Code,
    details: Vec<(&'static str, String)>,
    cause: Cow<'static, str>,
    object: Option<String>,
    tensor: Option<String>,
    range: Option<Range<u64>>,
    remedy: Option<Cow<'static, str>>,
    os_error: Option<i32>,
}

impl Error {
    /// A failure of `kind` because of `cause`, a clause without a final full stop.
    pub fn new(kind: ErrorKind, cause: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(Inner {
            kind,
            code: kind.code(),
            details: Vec::new(),
            cause: cause.into(),
            object: None,
            tensor: None,
            range: None,
            remedy: None,
            os_error: None,
        }))
    }

    /// A failure reported by the operating system while doing `action` ("opening", "reading").
    ///
    /// The kind follows the error number: `ENOENT` is [`ErrorKind::NotFound`], permission failures are
    /// [`ErrorKind::Access`], exhausted memory is [`ErrorKind::Memory`], anything else [`ErrorKind::Storage`].
    pub fn from_io(action: &str, error: &std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        let kind = match error.kind() {
            Io::NotFound | Io::NotADirectory => ErrorKind::NotFound,
            // A path that names nothing: its links lead in a circle, it is too long, or it holds a NUL.
            _ if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENAMETOOLONG)) => {
                ErrorKind::NotFound
            }
            Io::InvalidInput if error.raw_os_error().is_none() => ErrorKind::NotFound,
            Io::PermissionDenied => ErrorKind::Access,
            Io::OutOfMemory => ErrorKind::Memory,
            _ => ErrorKind::Storage,
        };
        let mut made = Self::new(kind, format!("{action} failed: {error}"));
        made.0.os_error = error.raw_os_error();
        made
    }

    /// Names the object; an object named earlier, closer to the failure, stays.
    #[must_use]
    pub fn object(mut self, object: impl Into<String>) -> Self {
        self.0.object.get_or_insert_with(|| object.into());
        self
    }

    /// Says before the cause on which device it happened: the object is what bytes came from.
    #[must_use]
    pub fn on(mut self, device: &str) -> Self {
        self.0.cause = format!("{device}: {}", self.0.cause).into();
        self.detail("device", device)
    }

    /// Names the tensor; a tensor named earlier stays.
    #[must_use]
    pub fn tensor(mut self, tensor: impl Into<String>) -> Self {
        self.0.tensor.get_or_insert_with(|| tensor.into());
        self
    }

    /// Names the bytes of the object concerned; a range named earlier stays.
    #[must_use]
    pub fn range(mut self, range: Range<u64>) -> Self {
        self.0.range.get_or_insert(range);
        self
    }

    /// Says what to do about it; a remedy given earlier stays.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<Cow<'static, str>>) -> Self {
        self.0.remedy.get_or_insert_with(|| remedy.into());
        self
    }

    /// Says what went wrong, finer than by kind.
    #[must_use]
    pub fn code(mut self, code: Code) -> Self {
        self.0.code = code;
        self
    }

    /// Names a value that the cause speaks of, for programs that would else look for it in the text.
    #[must_use]
    pub fn detail(mut self, name: &'static str, value: impl fmt::Display) -> Self {
        self.0.details.push((name, value.to_string()));
        self
    }

    /// What went wrong, for programs.
    pub fn error_code(&self) -> Code {
        self.0.code
    }

    /// Values that the cause speaks of, by name.
    pub fn details(&self) -> &[(&'static str, String)] {
        &self.0.details
    }

    /// The class of the failure.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The object concerned: a path or a URL without secrets.
    pub fn object_name(&self) -> Option<&str> {
        self.0.object.as_deref()
    }

    /// The tensor concerned.
    pub fn tensor_name(&self) -> Option<&str> {
        self.0.tensor.as_deref()
    }

    /// The bytes of the object concerned.
    pub fn byte_range(&self) -> Option<Range<u64>> {
        self.0.range.clone()
    }

    /// What went wrong, without the context.
    pub fn cause(&self) -> &str {
        &self.0.cause
    }

    /// What to try.
    pub fn remedy_text(&self) -> Option<&str> {
        self.0.remedy.as_deref()
    }

    /// The operating system's error number, where one was the cause.
    pub fn os_error(&self) -> Option<i32> {
        self.0.os_error
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { cause, object, tensor, range, remedy, .. } = &*self.0;
        if let Some(object) = object {
            write!(f, "{}: ", readable(object))?;
        }
        if let Some(tensor) = tensor {
            write!(f, "tensor {tensor:?}: ")?;
        }
        // What others say may end as a sentence does.
        let cause = readable(cause);
        f.write_str(if remedy.is_some() { cause.strip_suffix('.').unwrap_or(&cause) } else { &cause })?;
        if let Some(range) = range {
            write!(f, " (bytes {}..{})", range.start, range.end)?;
        }
        if let Some(remedy) = remedy {
            write!(f, ". {}", readable(remedy))?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_everything_that_is_known() {
        let error = Error::new(ErrorKind::Changed, "the file ended early")
            .object("/m/model.safetensors")
            .tensor("lm_head.weight")
            .range(8..16)
            .remedy("Load it again");
        assert_eq!(
            error.to_string(),
            "/m/model.safetensors: tensor \"lm_head.weight\": the file ended early (bytes 8..16). Load it again"
        );
        let error = Error::new(ErrorKind::Storage, "it failed.").remedy("Load it again");
        assert_eq!(error.to_string(), "it failed. Load it again");
    }

    #[test]
    fn every_failure_has_a_code_which_may_be_finer_than_its_kind() {
        let error = Error::new(ErrorKind::Storage, "x");
        assert_eq!(error.error_code().as_str(), "storage");
        let error = error.code(Code::Throttled).detail("status", 503);
        assert_eq!((error.error_code().as_str(), error.kind()), ("throttled", ErrorKind::Storage));
        assert_eq!(error.details(), [("status", "503".to_owned())]);
    }

    #[test]
    fn context_nearest_to_the_failure_wins() {
        let error = Error::new(ErrorKind::Storage, "x").object("near").object("far");
        assert_eq!(error.object_name(), Some("near"));
    }

    #[test]
    fn os_errors_keep_their_number_and_find_their_kind() {
        let error = Error::from_io("opening", &std::io::Error::from_raw_os_error(libc::EACCES));
        assert_eq!((error.kind(), error.os_error()), (ErrorKind::Access, Some(libc::EACCES)));
    }
}
