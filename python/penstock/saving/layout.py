"""Where each tensor goes: shards, the header of each, and the index over them.

Files are those that safetensors writes, byte for byte: tensors by dtype, the widest first, then by name, and a header
of compact JSON that is padded with spaces to a multiple of 8. Nothing here knows a tensor library or touches a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.errors import ConfigError

DTYPE_ORDER = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
"""The order of safetensors, which sorts by it from the last to the first."""

MAX_HEADER_BYTES = 100_000_000
"""What safetensors reads at most."""

_RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_ORDER)}


class Entry(NamedTuple):
    """A tensor that is to be saved."""

    name: str
    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]
    nbytes: int
    tensor: Any
    """As it was given."""


class File(NamedTuple):
    """A safetensors file that is to be written."""

    name: str
    header: bytes
    """All that comes before the tensors, its length included."""
    entries: list[Entry]
    """In the order of their bytes."""


def plan(
    entries: Sequence[Entry], metadata: Mapping[str, str], name: str, shard_bytes: int | None
) -> tuple[list[File], bytes | None]:
    """The files of a checkpoint, and its index where there are several.

    Args:
        name: of the files without their ending: ``model``.
        shard_bytes: the most bytes of tensors in a file; a larger tensor has a file of its own. None for one file.

    Raises:
        ConfigError: for a header that is longer than any reader takes.
    """
    shards = [list(entries)] if shard_bytes is None else _shards(entries, shard_bytes)
    if len(shards) == 1:
        return [_file(f"{name}.safetensors", shards[0], metadata)], None
    names = [f"{name}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    files = [_file(file, shard, metadata) for file, shard in zip(names, shards, strict=True)]
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
        "weight_map": {entry.name: file for file, shard in zip(names, shards, strict=True) for entry in shard},
    }
    return files, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def index_name(name: str) -> str:
    """How the index is called."""
    return f"{name}.safetensors.index.json"


def _shards(entries: Iterable[Entry], most: int) -> list[list[Entry]]:
    """In the order given, each filled before the next begins."""
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    return shards


def _file(name: str, entries: Iterable[Entry], metadata: Mapping[str, str]) -> File:
    ordered = sorted(entries, key=lambda entry: (-_RANK[entry.dtype], entry.name.encode()))
    return File(name, header(ordered, metadata), ordered)


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file with these tensors, in this order.

    Raises:
        ConfigError: where it is longer than any reader takes.
    """
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        described[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        cause = f"the header of {len(entries):,} tensors has {len(text):,} bytes, and readers take {MAX_HEADER_BYTES:,}"
        raise ConfigError(cause=cause, remedy="Save in smaller shards (shard_bytes), or less metadata")
    return len(text).to_bytes(8, "little") + text
