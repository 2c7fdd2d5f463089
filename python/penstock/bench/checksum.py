"""Checksums of tensors' bytes: of files by plain reads with numpy, of loaded tensors with torch where they lie.

The two sides share a definition and no code, and neither uses a loader. The sum is of 64-bit words, each first mixed
with its place in a way that is not linear: swapped, moved, doubled and missing words are found, not only changed ones.
It is exact integer arithmetic modulo 2^64, the same on a CPU and a GPU.

    word i, little-endian, the last one filled up with zeros
    h = (word ^ (i + 1) * PLACE) * MIX;   h = h ^ (h >> 29), an arithmetic shift;   sum of h, plus the number of bytes
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

PLACE = 0x1E3779B97F4A7C15
MIX = 0x3F58476D1CE4E5B9
SHIFT = 29
# How many bytes are worked on at once: what stays in a core's cache, and what keeps a GPU busy.
CACHED = 512 << 10
READ_BYTES = 32 << 20
BATCH = {"cpu": 4 << 20, "cuda": 256 << 20}


def signed(number: int) -> int:
    """The number modulo 2^64, as a signed word holds it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


# ---- of files


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """A safetensors file's header without its metadata, and where its data begins."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def of_files(paths: list[Path]) -> dict[str, int]:
    """The checksum of every tensor of the files, from plain reads of their bytes."""
    jobs = [job for path in paths for job in _jobs(path)]
    with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as pool:
        parts = list(pool.map(_of_span, jobs))
    sums: dict[str, int] = {}
    for part in parts:
        for name, value in part:
            sums[name] = signed(sums.get(name, 0) + value)
    return sums


Span = tuple[str, int, int, int]  # name, first word's number, where in the file, bytes


def _jobs(path: Path) -> Iterator[tuple[Path, list[Span]]]:
    """Reads of about equal size: parts of a large tensor, or many small ones."""
    header, data = read_header(path)
    spans: list[Span] = []
    size = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        for at in range(start, max(end, start + 1), READ_BYTES):
            part = min(READ_BYTES, end - at)
            if spans and size + part > READ_BYTES:
                yield path, spans
                spans, size = [], 0
            spans.append((name, (at - start) // 8, data + at, part))
            size += part
    if spans:
        yield path, spans


def _of_span(job: tuple[Path, list[Span]]) -> list[tuple[str, int]]:
    path, spans = job
    first, last = spans[0][2], spans[-1][2] + spans[-1][3]
    with path.open("rb", buffering=0) as file:
        file.seek(first)
        buffer = memoryview(bytearray(last - first))
        filled = 0
        while filled < len(buffer):
            count = file.readinto(buffer[filled:])
            if not count:
                raise EOFError(f"{path.name} ends before its last tensor")
            filled += count
    return [(name, of_bytes(buffer[at - first :][:size], word)) for name, word, at, size in spans]


_PLACES = np.arange(1, CACHED // 8 + 1, dtype=np.int64) * np.int64(PLACE)


def of_bytes(data: memoryview | bytes, first_word: int = 0) -> int:
    """The part of a tensor's checksum that these bytes bring, the first of which begin word ``first_word``."""
    whole = len(data) // 8 * 8
    tail = bytes(data[whole:])
    words = np.frombuffer(data[:whole] if whole else b"", dtype="<i8")
    total = len(data)
    for at in range(0, len(words), len(_PLACES)):
        total += _sum(words[at : at + len(_PLACES)], first_word + at)
    if tail:
        total += _sum(np.frombuffer(tail.ljust(8, b"\0"), dtype="<i8"), first_word + len(words))
    return signed(total)


def _sum(words: npt.NDArray[np.int64], first_word: int) -> int:
    mixed = _PLACES[: len(words)] + np.int64(signed(first_word * PLACE))
    np.bitwise_xor(mixed, words, out=mixed)
    np.multiply(mixed, np.int64(MIX), out=mixed)
    np.bitwise_xor(mixed, mixed >> SHIFT, out=mixed)
    return int(mixed.sum())


# ---- of tensors


def of_model(model: Any) -> dict[str, int]:
    """The checksum of every parameter of a module. An engine's other processes find it here by its name."""
    return of_tensors(dict(model.named_parameters()))


def of_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """The checksum of every tensor, computed on the tensor's device; tensors of equal size go together."""
    sizes: dict[tuple[int, Any], list[str]] = {}
    for name, tensor in tensors.items():
        sizes.setdefault((tensor.nbytes, tensor.device), []).append(name)
    sums: dict[str, int] = {}
    for (nbytes, device), names in sizes.items():
        together = max(1, BATCH[device.type] // max(nbytes, 1))
        for at in range(0, len(names), together):
            batch = names[at : at + together]
            sums |= zip(batch, _of_equal([tensors[name] for name in batch], nbytes), strict=True)
    return sums


def _of_equal(tensors: list[torch.Tensor], nbytes: int) -> list[int]:
    import torch

    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    device = flat[0].device
    total = torch.full((len(flat),), nbytes, dtype=torch.int64, device=device)
    step = max(8, BATCH[device.type] // len(flat) // 8 * 8)
    for at in range(0, nbytes, step):
        part = torch.stack([bytes_[at : at + step] for bytes_ in flat])
        part = torch.nn.functional.pad(part, (0, -part.shape[1] % 8))
        words = part.view(torch.int64)
        places = torch.arange(at // 8 + 1, at // 8 + 1 + words.shape[1], dtype=torch.int64, device=device) * PLACE
        mixed = (words ^ places).mul_(MIX)
        total += mixed.bitwise_xor_(mixed >> SHIFT).sum(dim=1)
    return [int(value) for value in total.cpu()]


def wrong(found: dict[str, int], expected: dict[str, int]) -> list[str]:
    """Names of the tensors that are missing, too many, or of other bytes than expected."""
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
