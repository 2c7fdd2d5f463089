"""Files to host memory by the ways that serving code has: mapped pages, one direct reader, many buffered ones.

What a file system wants differs: a network mount with many connections many readers, one over an object store a single
one in order, with large requests. Page faults of one thread are slow on all of them.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .. import data, states
from .proof import proved

MIB = 1 << 20
Buffers = list[Any]


def mapped(files: list[Path]) -> Buffers:
    """Maps the files and touches every page in order, as a first use does."""
    found: Buffers = []
    for file in files:
        with file.open("rb") as opened:
            view = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        int(view[:: states.PAGE].sum())
        found.append(view)
    return found


def direct(files: list[Path]) -> Buffers:
    """One reader, O_DIRECT, blocks of 2 MiB."""
    return [_direct(file) for file in files]


def _direct(file: Path) -> Any:
    size = file.stat().st_size
    whole = mmap.mmap(-1, -(-size // (2 * MIB)) * 2 * MIB)
    view = memoryview(whole)
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    try:
        at = 0
        while at < size:
            at += os.preadv(fd, [view[at : at + 2 * MIB]], at)
    finally:
        os.close(fd)
    return np.frombuffer(whole, dtype=np.uint8)[:size]


def buffered(files: list[Path]) -> Buffers:
    """16 readers through the page cache, blocks of 2 MiB."""
    found = [np.empty(file.stat().st_size, dtype=np.uint8) for file in files]
    views = [memoryview(whole.data) for whole in found]
    descriptors = [os.open(file, os.O_RDONLY) for file in files]

    def read(block: tuple[int, int]) -> None:
        number, at = block
        size = found[number].size
        end = min(at + 2 * MIB, size)
        while at < end:
            at += os.preadv(descriptors[number], [views[number][at:end]], at)

    try:
        blocks = [(number, at) for number, whole in enumerate(found) for at in range(0, whole.size, 2 * MIB)]
        data.in_threads(read, blocks, threads=16)
    finally:
        for fd in descriptors:
            os.close(fd)
    return found


def ours(files: list[Path]) -> Buffers:
    """What ``penstock.load`` does: readers and direct I/O as the storage wants them."""
    import penstock

    # A model of several components is a checkpoint for each.
    components: dict[Path, list[Path]] = {}
    for file in files:
        components.setdefault(file.parent, []).append(file)
    return [tensor for found in components.values() for tensor in penstock.open(found).load().values()]


ARMS: dict[str, Callable[[list[Path]], Buffers]] = {
    "penstock": ours, "mmap": mapped, "direct, 1 reader": direct, "buffered, 16 readers": buffered
}  # fmt: skip


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Reads all files by one of the ways."""
    files = [Path(file) for file in task["files"]]
    read, nbytes = ARMS[task["loader"]], sum(file.stat().st_size for file in files)
    if task["loader"] == "penstock":
        import torch

        import penstock.checkpoint  # noqa: F401 - imports are not the load's

        torch.zeros(1)
    with proved(task, files) as proof:
        began = time.perf_counter()
        found = read(files)
        seconds = time.perf_counter() - began
    right = _right(files, found) if task["loader"] != "penstock" else _right_tensors(files, found)
    return {
        "seconds": seconds,
        "bytes": nbytes,
        "bytes_ok": right,
        "wrong": [] if right else ["sampled places"],
    } | proof


def _right(files: list[Path], found: Buffers) -> bool:
    """Whether places drawn from each file hold what the file does."""
    draw = random.Random(0)
    for file, whole in zip(files, found, strict=True):
        if whole.size != file.stat().st_size:
            return False
        with file.open("rb") as opened:
            for _ in range(64):
                at = draw.randrange(max(1, whole.size - 64))
                opened.seek(at)
                if opened.read(64) != whole[at : at + 64].tobytes():
                    return False
    return True


def _right_tensors(files: list[Path], found: Buffers) -> bool:
    from safetensors import safe_open

    theirs = []
    for file in files:
        with safe_open(file, "pt") as opened:
            theirs += [_edge(opened.get_tensor(name)) for name in opened.keys()]  # noqa: SIM118
    return sorted(theirs) == sorted(map(_edge, found))


def _edge(tensor: Any) -> bytes:
    import torch

    bits = tensor.reshape(-1).view(torch.uint8)
    return bytes([*bits[:32].tolist(), *bits[-32:].tolist()])
