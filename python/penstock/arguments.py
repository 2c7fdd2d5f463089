"""Arguments that several functions take, checked where they come in: locations, names of tensors, devices, dtypes.

What is wrong with an argument is said in its name, with what to write instead. Nothing here opens a file or imports a
framework.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock._native import LoadOptions
from penstock.errors import ConfigError, LocationNotFoundError, SelectionError, TensorNotFoundError

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""A path of this machine (bytes and surrogate escapes for names that are not UTF-8), or a URL."""


def locations(given: AnyPath | Iterable[AnyPath]) -> list[str]:
    """What ``penstock.open`` was given, as a list of paths and URLs.

    Raises:
        ConfigError: for what is neither a path nor several of them.
        LocationNotFoundError: for text that no file name can be made of.
    """
    if isinstance(given, (str, bytes, os.PathLike)):
        return [location(given)]
    if isinstance(given, Mapping) or hasattr(given, "read") or not isinstance(given, Iterable):
        raise _no_path(given, "path")
    return [location(item, f"path[{at}]") for at, item in enumerate(given)]


def location(given: AnyPath, argument: str = "path") -> str:
    """A path or URL as text. ``~`` and ``~user`` become home directories, unless something of that very name exists.

    Raises:
        As ``locations``.
    """
    try:
        text = os.fsdecode(given)
    except TypeError:
        raise _no_path(given, argument) from None
    if not text.strip() and not os.path.lexists(text):
        remedy = "Give the path of a file or directory, or a URL; a variable it is made of may be unset"
        raise LocationNotFoundError(cause=f"{argument} is empty: it names nothing", remedy=remedy)
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        # A URL may hold a password.
        value = f"{argument}, a URL," if "://" in text else f"{argument}={given!r}"
        cause = f"{value} holds a character that no file name can ({error.reason})"
        raise LocationNotFoundError(cause=cause) from None
    return os.path.expanduser(text) if text.startswith("~") and not os.path.lexists(text) else text  # noqa: PTH111


def is_url(path: AnyPath) -> bool:
    """Whether a path names something that is not on the local file system."""
    text = os.fsdecode(path)
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text)) and not text.startswith("file://")


def is_http(location: str) -> bool:
    """Whether a location is on a plain HTTP server, which cannot list."""
    return location.lower().startswith(("http://", "https://"))


def joined(where: str, name: str) -> str:
    """A name under a directory or URL; the query of a URL (a signature) stays at its end."""
    base, mark, query = where.partition("?") if "://" in where else (where, "", "")
    return f"{base.rstrip('/')}/{name}{mark}{query}"


def _no_path(given: object, argument: str) -> ConfigError:
    cause = f"{argument} must be a path or a URL (str, bytes, os.PathLike), not {described(given)}"
    remedy = "Give its path or URL, or write it to a file" if hasattr(given, "read") else None
    return ConfigError(cause=cause, remedy=remedy)


def described(given: object) -> str:
    """What was given, by its kind: a text may be secret."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return "None" if given is None else type(given).__name__


def tensor_names(given: Iterable[str]) -> list[str]:
    """Names of tensors, each once, in order. A single string is one name.

    Raises:
        SelectionError: for what is no name, and for what is no collection of names.
        TensorNotFoundError: for a name that no file can hold: a lone surrogate is not Unicode.
    """
    if isinstance(given, str):
        given = (given,)
    if isinstance(given, (bytes, bytearray)) or not isinstance(given, Iterable):
        raise _no_names(given)
    try:
        names = list(dict.fromkeys(given))
    except TypeError:  # of what cannot be hashed, such as lists
        raise _no_names(given) from None
    for name in names:
        if not isinstance(name, str):
            raise _no_names(name)
    try:
        "".join(names).encode()
    except UnicodeEncodeError as error:
        cause = f"no tensor's name holds the character {error.object[error.start]!r}, which is no Unicode"
        raise TensorNotFoundError(cause=cause) from None
    return names


def _no_names(given: object) -> SelectionError:
    cause = f"names must be names of tensors (str), not {described(given)}"
    remedy = 'Give a list such as names=["lm_head.weight"]'
    return SelectionError(cause=cause, remedy=remedy)


def name_filter(given: Any) -> Callable[[str], bool]:
    """A function of a tensor's name.

    Raises:
        ConfigError: for anything else, a pattern among it.
    """
    if callable(given):
        return given  # type: ignore[no-any-return]
    cause = f"filter must be a function of a tensor's name, not {given!r}"
    remedy = "For a pattern, write filter=lambda name: fnmatch.fnmatchcase(name, pattern)"
    raise ConfigError(cause=cause, remedy=remedy)


def settings(given: LoadOptions | None, default: LoadOptions | None = None) -> LoadOptions:
    """The settings that were given, or else the default ones.

    Raises:
        ConfigError: for what is no ``LoadOptions``.
    """
    if isinstance(given, LoadOptions):
        return given
    if given is None:
        return LoadOptions() if default is None else default
    cause = f"options must be a penstock.LoadOptions, not {described(given)}"
    remedy = "Write options=penstock.LoadOptions(readers=8)"
    raise ConfigError(cause=cause, remedy=remedy)


def no_dtype(given: object, library: str) -> SelectionError:
    """``given`` is no dtype of ``library``."""
    cause = f"dtype={given!r} is not a dtype of {library}"
    return SelectionError(cause=cause, remedy="Give one such as 'float16', 'bfloat16' or 'float32'")


def no_floating_dtype(given: object) -> SelectionError:
    """``given`` cannot hold what floating-point tensors hold."""
    cause = (
        f"dtype={given!r}: floating-point tensors are not converted to a dtype of integers, which would truncate them"
    )
    remedy = "Give a floating-point dtype; for quantised weights, use a quantised checkpoint"
    return SelectionError(cause=cause, remedy=remedy)
