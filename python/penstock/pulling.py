"""``penstock.pull``: remote objects copied to a directory of this machine.

The core does the work; here it is asked for, waited for and reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock._native import LoadOptions, Source, shown
from penstock.arguments import AnyPath, location, settings
from penstock.errors import LocationNotFoundError
from penstock.neighbours import with_neighbours
from penstock.patterns import is_wanted
from penstock.progress import ProgressOption, progress_reporter
from penstock.storage_options import core_options


class PulledFile(NamedTuple):
    """One file of a pull.

    Attributes:
        path: where it is, relative to the directory, with slashes.
        nbytes: its size in bytes.
        how: ``"pulled"`` if it was fetched whole, ``"resumed"`` if part of it was there from a pull that was cut off,
            ``"kept"`` if it was there, of the same size and version.
    """

    path: str
    nbytes: int
    how: Literal["pulled", "resumed", "kept"]


class Pulled(NamedTuple):
    """What a pull did.

    Attributes:
        directory: where the files are.
        files: all of them, those that were there already too, sorted by path.
        fetched_bytes: bytes that were fetched over the network.
        seconds: wall-clock time.
    """

    directory: Path
    files: list[PulledFile]
    fetched_bytes: int
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


def pull(
    url: str,
    dst: AnyPath,
    *,
    allow_patterns: str | Iterable[str] | None = None,
    ignore_patterns: str | Iterable[str] | None = None,
    progress: ProgressOption = None,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
    dry_run: bool = False,
) -> Pulled:
    """Brings remote objects to a directory: many ranges at once, each file under its name only when it is complete.

    What is there already, of the same size and version, is not fetched again. A pull that was cut off, even by a kill,
    is continued by the next one to the same directory. What that needs is in ``dst/.penstock``. Pulls to one directory
    take turns, so every process of a job may call this. One that waits for another for some seconds says so in the
    log, with the lock's path.

    Args:
        url: a prefix of an object store (``s3://``, ``gs://``, ``az://``, …), with everything below it. Or a repository
            of the Hugging Face hub or a directory of one (``hf://org/name[@revision][/path]``), or one object. Of a
            plain HTTP server, which cannot list, also a directory that holds a checkpoint: its index and shards are
            pulled.
        dst: the directory, which is made where it is missing.
        allow_patterns: shell patterns, as ``fnmatch`` has them: only objects whose path below the URL matches one of
            them. ``*`` also matches slashes; a pattern that ends in a slash means everything below.
        ignore_patterns: patterns of objects to leave out.
        progress: ``True`` for a bar, or a function of (bytes done, bytes in all).
        storage_options: credentials, endpoint and settings of the remote store, as for ``penstock.open``.
        options: settings; of them, ``readers`` counts here: the requests in flight (32 where nothing is said).
        dry_run: fetch nothing and make nothing, only say what would become of each file.

    Raises:
        LocationNotFoundError: nothing is there, or nothing that is wanted.
        LocationAccessError: the store denies access, a key or a link would lead out of the directory, or ``dst`` is
            no directory that can be written to.
        LocationChangedError: an object was replaced while it was fetched.
        StorageError: the network or the disk failed, or the disk is full.
        ConfigError: a storage option is unknown.
    """
    directory = location(dst, "dst")
    source, wanted = source_and_wanted(url, allow_patterns, ignore_patterns, storage_options)
    if dry_run:
        return preview_entries(source, wanted, directory)
    return pull_entries(source, wanted, directory, progress=progress, options=options)


def source_and_wanted(
    url: str,
    allow_patterns: str | Iterable[str] | None,
    ignore_patterns: str | Iterable[str] | None,
    storage_options: Mapping[str, Any] | None,
    *,
    called: str = "allow_patterns= and ignore_patterns=",
) -> tuple[Source, list[int]]:
    """What is at ``url``, and the indices of its entries that the patterns let through.

    Args:
        called: what the user knows the patterns by.

    Raises:
        LocationNotFoundError: nothing is there, or nothing that is wanted.
    """
    allowed, ignored = _patterns(allow_patterns), _patterns(ignore_patterns) or []
    where = location(url, "url")
    storage = core_options(storage_options, [where])
    try:
        source = Source(where, storage)
    except LocationNotFoundError as error:
        raise with_neighbours(error, [where], storage) from None
    wanted = [index for index, (path, _) in enumerate(source.entries) if is_wanted(path, allowed, ignored)]
    if not wanted:
        cause = f"none of the {len(source.entries):,} objects there is wanted"
        remedy = f"Check {called}: they are compared with the whole path below the URL"
        raise LocationNotFoundError(location=shown(where), cause=cause, remedy=remedy)
    return source, wanted


def preview_entries(source: Source, wanted: list[int], dst: AnyPath) -> Pulled:
    """What ``pull_entries`` would do; nothing is fetched or made."""
    began = time.perf_counter()
    directory = location(dst, "dst")
    files = [PulledFile(*file) for file in source.preview(directory, wanted)]
    return Pulled(Path(directory), files, 0, time.perf_counter() - began)


def pull_entries(
    source: Source,
    wanted: list[int],
    dst: AnyPath,
    *,
    progress: ProgressOption = None,
    files_done: Callable[[int, int], object] | None = None,
    options: LoadOptions | None = None,
) -> Pulled:
    """As ``pull``, of those of the source's entries that have these indices.

    ``files_done`` is called now and then, with the number of files that are complete and that of all.
    """
    directory = location(dst, "dst")
    running = source.pull(directory, wanted, None if options is None else settings(options).readers)
    _, total, *_ = running.progress()
    told = 0
    shown = progress_reporter(progress, total, "Pulling")
    try:
        ended = None
        while ended is None:
            ended = running.wait()
            done, total, *files = running.progress()
            shown.expect(total)
            if files_done is not None:
                files_done(*files)
            shown.advance(done - told)
            told = done
    finally:
        running.stop()
        shown.close()
    pulled, fetched_bytes, seconds = ended
    return Pulled(Path(directory), [PulledFile(*file) for file in pulled], fetched_bytes, seconds)


def _patterns(given: str | Iterable[str] | None) -> list[str] | None:
    """A single string is one pattern, not a pattern for each of its letters. Everything below what ends in a slash."""
    if given is None:
        return None
    patterns = [given] if isinstance(given, str) else list(given)
    return [f"{pattern}*" if pattern.endswith("/") else pattern for pattern in patterns]
