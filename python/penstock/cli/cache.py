"""``penstock cache``: what is in a disk cache, whether it is intact, and removing some of it."""

from __future__ import annotations

import fnmatch
import os
import sys
import time
from typing import NamedTuple

from rich.text import Text

from penstock import _native
from penstock.cli.output import NARROW, Output, as_json, bare_table, plural, printable, shortened
from penstock.errors import ConfigError, LocationNotFoundError
from penstock.units import size

DIRECTORY = "PENSTOCK_CACHE_DIR"
_BESIDES = 30
"""Columns that a table needs besides the location."""


class Entry(NamedTuple):
    """One version of an object, or a part of it.

    Attributes:
        name: the directory of the entry.
        location: where the object came from, without secrets.
        nbytes: the object's bytes.
        cached_bytes: those that are there.
        is_complete: whether a load takes it for a local file.
        used: when it was used last, in seconds since 1970.
    """

    name: str
    location: str
    nbytes: int
    cached_bytes: int
    is_complete: bool
    used: float


def directory_of(given: str | None) -> str:
    """The cache's directory: what is given, or the environment's.

    Raises:
        ConfigError: neither is there.
    """
    directory = given or os.environ.get(DIRECTORY)
    if directory:
        return os.path.expanduser(directory)  # noqa: PTH111
    raise ConfigError(cause="no disk cache is named", remedy=f"Give --cache-dir, or set {DIRECTORY}")


def entries(directory: str, patterns: list[str]) -> list[Entry]:
    """The entries whose location or name matches one of the patterns, or all where there is none.

    A directory that is missing holds none, and a note says so: a schedule may prune it before the first load made it.

    Raises:
        LocationNotFoundError: patterns that match nothing.
    """
    if not os.path.isdir(directory):  # noqa: PTH112 - a name that need not be UTF-8
        if not patterns:
            sys.stderr.write(
                f"note: {printable(directory)} does not exist: the first load that uses the cache makes it\n"
            )
            return []
        remedy = f"Check --cache-dir, or {DIRECTORY}; the first load that uses the cache makes it"
        raise LocationNotFoundError(location=directory, cause="there is no such directory", remedy=remedy)
    everything = [Entry(*entry) for entry in _native.cache_entries(directory)]
    if not patterns:
        return everything
    found = [
        entry
        for entry in everything
        if any(entry.name == pattern or fnmatch.fnmatchcase(entry.location, pattern) for pattern in patterns)
    ]
    if not found:
        raise LocationNotFoundError(
            location=directory,
            cause=f"none of the {len(everything):,} entries matches {' or '.join(map(repr, patterns))}",
            remedy="`penstock cache ls` shows locations; quote a pattern such as 's3://bucket/model/*'",
        )
    return found


def ls(directory: str, patterns: list[str], *, json: bool) -> None:
    """Prints the entries, those used last first."""
    found = entries(directory, patterns)
    if json:
        as_json({"directory": directory, "entries": [entry._asdict() for entry in found]})
        return
    out = Output()
    if found:
        table = bare_table()
        table.add_column("location", overflow="fold")
        table.add_column("size", justify="right", no_wrap=True)
        table.add_column("there", justify="right", no_wrap=True)
        table.add_column("used", justify="right", no_wrap=True)
        for entry in found:
            location = printable(entry.location)
            shown = shortened(location, max(out.width - _BESIDES, _BESIDES)) if out.width < NARROW else location
            share = "all" if entry.is_complete else f"{_percent(entry)} %"
            table.add_row(Text(shown), size(entry.nbytes), share, age(time.time() - entry.used))
        out.print(table)
        out.print()
    there = sum(entry.cached_bytes for entry in found)
    out.lines([printable(f"{plural(len(found), 'object')}, {size(there)} in {directory}")])


def _percent(entry: Entry) -> int:
    """Never 100 for what is not complete."""
    return min(entry.cached_bytes * 100 // max(entry.nbytes, 1), 99)


def verify(directory: str, patterns: list[str], *, json: bool) -> None:
    """Compares entries with their checksums. Damaged blocks are fetched again by the next load that needs them."""
    listed = [(entry, _native.cache_verify(directory, entry.name)) for entry in entries(directory, patterns)]
    # A load may have evicted one meanwhile.
    results = [(entry, *compared) for entry, compared in listed if compared is not None]
    damaged = [(entry, wrong) for entry, _, wrong in results if wrong]
    compared = sum(bytes_compared for _, bytes_compared, _ in results)
    if json:
        wrongs = [{"location": entry.location, "name": entry.name, "damaged_bytes": wrong} for entry, wrong in damaged]
        as_json({"directory": directory, "objects": len(results), "compared_bytes": compared, "damaged": wrongs})
        return
    lines = [f"damaged: {size(wrong)} of {entry.location}: fetched again when needed" for entry, wrong in damaged]
    verdict = f"{len(damaged):,} damaged" if damaged else "all intact"
    lines.append(f"{plural(len(results), 'object')}, {size(compared)} compared: {verdict}")
    Output().lines(map(printable, lines))


def rm(directory: str, patterns: list[str], *, json: bool) -> None:
    """Removes entries; those in use stay."""
    removed: list[Entry] = []
    kept: list[Entry] = []
    for entry in entries(directory, patterns):
        (removed if _native.cache_remove(directory, entry.name) else kept).append(entry)
    _report(directory, removed, kept, json=json)


def prune(directory: str, nbytes: int, *, json: bool) -> None:
    """Removes entries, those used longest ago first, until all together have at most so many bytes."""
    before = entries(directory, [])
    if before:
        _native.cache_prune(directory, nbytes)
    left = {entry.name for entry in entries(directory, [])} if before else set()
    _report(directory, [entry for entry in before if entry.name not in left], [], json=json)


def _report(directory: str, removed: list[Entry], kept: list[Entry], *, json: bool) -> None:
    if json:
        names = {"removed": [entry._asdict() for entry in removed], "in_use": [entry._asdict() for entry in kept]}
        as_json({"directory": directory} | names)
        return
    lines = [f"in use: {entry.location}" for entry in kept]
    lines.append(f"removed {plural(len(removed), 'object')}, {size(sum(entry.cached_bytes for entry in removed))}")
    Output().lines(map(printable, lines))


def age(seconds: float) -> str:
    """How long ago, in one unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "now"
