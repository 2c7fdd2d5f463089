"""What the machine itself can do, measured beside the loaders: no loader can be faster, and each is held against it.

- ``disk``, ``page-cache``, ``pcie``: as ``penstock doctor`` measures them (``penstock.doctor.limits``).
- ``disk-whole``, ``ready``, ``fresh``: reads to one buffer of the file's size, by direct reads or from cached pages;
  ``fresh`` memory is cleared by the kernel while it is read to.
- ``memcpy``: parallel copies from host memory to host memory.

Each is tried with several settings in every round; the median of the best setting counts.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

from penstock.doctor.limits import MIB, buffer, cores, pcie, read_files, to_small_buffers
from penstock.doctor.limits import SETTINGS as SHARED

from . import data, states

# Threads and block size in MiB. 0 threads: as many as cores.
SETTINGS = SHARED | {
    "disk-whole": [(4, 2), (4, 8), (8, 2), (8, 8)],
    "ready": [(2, 1), (2, 4)],
    "fresh": [(2, 2)],
    "memcpy": [(0, 64)],
}


def settings(limit: str) -> list[str]:
    """What a limit is tried with on this machine."""
    return [f"{cores(threads)} x {block} MiB" for threads, block in SETTINGS[limit]]


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """Measures a limit with one of its settings."""
    name, files = task["limit"], [Path(file) for file in task["files"]]
    threads, mib = SETTINGS[name][settings(name).index(task["setting"])]
    threads, block = cores(threads), int(mib * MIB)
    if name in {"memcpy", "pcie"}:
        return {"gb_per_s": round(_memcpy(threads, block) if name == "memcpy" else pcie(block, task["device"]), 3)}
    if name in {"disk", "page-cache"}:
        place = to_small_buffers(threads, block)
    else:
        (file,) = files
        size = file.stat().st_size
        states.settle_memory(size + size // 2)
        whole = buffer(size + 4 * MIB, ready=name != "fresh")

        def place(_worker: int, at: int, size: int) -> memoryview:
            return whole[at : at + size]

    seconds, cpu, done = read_files(files, threads, block, place, direct=name.startswith("disk"))
    return {"seconds": seconds, "cpu_seconds": cpu, "bytes": done, "gb_per_s": round(done / seconds / data.GB, 3)}


def _memcpy(threads: int, size: int) -> float:
    pairs = [(buffer(size), buffer(size)) for _ in range(threads)]
    addresses = [tuple(ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in pair) for pair in pairs]
    times = 4

    def copy(worker: int) -> None:
        source, target = addresses[worker]
        for _ in range(times):
            ctypes.memmove(target, source, size)  # gives up the GIL

    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        data.in_threads(copy, range(threads), threads)
        best = max(best, threads * times * size / (time.perf_counter() - began) / data.GB)
    return best
