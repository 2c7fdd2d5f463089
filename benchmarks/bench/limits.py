"""What the machine itself can do, measured beside the loaders: no loader can be faster, and each is held against it.

- ``disk``: parallel ``O_DIRECT`` reads of the files to small buffers that are ready.
- ``page-cache``: parallel ``pread`` of cached pages (or of tmpfs) to small buffers that are ready.
- ``disk-whole``, ``ready``, ``fresh``: the same to one buffer of the file's size, by direct reads or from cached pages;
  ``fresh`` memory is cleared by the kernel while it is read to.
- ``memcpy``: parallel copies from host memory to host memory.
- ``pcie``: one large copy from pinned memory to the GPU.

Each is tried with several settings in every round; the median of the best setting counts.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import data, states

MIB = 1 << 20
# Threads and block size in MiB. 0 threads: as many as cores.
SETTINGS = {
    "disk": [(16, 1), (8, 4), (16, 0.5)],
    "page-cache": [(0, 2), (8, 2), (0, 1)],
    "disk-whole": [(4, 2), (4, 8), (8, 2), (8, 8)],
    "ready": [(2, 1), (2, 4)],
    "fresh": [(2, 2)],
    "memcpy": [(0, 64)],
    "pcie": [(1, 1024)],
}


def settings(limit: str) -> list[str]:
    """What a limit is tried with on this machine."""
    return [f"{_threads(threads)} x {block} MiB" for threads, block in SETTINGS[limit]]


def _threads(given: int) -> int:
    return given or len(os.sched_getaffinity(0))


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """Measures a limit with one of its settings."""
    name, files = task["limit"], [Path(file) for file in task["files"]]
    threads, mib = SETTINGS[name][settings(name).index(task["setting"])]
    threads, block = _threads(threads), int(mib * MIB)
    if name in {"memcpy", "pcie"}:
        return {"gb_per_s": round(_memcpy(threads, block) if name == "memcpy" else _pcie(block, task["device"]), 3)}
    if name in {"disk", "page-cache"}:
        buffers = [buffer(block) for _ in range(threads)]

        def place(worker: int, _at: int, size: int) -> memoryview:
            return buffers[worker][:size]
    else:
        (file,) = files
        size = file.stat().st_size
        states.settle_memory(size + size // 2)
        whole = buffer(size + 4 * MIB, ready=name != "fresh")

        def place(_worker: int, at: int, size: int) -> memoryview:
            return whole[at : at + size]

    seconds, cpu, done = read_files(files, threads, block, place, direct=name.startswith("disk"))
    return {"seconds": seconds, "cpu_seconds": cpu, "bytes": done, "gb_per_s": round(done / seconds / data.GB, 3)}


def buffer(size: int, *, ready: bool = True) -> memoryview:
    """Aligned memory, in huge pages where there are any; if ``ready``, it exists before it is used."""
    # Private: Python's default is shared memory, which the kernel does not back with huge pages.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    if ready:
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, size)
    return memoryview(memory)


def read_files(
    files: list[Path],
    threads: int,
    block: int,
    destination: Callable[[int, int, int], memoryview],
    *,
    direct: bool,
    request: int | None = None,
) -> tuple[float, float, int]:
    """Reads files, block by block, by many threads: seconds, CPU seconds and bytes.

    ``destination(worker, at, size)`` says where a request goes, which is a block, or so many bytes of it at once:
    ``at`` is its offset in its file, and with ``direct`` the last one's ``size`` is rounded up to 4 KiB.
    """
    handles = [os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for file in files]
    sizes = [os.fstat(handle).st_size for handle in handles]
    blocks = [(n, at) for n, size in enumerate(sizes) for at in range(0, size, block)]
    lock, todo = threading.Lock(), iter(blocks)
    failures: list[OSError] = []

    def work(worker: int) -> None:
        while True:
            with lock:
                found = next(todo, None)
            if found is None:
                return
            file, at = found
            end = min(at + block, sizes[file])
            while at < end:
                # A direct read of the last sector asks for all of it and gets what there is.
                wanted = min(request or block, -(-(end - at) // 4096) * 4096 if direct else end - at)
                try:
                    at += os.preadv(handles[file], [destination(worker, at, wanted)], at)
                except OSError as error:
                    failures.append(error)
                    return

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    began, cpu = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    for handle in handles:
        os.close(handle)
    if failures:
        raise failures[0]
    return seconds, cpu, sum(min(block, sizes[file] - at) for file, at in blocks)


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


def _pcie(size: int, device: str) -> float:
    import torch

    host = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(1)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, size / (time.perf_counter() - began) / data.GB)
    return best
