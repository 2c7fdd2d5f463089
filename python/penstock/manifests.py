"""``penstock.manifest``: hashes of a checkpoint's files, put beside them, so that loads can verify what they read.

The core hashes and writes; here it is asked for and reported.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from penstock._native import make_manifest, shown
from penstock.arguments import AnyPath, is_url, location
from penstock.errors import ConfigError


class HashedFile(NamedTuple):
    """One file of a manifest.

    Attributes:
        path: where it is, relative to the directory, with slashes.
        nbytes: its size in bytes.
        blake3: its BLAKE3 hash, 64 hexadecimal digits, as ``b3sum`` prints it.
    """

    path: str
    nbytes: int
    blake3: str


class Manifest(NamedTuple):
    """What ``manifest`` made.

    Attributes:
        path: where the manifest is.
        files: what it speaks of, sorted by path.
        seconds: wall-clock time.
    """

    path: Path
    files: list[HashedFile]
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


def manifest(directory: AnyPath, *, threads: int | None = None) -> Manifest:
    """Hashes all files of a local directory and below, and puts a manifest of them there: ``penstock-manifest.blake3``.

    Loads from that directory then verify what they read; so do loads from wherever all of it is copied to. Names that
    begin with a dot are left out, so are signatures (``model.sig``). Links to files are followed, links to directories
    are not. A manifest that is there is replaced, at once: nobody sees half of one.

    Args:
        directory: of this machine. Make the manifest before you upload a checkpoint, and upload both.
        threads: how many threads hash; by default as many as there are cores to use.

    Raises:
        ConfigError: for a URL, a file, and an impossible number of threads.
        LocationNotFoundError, LocationAccessError, StorageError: the directory or a file in it cannot be read, or the
            manifest cannot be written.
        LocationChangedError: a file was written to meanwhile.
    """
    where = location(directory, "directory")
    if is_url(where) or where.startswith("file://"):
        cause = f"{shown(where)} is a URL, and a manifest is made of the files of a local directory"
        remedy = "Name a local copy and upload its manifest too, or save with penstock.save(…, manifest=True)"
        raise ConfigError(cause=cause, remedy=remedy)
    if threads is None:
        threads = len(os.sched_getaffinity(0))
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise ConfigError(cause=f"threads={threads!r} is not a number of threads, 1 to {MAX_THREADS}")
    began = time.monotonic()
    path, files = make_manifest(where, threads)
    return Manifest(Path(path), [HashedFile(*file) for file in files], time.monotonic() - began)


MAX_THREADS = 256
