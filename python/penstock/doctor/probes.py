"""Measures what limits loads here: the disk, the page cache, and copies to GPUs. Each takes a fraction of a second.

Nothing is changed: files are read only, and what a probe brought into the page cache is dropped again.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.doctor import limits
from penstock.doctor.facts import Gpu

_SECONDS = 0.35
"""The time of one setting."""
_MOST = 512 * limits.MIB
"""Bytes of a file that are read."""
_COPIED = 256 * limits.MIB
_COPIED_BY_NODE = 64 * limits.MIB


@dataclass
class FileRates:
    """GB/s of one file's storage; None where it could not be measured."""

    direct: float | None = None
    buffered: float | None = None
    page_cache: float | None = None
    note: str | None = None


def file_rates(file: Path, *, is_cached: bool | None) -> FileRates:
    """Reads a part of a file: past the page cache, through it, and from it.

    Args:
        file: a large file of this machine.
        is_cached: whether the page cache holds it: then it is not read through it, and stays there. None where that is
            not known: then it is only read past it.

    Raises:
        OSError: it cannot be read.
    """
    size = file.stat().st_size
    start = size // 3 // limits.SECTOR * limits.SECTOR
    span = (start, min(start + _MOST, size))
    found = FileRates()
    try:
        found.direct = _best(file, span, "disk")
    except OSError as error:
        found.note = f"direct I/O is refused: {error.strerror}"
    if is_cached:
        found.page_cache = _best(file, span, "page-cache")
    elif is_cached is False:
        # As much as can be had in that time, and no more: it is dropped again.
        rate = found.direct or 1.0
        span = (start, min(span[1], start + int(rate * limits.GB * _SECONDS)))
        try:
            found.buffered = _rate(file, span, 0, 2, direct=False)
            found.page_cache = _best(file, span, "page-cache")
        finally:
            drop(file, *span)
    return found


def drop(file: Path, start: int, end: int) -> None:
    """Has the page cache forget a part of a file."""
    with suppress(OSError):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, start, end - start, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _best(file: Path, span: tuple[int, int], limit: str) -> float | None:
    rates = (_rate(file, span, *setting, direct=limit == "disk") for setting in limits.SETTINGS[limit])
    return max(filter(None, rates), default=None)


def _rate(file: Path, span: tuple[int, int], threads: int, mib: float, *, direct: bool) -> float | None:
    threads, block = limits.cores(threads), int(mib * limits.MIB)
    place = limits.to_small_buffers(threads, block)
    seconds, _, done = limits.read_files([file], threads, block, place, direct=direct, spans=[span], at_most=_SECONDS)
    return done / seconds / limits.GB if done else None


def gpu_rates(device: str) -> tuple[float, float]:
    """Pinned and pageable memory to a GPU, in GB/s. Needs torch; raises what torch raises."""
    pinned = limits.pcie(_COPIED, device)
    return pinned, limits.pcie(_COPIED // 4, device, pinned=False, times=2)


def rates_by_node(
    gpus: Sequence[Gpu], nodes: dict[int, frozenset[int]], allowed: frozenset[int]
) -> dict[str, dict[int, float]]:
    """Pinned memory of each NUMA node to each GPU that torch sees, in GB/s, by the GPU's PCI address.

    As nvbandwidth does it: a thread of the node touches the memory first, so it lies there. Nodes of which this process
    may use no core are left out. Needs torch; raises what torch raises.
    """
    import torch

    known = {gpu.slot for gpu in gpus}
    found: dict[str, dict[int, float]] = {}
    for ordinal in range(torch.cuda.device_count()):
        slot = slot_of(ordinal)
        if slot is None or slot not in known:
            continue
        for node, cores in nodes.items():
            if cores & allowed:
                copy = _bound(cores & allowed, lambda at=ordinal: limits.pcie(_COPIED_BY_NODE, f"cuda:{at}"))  # type: ignore[misc]
                found.setdefault(slot, {})[node] = copy
    return found


def slot_of(ordinal: int) -> str | None:
    """The PCI address of CUDA's GPU of that number; None where the driver does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, text = ctypes.c_int(), ctypes.create_string_buffer(32)
    refused = driver.cuDeviceGet(ctypes.byref(device), ordinal) or driver.cuDeviceGetPCIBusId(text, 32, device)
    return None if refused else text.value.decode().lower()


def _bound(cores: frozenset[int], work: Callable[[], float]) -> float:
    """Calls ``work`` in a thread that may use these cores only; this thread keeps its own."""
    result: list[float] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            os.sched_setaffinity(0, cores)
            result.append(work())
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return result[0]
