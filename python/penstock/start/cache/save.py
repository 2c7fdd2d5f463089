"""From the places to a location: what a start has made.

What was there before a start is not known to be of it, and is left. A file that changes while it is read is left for
the next time; so is what a compiler that was interrupted has begun.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.errors import FormatError
from penstock.start.cache.index import MARK, Index, Kept, dumped, loaded
from penstock.start.cache.location import Directory
from penstock.start.cache.places import Place, Stamp

_ELF = b"\x7fELF"
_TEXT = (".json", ".py", ".txt")
_LONGEST_TEXT = 16 << 20


@dataclass
class Saved:
    """What was saved.

    Attributes:
        names: place and path of what is new in the index, and ``nbytes``: of it.
        removed: caches of other keys that went, for the sake of the limit.
    """

    names: set[tuple[str, str]] = field(default_factory=set)
    nbytes: int = 0
    removed: int = 0


def save(
    wanted: Iterable[tuple[tuple[str, str], Stamp]],
    location: Directory,
    key: str,
    described: Mapping[str, Any],
    places: Iterable[Place],
    limit: int,
) -> Saved:
    """Saves files of a key, beside those that it has.

    Args:
        wanted: place, path and stamp of each.
        limit: most bytes of the location.

    Raises:
        OSError: it cannot be written. What was there is as it was.
        ConfigError: it is not to be trusted any more.
    """
    done = Saved()
    roots = {place.name: place.root for place in places}
    with location.held():
        try:
            data = location.index(key)
            index = loaded(data, location.shown) if data is not None else Index(described)
        except FormatError:
            index = Index(described)
        files = []
        for (place, path), stamp in wanted:
            found = _read(roots[place], path, stamp)
            if found is None:
                continue
            content, kept = found
            files.append(replace(kept, place=place))
            if not location.has(kept.digest, kept.nbytes):
                location.add_blob(kept.digest, content)
            done.names.add((place, path))
            done.nbytes += kept.nbytes
        if files:
            location.set_index(key, dumped(Index(described, index.files).with_files(files, limit)))
        done.removed = location.prune(limit)
    return done


def _read(root: str, path: str, stamp: Stamp) -> tuple[bytes, Kept] | None:
    """A file's content, if it is finished and is still the one that was seen."""
    try:
        handle = os.open(os.path.join(root, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        before = os.fstat(handle)
        if not stat.S_ISREG(before.st_mode) or _stamp(before) != stamp or _is_being_written(handle):
            return None
        data = file.read()
        if _stamp(os.fstat(handle)) != stamp or len(data) != before.st_size or _is_cut_off(path, data):
            return None
    placed = path.endswith(_TEXT) and len(data) <= _LONGEST_TEXT and os.fsencode(root) in data and MARK not in data
    if placed:
        data = data.replace(os.fsencode(root), MARK)
    digest = hashlib.sha256(data).hexdigest()
    runs = bool(before.st_mode & stat.S_IXUSR)
    return data, Kept("", path, digest, len(data), before.st_mtime_ns, executable=runs, placed=placed)


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns, status.st_ino


def _is_being_written(handle: int) -> bool:
    """Whether a process has it open for writing, as far as the file system tells."""
    try:
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _is_cut_off(path: str, data: bytes) -> bool:
    """Whether a linker or compiler was interrupted: of a library it writes the first bytes last."""
    if not path.endswith((".so", ".o", ".cubin")):
        return False
    if data[:4] != _ELF or len(data) < 64:  # noqa: PLR2004 - the header's length
        return True
    if data[4] != 2 or data[5] != 1:  # noqa: PLR2004 - 64 bits, little-endian
        return False
    at, size, number = (int.from_bytes(data[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    return at + size * number > len(data)
