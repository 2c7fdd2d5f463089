"""What Penstock raises.

Every exception says what is known of these, as attributes and in its message: **location** (path or URL), **tensor**,
**byte_range** of the object, **cause** and **remedy** (what to try). All derive from ``PenstockError``. Each also
derives from the built-in exception that people already catch for its kind of failure.
"""

from __future__ import annotations

from errno import EEXIST, ENOENT


class PenstockError(Exception):
    """The base of all that Penstock raises.

    Without a message of its own it is composed: ``location: tensor 'name': cause. remedy``, of those that are given.

    Attributes:
        location: the path or URL concerned, without secrets, or None.
        tensor: the name of the tensor concerned, or None.
        byte_range: (start, end) in bytes of the object, or None.
        cause: what went wrong, without the context.
        remedy: what to try, or None.
        errno: the operating system's error number, where one was the cause.
        code: what went wrong, for programs: ``"not_found"``, ``"throttled"``, ``"truncated"`` and others. Codes are
            added to, never renamed; docs/errors.md lists them.
        details: values that the message speaks of, by name, for codes that have any.
    """

    errno: int | None = None
    code: str = "error"

    def __init__(
        self,
        message: str = "",
        *,
        location: str | None = None,
        tensor: str | None = None,
        byte_range: tuple[int, int] | None = None,
        cause: str | None = None,
        remedy: str | None = None,
        errno: int | None = None,
        code: str | None = None,
        details: dict[str, str] | None = None,
    ) -> None:
        if not message and cause:
            message = _composed(location, tensor, cause, remedy)
        super().__init__(message)
        self.message = message
        self.location = location
        self.tensor = tensor
        self.byte_range = byte_range
        self.cause = message if cause is None else cause
        self.remedy = remedy
        self.details = {} if details is None else details
        if errno is not None:
            self.errno = errno
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        # KeyError and OSError would show a tuple or a repr.
        return self.message

    def __reduce__(self) -> tuple[type[PenstockError], tuple[str], dict[str, object]]:
        return type(self), (self.message,), self.__dict__


def _composed(location: str | None, tensor: str | None, cause: str, remedy: str | None) -> str:
    where = ([] if location is None else [location]) + ([] if tensor is None else [f"tensor {tensor!r}"])
    return ": ".join([*where, cause]) + (f". {remedy}" if remedy else "")


class LocationNotFoundError(PenstockError, FileNotFoundError):
    """A file, directory or glob that is not there, or a directory without a checkpoint."""

    errno = ENOENT
    code = "not_found"


class LocationAccessError(PenstockError, PermissionError):
    """An object that may not be read, or is no regular file; a store that wants other credentials."""

    code = "access_denied"


class LocationExistsError(PenstockError, FileExistsError):
    """Something is where a save was to go, or another save is writing there (``code="being_saved"``)."""

    errno = EEXIST
    code = "exists"


class StorageError(PenstockError, OSError):
    """A store failed while reading: a disk, or a server that could not be reached or did not answer in the end."""

    code = "storage"


class LocationChangedError(PenstockError, OSError):
    """An object was truncated, written to or replaced between opening it and the end of the load."""

    code = "changed"


class IntegrityError(PenstockError, OSError):
    """Bytes that are not what their manifest says, a manifest that is refused, or none where one is required."""

    code = "integrity"


class SignatureError(IntegrityError):
    """A checkpoint that is not signed by anyone who is trusted, or is not what they signed."""

    code = "bad_signature"


class SafetensorError(PenstockError):
    """What safetensors has one name for: files, names, slices and settings that it refuses."""


class FormatError(SafetensorError, ValueError):
    """Bytes that are not a valid safetensors file or shard index."""

    code = "bad_format"


class TensorNotFoundError(SafetensorError, KeyError):
    """A tensor that the checkpoint does not hold."""

    code = "tensor_not_found"


class SelectionError(SafetensorError, ValueError, IndexError):
    """A slice, filter or dtype that does not fit the tensor. An ``IndexError``, so that ``for row in slice`` ends."""

    code = "selection"


class DestinationError(PenstockError, ValueError):
    """A destination of the wrong shape, dtype, device or layout."""

    code = "destination"


class DeviceError(PenstockError, RuntimeError):
    """A device that is not there, or failed."""

    code = "device"


class InsufficientMemoryError(PenstockError, MemoryError):
    """Host or device memory could not be had."""

    code = "out_of_memory"


class ConfigError(SafetensorError, ValueError):
    """A setting with an impossible value."""

    code = "config"


class LoadCancelledError(PenstockError, RuntimeError):
    """The load was stopped by its owner while someone waited for it."""

    code = "cancelled"


class PeerError(PenstockError, RuntimeError):
    """Another process failed, or is gone, of those that load something together; or they do not load the same."""

    code = "peer"


class PoolError(PenstockError, RuntimeError):
    """Requests for models of a pool that could only wait for each other."""

    code = "pool"


class AdapterError(PenstockError, ValueError):
    """An adapter that does not fit its model, or is of a kind that a pool does not know."""

    code = "adapter"


class MissingDependencyError(PenstockError, ImportError):
    """A package that the call needs is not installed."""

    code = "missing_dependency"
