"""The small files beside weights: listed, and brought to a directory, from object stores as from local disks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from penstock._native import fetch_object, list_objects


def list_files(prefix: str) -> list[tuple[str, int]]:
    """(location, bytes) of the objects directly under a prefix, or the files in a directory, sorted by location.

    Raises:
        ObjectNotFoundError: nothing is there.
        ObjectAccessError, StorageError: as ``penstock.open`` does.
    """
    return list_objects(prefix)


def list_safetensors(path: str = "") -> list[str]:
    """Locations of the safetensors files directly under a prefix or in a directory."""
    return [location for location, _ in list_files(path) if location.endswith(".safetensors")]


def pull(
    model_path: str,
    dst: str,
    allow_pattern: Sequence[str] | None = None,
    ignore_pattern: Sequence[str] | None = None,
) -> None:
    """Brings objects directly under a prefix to a directory; what is there of the same name and size is left alone.

    A file appears under its name when it is complete.

    Args:
        model_path: the prefix.
        dst: the directory; made if it is not there.
        allow_pattern: shell patterns, of which the location or the name has to match one; all by default.
        ignore_pattern: shell patterns, of which neither may match any.
    """
    directory = Path(dst)
    directory.mkdir(parents=True, exist_ok=True)
    for location, nbytes in list_files(model_path):
        name = location.rpartition("/")[2]
        if allow_pattern is not None and not _matches(location, name, allow_pattern):
            continue
        if ignore_pattern is not None and _matches(location, name, ignore_pattern):
            continue
        if name in {"", ".", ".."} or os.sep in name:
            continue
        target = directory / name
        if target.is_file() and target.stat().st_size == nbytes:
            continue
        part = directory / f".{name}.{os.getpid()}.part"
        try:
            fetch_object(location, str(part))
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def _matches(location: str, name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(location, pattern) or fnmatch(name, pattern) for pattern in patterns)
