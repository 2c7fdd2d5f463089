"""Which ranges of a file are in the page cache, and putting them out of it.

``mincore(2)`` is asked and not ``cachestat(2)``, which asks the overlay's own inode on a container's root. The kernel
answers only the owner of a file and whoever may write to it: others are told that everything is there, so that is
reported as unknown. Nothing here touches a page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re

PAGE = mmap.PAGESIZE

Ranges = tuple[tuple[int, int], ...]
"""Half-open byte ranges, ascending and disjoint; each begins at a page."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_FAILED = ctypes.c_void_p(-1).value
_RESIDENT = bytes(number & 1 for number in range(256))
_RUN = re.compile(rb"\x01+")


def resident(path: str) -> Ranges | None:
    """The ranges of a file that the page cache holds; None where the kernel does not say."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid() and not os.access(path, os.W_OK):
            return None
        return _mapped(handle, status.st_size)
    except OSError:
        return None
    finally:
        os.close(handle)


def _mapped(handle: int, nbytes: int) -> Ranges | None:
    if not nbytes:
        return ()
    address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
    if address == _FAILED:
        return None
    try:
        pages = ctypes.create_string_buffer(-(-nbytes // PAGE))
        if _libc.mincore(address, nbytes, pages):
            return None
    finally:
        _libc.munmap(address, nbytes)
    # Only the lowest bit of a page's byte has a meaning.
    bits = pages.raw.translate(_RESIDENT)
    return tuple((run.start() * PAGE, min(run.end() * PAGE, nbytes)) for run in _RUN.finditer(bits))


def total(ranges: Ranges) -> int:
    """Bytes in the ranges."""
    return sum(end - start for start, end in ranges)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """What of ``ranges`` is in none of ``others``."""
    left: list[tuple[int, int]] = []
    rest = list(others)
    for start, end in ranges:
        at = start
        while rest and rest[0][1] <= at:
            rest.pop(0)
        for other_start, other_end in rest:
            if other_start >= end:
                break
            if other_start > at:
                left.append((at, other_start))
            at = max(at, other_end)
        if at < end:
            left.append((at, end))
    return tuple(left)


def drop(path: str) -> None:
    """Asks the kernel to forget a file's clean pages. Those that a process has mapped stay."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        return
    finally:
        os.close(handle)


def united(some: Ranges, others: Ranges) -> Ranges:
    """What is in one of them, or in both."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted([*some, *others]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return tuple(merged)
