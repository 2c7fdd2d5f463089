"""States of the page cache and of memory: made, then proved. What cannot be proved is not measured."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .data import in_threads
from .machine import available_memory

PAGE = mmap.PAGESIZE
PIECE = 64 << 20


class StateError(RuntimeError):
    """The page cache could not be brought to the state that was to be measured."""


def resident_pages(path: Path) -> npt.NDArray[np.bool_]:
    """Whether each page of the file is in the page cache, as ``mincore(2)`` says.

    Not ``cachestat(2)``: on an overlay file system that looks at the overlay's own, empty, mapping.
    """
    size = path.stat().st_size
    pages = np.zeros(-(-size // PAGE), dtype=np.uint8)
    if size:
        libc = ctypes.CDLL(None, use_errno=True)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = np.frombuffer(mapped, dtype=np.uint8)
            address, vector = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
            failed = libc.mincore(address, ctypes.c_size_t(size), vector)
            del view
            if failed:
                raise OSError(ctypes.get_errno(), "mincore", str(path))
    return (pages & 1).astype(bool)


def cached_share(paths: list[Path]) -> float:
    """The share of the files' pages that is in the page cache."""
    pages = np.concatenate([resident_pages(path) for path in paths])
    return float(pages.mean()) if len(pages) else 0.0


def set_cache(paths: list[Path], state: str) -> float:
    """Makes files ``"cold"`` (not in the page cache), ``"half"`` (every other 64 MiB) or ``"warm"``, and proves it.

    Returns the share of pages that is cached. At most 1 % may differ from the state, else ``StateError`` is raised.
    """
    for path in paths:
        size = path.stat().st_size
        # A small file is cut smaller, so that half of it can be cached too.
        piece = min(PIECE, -(-size // 16 // PAGE) * PAGE or PAGE)
        pieces = [
            (at, min(at + piece, size), state == "warm" or (state == "half" and number % 2 == 0))
            for number, at in enumerate(range(0, size, piece))
        ]
        for attempt in range(4):
            have = resident_pages(path)
            wrong = [
                part for part in pieces if abs(have[part[0] // PAGE : -(-part[1] // PAGE)].mean() - part[2]) > 0.01
            ]
            if not wrong:
                break
            # A folio may reach over pieces and then cannot be dropped with one of them: start again from nothing.
            _bring(path, wrong if attempt == 0 else [(0, size, False), *(part for part in pieces if part[2])])
        else:
            share = resident_pages(path).mean()
            raise StateError(f"{path.name} should be {state}, but {share:.1%} of it are in the page cache")
    return cached_share(paths)


def counts_reads(path: Path) -> bool:
    """Whether the kernel counts what a process reads of this file from a device: not so of FUSE or a network."""
    try:
        set_cache([path], "cold")
        before = device_bytes()
        with path.open("rb", buffering=0) as file:
            file.read(PAGE)
        return device_bytes() > before
    except (OSError, StateError, KeyError):
        return False


def device_bytes() -> int:
    """What the kernel has read from devices for this process."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"])


def drop_page_cache() -> None:
    """Drops the page cache of the whole machine: interpreters and libraries are cold too, as after pulling an image.

    Raises ``StateError`` where this process may not.
    """
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError as error:
        raise StateError(f"the page cache cannot be dropped: {error}") from error


def _bring(path: Path, pieces: list[tuple[int, int, bool]]) -> None:
    """Drops pieces of a file from the page cache, then reads others into it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        for start, end, cached in pieces:
            if not cached:
                os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)
        # Otherwise reading ahead brings what is not wanted.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

        def read(piece: tuple[int, int, bool]) -> None:
            at, end, _ = piece
            buffer = memoryview(bytearray(min(8 << 20, end - at)))
            while at < end:
                at += os.preadv(fd, [buffer[: end - at]], at)

        in_threads(read, [piece for piece in pieces if piece[2]], threads=8)
    finally:
        os.close(fd)


def touch(tensors: dict[str, Any]) -> int:
    """Reads one byte of every page of tensors in host memory, as first use would."""
    import torch

    return sum(int(t.detach().flatten().view(torch.uint8)[::PAGE].sum()) for t in tensors.values())


def enough_memory(nbytes: int) -> int:
    """The bytes of host memory that a load of so many may need, as far as the machine can spare them."""
    return min(nbytes * 5 // 4, available_memory() // 2)


def settle_memory(nbytes: int) -> None:
    """Touches and frees ``nbytes`` in another process, so that the measured one gets memory that really exists.

    A virtual machine's host often backs a page only when the guest first touches it, and takes free pages back after a
    while. Without this, what is measured is the hypervisor: 3 s instead of 0.3 s for 2 GiB, whatever the loader.
    """
    touch = (
        "import mmap, sys\n"
        "m = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "m.madvise(mmap.MADV_HUGEPAGE)\n"
        "try: m.madvise(23)\n"  # MADV_POPULATE_WRITE, Linux 5.14
        "except OSError:\n"
        "    for at in range(0, len(m), 4096): m[at] = 1\n"
    )
    subprocess.run([sys.executable, "-S", "-c", touch, str(nbytes)], check=True)
