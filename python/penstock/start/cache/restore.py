"""From a location to the places: the files of a key that are not there yet.

A file appears whole, with the content that its hash names, or not at all. What is there stays as it is. Directories
below a place are opened one by one without following symbolic links.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.errors import PenstockError
from penstock.start.cache.index import MARK, Index, Kept
from penstock.start.cache.location import Location
from penstock.start.cache.places import Place

_RESERVE_BYTES = 256 << 20
_HOPELESS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass
class Restored:
    """What a restoration did.

    Attributes:
        names: place and path of what was restored, and ``nbytes``: of it.
        there: files that were there before.
        left_out: how many files were left out, by the reason.
    """

    names: set[tuple[str, str]] = field(default_factory=set)
    nbytes: int = 0
    there: int = 0
    left_out: dict[str, int] = field(default_factory=dict)


def restore(
    index: Index, location: Location, places: Iterable[Place], stop: Callable[[], object] = lambda: None
) -> Restored:
    """Restores what an index names.

    Args:
        places: where files may go. Files of other places are left out.
        stop: asked before each file; an answer ends it.
    """
    done, locked = Restored(), threading.Lock()
    rooms = {place.name: _Room(place) for place in places}

    def one(kept: Kept) -> None:
        room = rooms.get(kept.place)
        try:
            if stop():
                why: str | None = "the command has ended"
            elif room is None or not room.place.has(kept.path):
                why = "not of a place of compiled files"
            else:
                why = room.restore(kept, location)
        except (OSError, PenstockError) as error:
            why = _why(error)
        with locked:
            if why is None:
                done.names.add((kept.place, kept.path))
                done.nbytes += kept.nbytes
            elif why:
                done.left_out[why] = done.left_out.get(why, 0) + 1
            else:
                done.there += 1

    with ThreadPoolExecutor(location.readers, "penstock-restore") as pool:
        # Small ones first: engines look into those before they open what is large.
        list(pool.map(one, sorted(index.files, key=lambda kept: kept.nbytes)))
    return done


class _Room:
    """A place that files go to. After a failure that others would have too, none is tried."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._why: str | None = None

    def restore(self, kept: Kept, location: Location) -> str | None:
        """Why a file was left out; empty where it was there, None where it was restored."""
        if self._why is not None:
            return self._why
        try:
            folder = self._folder(kept.path.split("/")[:-1])
        except OSError as error:
            return self._hopeless(error)
        try:
            name = kept.path.rpartition("/")[2]
            return self._restore(folder, name, kept, location)
        finally:
            os.close(folder)

    def _restore(self, folder: int, name: str, kept: Kept, location: Location) -> str | None:
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=folder, follow_symlinks=False)
            return ""
        room = os.fstatvfs(folder)
        if room.f_bavail * room.f_frsize < kept.nbytes + _RESERVE_BYTES:
            self._why = f"the disk of {self.place.root} is almost full"
            return self._why
        data = location.blob(kept.digest, kept.nbytes)
        if hashlib.sha256(data).hexdigest() != kept.digest:
            return "damaged: not what the hash says"
        if kept.placed:
            data = data.replace(MARK, os.fsencode(self.place.root))
        try:
            _write(folder, name, data, kept)
        except OSError as error:
            return self._hopeless(error)
        return None

    def _hopeless(self, error: OSError) -> str:
        why = f"{self.place.root}: {error.strerror}"
        if error.errno in _HOPELESS:
            self._why = why
        return why

    def _folder(self, names: list[str]) -> int:
        """A handle of a directory below the place, made where it is not there."""
        os.makedirs(self.place.root, mode=0o755, exist_ok=True)
        handle = os.open(self.place.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check(handle)
            for name in names:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=handle)
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
                os.close(handle)
                handle = inner
        except BaseException:
            os.close(handle)
            raise
        return handle


def _check(handle: int) -> None:
    status = os.fstat(handle)
    if status.st_uid not in {0, os.geteuid()} or status.st_mode & stat.S_IWOTH:
        raise PermissionError(errno.EPERM, "others may write to it")


def _write(folder: int, name: str, data: bytes, kept: Kept) -> None:
    temporary = f".penstock-{os.getpid()}-{threading.get_native_id()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(temporary, flags, 0o755 if kept.executable else 0o644, dir_fd=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.utime(temporary, ns=(kept.modified, kept.modified), dir_fd=folder)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _why(error: OSError | PenstockError) -> str:
    if isinstance(error, PenstockError):
        return error.cause
    return "its blob is missing" if isinstance(error, FileNotFoundError) else error.strerror or "it cannot be read"
