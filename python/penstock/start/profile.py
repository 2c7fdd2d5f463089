"""A start profile: which ranges of which files a start read, in the order of its steps.

A file of JSON. It names paths, sizes and modification times, and nothing of what is in the files. A file that has
changed since is left out when the profile is used; a profile is only advice, so nothing in it is trusted further than
to be read.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, FormatError
from penstock.start.residency import Ranges, total

if TYPE_CHECKING:
    from penstock.start.observe import Start

SCHEMA = 1
_LARGEST = 256 << 20


@dataclass(frozen=True)
class Wanted:
    """Ranges of one file that are to be in the page cache.

    Attributes:
        path: absolute.
        ranges: which bytes.
        stamp: size and modification time (ns) that it had; None where any will do.
    """

    path: str
    ranges: Ranges
    stamp: tuple[int, int] | None = None


@dataclass(frozen=True)
class Profile:
    """What a start read.

    Attributes:
        engine: and ``version``: of what was started.
        wanted: in order.
    """

    engine: str
    version: str | None
    wanted: tuple[Wanted, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges."""
        return sum(total(each.ranges) for each in self.wanted)


def of_start(start: Start) -> Profile:
    """The profile of a start that was watched. The model's files are left out: a command names its own."""
    reads = [read for _, read in start.reads if read.of != "model"]
    wanted = []
    for read in sorted(reads, key=lambda read: read.when):
        with suppress(OSError):
            wanted.append(Wanted(read.path, read.ranges, _stamp(os.stat(read.path))))
    return Profile(start.environment.engine, start.environment.version, tuple(wanted))


def save(profile: Profile, path: str) -> None:
    """Writes a profile whole or not at all.

    Raises:
        OSError: where it cannot be written.
    """
    value = {
        "penstock start profile": SCHEMA,
        "engine": profile.engine,
        "version": profile.version,
        "wanted": [{"path": w.path, "stamp": w.stamp, "ranges": w.ranges} for w in profile.wanted],
    }
    folder = Path(path).absolute().parent
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".penstock-profile-")
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            json.dump(value, file)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def load(path: str) -> Profile:
    """Reads a profile.

    Raises:
        OSError: where there is none, or it cannot be read.
        FormatError: where it is no profile, or of another schema.
        ConfigError: where it is no regular file.
    """
    with open(path, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(location=path, cause="this is no regular file", remedy="Give the file of a start profile")
        data = file.read(_LARGEST + 1)
    try:
        value = json.loads(data)
        if len(data) > _LARGEST or value["penstock start profile"] != SCHEMA:
            raise ValueError  # noqa: TRY301
        wanted = tuple(map(_wanted, value["wanted"]))
        return Profile(str(value["engine"]), value["version"], wanted)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise FormatError(
            location=path,
            cause="this is no start profile that this version reads",
            remedy="Record it anew: penstock start-report --save-profile FILE -- COMMAND",
        ) from None


def _wanted(value: Any) -> Wanted:
    ranges, at = [], 0
    for start, end in value["ranges"]:
        if not (isinstance(start, int) and isinstance(end, int) and at <= start < end):
            raise ValueError
        ranges.append((start, end))
        at = end
    size, modified = value["stamp"]
    if not isinstance(value["path"], str) or not value["path"].startswith("/"):
        raise ValueError
    return Wanted(value["path"], tuple(ranges), (int(size), int(modified)))


def is_stale(wanted: Wanted) -> bool:
    """Whether a file is gone, or another one than it was."""
    try:
        status = os.stat(wanted.path)
    except (OSError, ValueError):
        return True
    return not stat.S_ISREG(status.st_mode) or (wanted.stamp is not None and _stamp(status) != wanted.stamp)


def whole(paths: Iterator[str]) -> list[Wanted]:
    """These files, from the first byte to the last."""
    found = []
    for path in paths:
        with suppress(OSError):
            if nbytes := os.stat(path).st_size:
                found.append(Wanted(path, ((0, nbytes),)))
    return found


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
