"""What engines ask of object stores besides weights: listings, and files copied to a directory.

In the words of ``runai_model_streamer``, which engines know; the work is that of ``penstock.pull`` and of the listing
that everything here uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock._native import Source, list_objects
from penstock.arguments import is_url
from penstock.patterns import matches_any
from penstock.pulling import pull_entries
from penstock.storage_options import core_options


def list_files(
    prefix: str, *, recursive: bool = False, storage_options: Mapping[str, Any] | None = None
) -> list[tuple[str, int]]:
    """(location, bytes) of the objects under a prefix, or the files directly in a directory, sorted by location.

    Args:
        prefix: the prefix, or a directory of this machine.
        recursive: of a prefix, also what lies deeper.
        storage_options: as for ``penstock.open``.

    Raises:
        LocationNotFoundError: nothing is there.
        LocationAccessError, StorageError: as ``penstock.open`` does.
    """
    options = core_options(storage_options)
    if recursive and is_url(prefix):
        return sorted((f"{prefix.rstrip('/')}/{path}", nbytes) for path, nbytes in Source(prefix, options).entries)
    objects, _ = list_objects(prefix, options)
    return [(location, nbytes) for location, _, nbytes in objects]


def list_safetensors(path: str = "", storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Locations of the safetensors files directly under a prefix or in a directory."""
    found = list_files(path, storage_options=storage_options)
    return [location for location, _ in found if location.endswith(".safetensors")]


def pull(
    model_path: str,
    dst: str,
    allow_pattern: Iterable[str] | None = None,
    ignore_pattern: Iterable[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Copies the objects under a prefix, at any depth, to a directory, as ``penstock.pull`` does. It may copy nothing.

    Args:
        model_path: the prefix.
        dst: the directory; made if it is not there.
        allow_pattern: shell patterns, of which the location or the name has to match one; all by default.
        ignore_pattern: shell patterns, of which neither may match any.
        storage_options: as for ``penstock.open``.

    Raises:
        LocationNotFoundError: nothing is under the prefix.
        LocationAccessError, LocationChangedError, StorageError: as ``penstock.pull`` does.
    """
    source = Source(model_path, core_options(storage_options))
    allowed = None if allow_pattern is None else list(allow_pattern)
    ignored = list(ignore_pattern or ())

    def is_wanted(path: str) -> bool:
        forms = (f"{model_path.rstrip('/')}/{path}", path.rpartition("/")[2])
        any_allowed = allowed is None or any(matches_any(form, allowed) for form in forms)
        return any_allowed and not any(matches_any(form, ignored) for form in forms)

    wanted = [index for index, (path, _) in enumerate(source.entries) if is_wanted(path)]
    if wanted:
        pull_entries(source, wanted, dst)
