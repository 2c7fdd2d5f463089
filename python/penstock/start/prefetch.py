"""Bringing ranges of files into the page cache, in order, without standing in an engine's way.

One thread, at idle I/O priority, with at most two chunks under way: a page fault of the engine waits behind those at
most. It stops when memory would run short, which counts what was brought in here, though the kernel could forget it.
What is in the page cache is not read again. Of several processes one reads a file at a time: the others find it there.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock._native import spare_memory
from penstock.doctor.tree import Tree, whole
from penstock.start.node import Turns
from penstock.start.profile import Wanted, is_stale
from penstock.start.residency import Ranges, resident, total, without

CHUNK_BYTES = 2 << 20
_CHECK_BYTES = 64 << 20
_GAP_BYTES = 128 << 10
_SCRATCH = bytearray(CHUNK_BYTES)
_RESERVE_SHARE, _RESERVE_MOST = 0.1, 8 << 30
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IDLE = 3 << 13


@dataclass
class Brought:
    """What was brought in.

    Attributes:
        nbytes: bytes that are in the page cache now, those that were there before too.
        files: of how many files.
        stale: files that have changed since, or are gone: left out.
        failed: files that could not be read.
        why: why it stopped before the end, or None.
    """

    nbytes: int = 0
    files: int = 0
    stale: int = 0
    failed: int = 0
    why: str | None = None


def be_idle() -> None:
    """Puts this process behind all others, for the disk and the CPU. What the system refuses is left."""
    with suppress(OSError):
        os.nice(19)
    # A session has a share of its own, however nice the processes in it are: sched(7), autogroup.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")
    if (number := _IOPRIO_SET.get(platform.machine())) is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IDLE)


def bring(
    wanted: Iterable[Wanted],
    stop: Callable[[], str | None],
    free: Callable[[], int] | None = None,
    turns: Turns | None = None,
) -> Brought:
    """Brings ranges in, in order.

    Args:
        wanted: which. Files that are stale are left out.
        stop: asked between chunks; an answer ends it, and says why.
        free: bytes of memory that may be used by what is brought in; of this machine by default.
        turns: with whom files are shared; with this user's processes on this machine by default.
    """
    done = Brought()
    free = free or headroom
    turns = turns or Turns("prefetch")
    checked = -_CHECK_BYTES
    read: set[str] = set()

    def why_not() -> str | None:
        nonlocal checked
        if done.nbytes - checked >= _CHECK_BYTES:
            checked = done.nbytes
            if free() < done.nbytes + _CHECK_BYTES:
                return "memory would run short"
        return stop()

    for each in wanted:
        if is_stale(each):
            done.stale += 1
            continue
        try:
            handle = os.open(each.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            done.failed += 1
            continue
        try:
            status = os.fstat(handle)
            with turns.at(f"{status.st_dev}:{status.st_ino}", stop):
                done.why = _bring_file(handle, each, done, why_not)
            if done.why is not None:
                return done
            read.add(each.path)
            done.files = len(read)
        except OSError:
            done.failed += 1
        finally:
            os.close(handle)
    return done


def _bring_file(handle: int, wanted: Wanted, done: Brought, why_not: Callable[[], str | None]) -> str | None:
    last: tuple[int, int] | None = None
    missing = _joined(without(wanted.ranges, resident(wanted.path) or ()))
    done.nbytes += total(wanted.ranges) - total(missing)
    for start, end in _chunks(missing):
        if (why := why_not()) is not None:
            return why
        os.posix_fadvise(handle, start, end - start, os.POSIX_FADV_WILLNEED)
        if last is not None:
            _await(handle, last)
        last = start, end
        done.nbytes += end - start
    if last is not None:
        _await(handle, last)
    return None


def _await(handle: int, chunk: tuple[int, int]) -> None:
    """Returns when a chunk is there. It is read: the kernel may leave pages out of what it is advised of."""
    start, end = chunk
    while start < end and (got := os.preadv(handle, [memoryview(_SCRATCH)[: end - start]], start)):
        start += got


def _joined(ranges: Ranges) -> Ranges:
    """Ranges with little between them as one: a request costs more than that."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and start - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return tuple(joined)


def _chunks(ranges: Ranges) -> Iterable[tuple[int, int]]:
    for start, end in ranges:
        for at in range(start, end, CHUNK_BYTES):
            yield at, min(at + CHUNK_BYTES, end)


def headroom(tree: Tree | None = None) -> int:
    """Bytes that may be brought in: what is to spare here and in this control group, less a reserve for the engine."""
    tree = tree or Tree()
    memory = tree.kib("proc/meminfo", "MemTotal") or 0
    memory = min(memory, whole(tree.text("sys/fs/cgroup/memory.max")) or memory)
    return max((spare_memory(tree.root) or 0) - int(min(memory * _RESERVE_SHARE, _RESERVE_MOST)), 0)
