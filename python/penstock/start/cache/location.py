"""Where indices and blobs lie: a directory, or whatever else Penstock reads.

Below the location there are ``start-1/indexes/KEY`` and ``start-1/blobs/AB/DIGEST``. A directory is read and written.
It is refused where anyone else may write to it, or replace it. Object stores are only read: who may write to them is
theirs to say.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from penstock._native import read_object, shown, without_file_scheme
from penstock.arguments import is_url
from penstock.errors import ConfigError, LocationNotFoundError
from penstock.start.cache import index

LAYOUT = "start-1"
_LOCK_SECONDS = 60.0


class Location(Protocol):
    """Where caches are kept."""

    shown: str
    readers: int

    def index(self, key: str) -> bytes | None:
        """The index of a key, or None where there is none."""

    def blob(self, digest: str, nbytes: int) -> bytes:
        """A blob of at most so many bytes, unverified."""


def opened(text: str) -> Directory | Remote:
    """A location that a user named.

    Raises:
        ConfigError: code from there is not to be trusted, or it is no location.
        LocationNotFoundError: a ``file://`` URL names no path of this machine.
    """
    if not text:
        raise ConfigError(cause="the start cache has no location", remedy="Name a directory or a URL")
    if is_url(text):
        return Remote(text)
    return Directory(Path(os.path.abspath(os.path.expanduser(without_file_scheme(text)))))


class Remote:
    """An object store or a server, which is read only."""

    readers = 16

    def __init__(self, url: str) -> None:
        self.shown = shown(url)
        if url.lower().startswith("http://"):
            raise ConfigError(
                location=self.shown,
                cause="whoever is on the way could change what comes by plain HTTP, and it will be run",
                remedy="Use https://",
            )
        base, question, query = url.partition("?")
        self._base, self._query = base.rstrip("/"), question + query

    def index(self, key: str) -> bytes | None:
        try:
            return self._read(f"indexes/{key}", index.LARGEST)
        except LocationNotFoundError:
            return None

    def blob(self, digest: str, nbytes: int) -> bytes:
        return self._read(f"blobs/{digest[:2]}/{digest}", nbytes)

    def _read(self, name: str, limit: int) -> bytes:
        return bytes(read_object(f"{self._base}/{LAYOUT}/{name}{self._query}", limit))


class Directory:
    """A directory of this machine, or one that is mounted."""

    readers = 4

    def __init__(self, path: Path) -> None:
        self.shown = str(path)
        self._named = path
        self._path = Path(os.path.realpath(path)) / LAYOUT
        _refuse_what_others_write(self._path, path)

    def index(self, key: str) -> bytes | None:
        try:
            path = self._path / "indexes" / key
            data = _read(path, index.LARGEST)
        except FileNotFoundError:
            return None
        with suppress(OSError):
            os.utime(path)  # the least recently used goes first
        return data

    def blob(self, digest: str, nbytes: int) -> bytes:
        return _read(self._path / "blobs" / digest[:2] / digest, nbytes)

    def has(self, digest: str, nbytes: int) -> bool:
        """Whether there is such a blob, undamaged."""
        try:
            return hashlib.sha256(self.blob(digest, nbytes)).hexdigest() == digest
        except OSError:
            return False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else saves meanwhile.

        Raises:
            OSError: it cannot be written, or another process holds it for too long.
        """
        for folder in (self._path / "indexes", self._path / "blobs"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_what_others_write(self._path, self._named)
        handle = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
            yield
        finally:
            os.close(handle)

    def add_blob(self, digest: str, data: bytes) -> None:
        """Keeps a blob, whole or not at all."""
        folder = self._path / "blobs" / digest[:2]
        folder.mkdir(mode=0o700, exist_ok=True)
        write(folder / digest, data)

    def set_index(self, key: str, data: bytes) -> None:
        """Keeps an index, whole or not at all. Its blobs are there."""
        write(self._path / "indexes" / key, data)

    def prune(self, limit: int) -> int:
        """Removes the least recently used indices until the rest has at most so many bytes, and blobs that none names.

        Returns:
            how many indices went. To be called while it is held.
        """
        indices = []
        for path in (self._path / "indexes").iterdir():
            with suppress(OSError):
                indices.append((path.stat().st_mtime_ns, path))
        used: dict[str, int] = {}
        removed = 0
        for _, path in sorted(indices, reverse=True):
            try:
                wanted = {one.digest: one.nbytes for one in index.loaded(_read(path, index.LARGEST), str(path)).files}
            except (OSError, ValueError):
                wanted = None
            if wanted is None or (used and sum((used | wanted).values()) > limit):
                path.unlink(missing_ok=True)
                removed += 1
            else:
                used |= wanted
        for folder in (self._path / "blobs").iterdir():
            for blob in folder.iterdir():
                if blob.name not in used:
                    blob.unlink(missing_ok=True)
        return removed


def write(path: Path, data: bytes, *, mode: int = 0o600, modified: int | None = None) -> None:
    """Writes a file beside itself, and renames it: it is there whole, or not at all.

    Raises:
        OSError: it cannot be written. Nothing is left.
    """
    temporary = path.with_name(f".penstock-{os.getpid()}-{time.monotonic_ns()}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if modified is not None:
            os.utime(temporary, ns=(modified, modified))
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _read(path: Path, limit: int) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022 or status.st_uid not in _trusted():
            raise OSError(errno.EPERM, "others may write to it", str(path))
        if status.st_size > limit:
            raise OSError(errno.EFBIG, "it is larger than it should be", str(path))
        return file.read(limit)


def _refuse_what_others_write(path: Path, named: Path) -> None:
    """Refuses a directory that someone else could change, or replace by another.

    Args:
        path: the directory, without symbolic links.
        named: how the user named what it is in, perhaps by symbolic links.

    Raises:
        ConfigError: it, what is in it or what it is in is someone else's, or others may write to it.
    """
    inside = path / "indexes", path / "blobs", path
    for folder in (*inside, *path.parents, *named.parents):
        try:
            status = folder.stat(follow_symlinks=folder not in inside)
        except FileNotFoundError:
            continue
        # In a sticky directory nobody can rename what is another's.
        is_sticky = bool(status.st_mode & stat.S_ISVTX) and folder not in inside
        if not stat.S_ISDIR(status.st_mode):
            why = "is no directory"
        elif status.st_uid not in _trusted():
            why = "belongs to another user"
        elif status.st_mode & 0o022 and not is_sticky:
            why = "can be written by others"
        else:
            continue
        raise ConfigError(
            location=str(folder),
            cause=f"the start cache is refused: {folder} {why}, and what is in it will be run",
            remedy="Use a directory of your own: chmod go-w",
        )


def _trusted() -> set[int]:
    return {0, os.geteuid()}
