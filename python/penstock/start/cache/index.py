"""An index: the files that belong to a key, by place and path, each with the hash of its content.

The first line is the SHA-256 of the rest, which is JSON. Nothing of an index is trusted: names that could lead out of a
place, hashes that are none, and sizes that cannot be are refused with the whole index. Pure.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.errors import FormatError

SCHEMA = 1
LARGEST = 64 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_COMPONENT = re.compile(r"(?!\.{1,2}$)[^/\0]{1,255}")
_LONGEST_PATH = 2048
_MOST_BYTES = 1 << 50


@dataclass(frozen=True)
class Kept:
    """A file of a cache.

    Attributes:
        place: the name of the place.
        path: below it, with ``/``.
        digest: SHA-256 of its blob, in hexadecimal.
        nbytes: of its blob.
        modified: modification time, ns.
        executable: whether it may be run.
        placed: whether its text names the place's directory, written as ``MARK`` in the blob.
    """

    place: str
    path: str
    digest: str
    nbytes: int
    modified: int
    executable: bool = False
    placed: bool = False


MARK = b"[penstock:place]"
"""In the place of a directory's name."""


@dataclass(frozen=True)
class Index:
    """What belongs to a key.

    Attributes:
        described: what the key was made of, for people.
        files: in any order, each place and path once.
    """

    described: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Kept, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all blobs, each once."""
        return sum({kept.digest: kept.nbytes for kept in self.files}.values())

    def with_files(self, more: Iterable[Kept], limit: int) -> Index:
        """With these files too, which take the place of those of the same name; the oldest go where it gets too large.

        Args:
            limit: most bytes of all blobs.
        """
        files = {(kept.place, kept.path): kept for kept in (*self.files, *more)}
        kept = sorted(files.values(), key=lambda one: one.modified, reverse=True)
        found = Index(self.described, tuple(kept))
        while found.nbytes > limit:
            found = Index(self.described, found.files[: len(found.files) * 9 // 10])
        return found


def dumped(index: Index) -> bytes:
    """The index as it is kept."""
    value = {
        "penstock start cache": SCHEMA,
        "of": dict(index.described),
        "files": [asdict(kept) for kept in index.files],
    }
    text = json.dumps(value, indent=1).encode()
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def loaded(data: bytes, location: str) -> Index:
    """The index that was kept.

    Raises:
        FormatError: damaged, of another schema, or with names that lead out of a place.
    """
    digest, _, text = data.partition(b"\n")
    try:
        if hashlib.sha256(text).hexdigest().encode() != digest:
            raise ValueError("it is damaged")  # noqa: TRY301
        value = json.loads(text)
        if value["penstock start cache"] != SCHEMA:
            raise ValueError("it is of another version of Penstock")  # noqa: TRY301
        files = tuple(map(_kept, value["files"]))
        if len({(kept.place, kept.path) for kept in files}) != len(files):
            raise ValueError("it names a file twice")  # noqa: TRY301
        return Index(dict(value["of"]), files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = str(error) if type(error) is ValueError else "it is malformed"
        raise FormatError(
            location=location, cause=f"the start cache's index is refused: {why}", remedy="Remove it: it is made anew"
        ) from None


def _kept(value: Any) -> Kept:
    kept = Kept(**value)
    names = kept.path.split("/")
    if not all(map(_COMPONENT.fullmatch, names)) or len(kept.path) > _LONGEST_PATH:
        raise ValueError(f"{kept.path!r} leads out of its place")
    if _COMPONENT.fullmatch(kept.place) is None or _DIGEST.fullmatch(kept.digest) is None:
        raise ValueError("a hash or a name of a place is none")
    sizes = type(kept.nbytes) is int and type(kept.modified) is int
    flags = type(kept.executable) is bool and type(kept.placed) is bool
    if not (sizes and flags and 0 <= kept.nbytes <= _MOST_BYTES and 0 <= kept.modified < 1 << 63):
        raise ValueError("a size or a time cannot be")
    return kept
