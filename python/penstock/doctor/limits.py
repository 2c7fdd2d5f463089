"""What the machine itself can do: no loader can be faster, and each is held against it.

``penstock doctor`` and the benchmarks measure with this module, so that they cannot disagree. Each limit is tried with
several settings, and the best counts. Nothing here knows a checkpoint, and only ``pcie`` imports a framework.

- ``disk``: parallel ``O_DIRECT`` reads of files to small buffers that are ready.
- ``page-cache``: parallel ``pread`` of cached pages (or of tmpfs) to small buffers that are ready.
- ``fresh_memory``: host memory that is touched for the first time.
- ``pcie``: one large copy from pinned memory to the GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MIB = 1 << 20
GB = 1e9
SECTOR = 4096
"""Direct reads begin and end at multiples of it."""
SETTINGS: dict[str, list[tuple[int, float]]] = {
    "disk": [(16, 1), (8, 4), (16, 0.5)],
    "page-cache": [(0, 2), (8, 2), (0, 1)],
    "pcie": [(1, 1024)],
}
"""Threads and block size in MiB. 0 threads: as many as cores."""


def cores(threads: int = 0) -> int:
    """``threads``, or as many as this process may use cores."""
    return threads or len(os.sched_getaffinity(0))


def buffer(size: int, *, ready: bool = True) -> memoryview:
    """Aligned memory, in huge pages where there are any; if ``ready``, it exists before it is used."""
    # Private: Python's default is shared memory, which the kernel does not back with huge pages.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    if ready:
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, size)
    return memoryview(memory)


def fresh_memory(size: int, at_most: float) -> tuple[float, list[memoryview]]:
    """Touches memory for the first time, by one thread, for so many bytes or seconds, whatever ends first.

    Returns:
        GB/s, and the memory: as long as it is held, nobody else is given it as if it were new.
    """
    piece = 8 * MIB
    held: list[memoryview] = []
    began = time.perf_counter()
    while len(held) * piece < size and time.perf_counter() - began < at_most:
        held.append(buffer(piece))
    seconds = time.perf_counter() - began
    return len(held) * piece / seconds / GB, held


def to_small_buffers(threads: int, block: int) -> Callable[[int, int, int], memoryview]:
    """A destination for ``read_files``: a buffer for each thread, which stays in its core's cache."""
    buffers = [buffer(block) for _ in range(threads)]

    def place(worker: int, _at: int, size: int) -> memoryview:
        return buffers[worker][:size]

    return place


def read_files(
    files: Sequence[Path],
    threads: int,
    block: int,
    destination: Callable[[int, int, int], memoryview],
    *,
    direct: bool,
    request: int | None = None,
    spans: Sequence[tuple[int, int]] | None = None,
    at_most: float | None = None,
) -> tuple[float, float, int]:
    """Reads files, block by block, by many threads: seconds, CPU seconds and bytes.

    ``destination(worker, at, size)`` says where a request goes, which is a block, or so many bytes of it at once:
    ``at`` is its offset in its file, and with ``direct`` the last one's ``size`` is rounded up to 4 KiB.

    Args:
        spans: the first byte and the end of what is read of each file; all of it by default. With ``direct``, the first
            byte is a multiple of ``SECTOR``.
        at_most: seconds after which no further block is begun.

    Raises:
        OSError: a file cannot be opened or read; ``EINVAL`` where there are no direct reads.
    """
    handles: list[int] = []
    try:
        handles += (os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for file in files)
        spans = spans or [(0, os.fstat(handle).st_size) for handle in handles]
        blocks = [(n, at) for n, (start, end) in enumerate(spans) for at in range(start, end, block)]
        lock, todo, done = threading.Lock(), iter(blocks), [0] * threads

        def read(worker: int, file: int, at: int) -> None:
            end = min(at + block, spans[file][1])
            while at < end:
                # A direct read of the last sector asks for all of it and gets what there is.
                wanted = min(request or block, -(-(end - at) // SECTOR) * SECTOR if direct else end - at)
                got = os.preadv(handles[file], [destination(worker, at, wanted)], at)
                if not got:  # the file was cut off meanwhile
                    return
                at += got
                done[worker] += got

        def work(worker: int) -> None:
            while at_most is None or time.perf_counter() - began < at_most:
                with lock:
                    found = next(todo, None)
                if found is None:
                    return
                read(worker, *found)

        began, cpu = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(threads) as pool:
            running = [pool.submit(work, worker) for worker in range(threads)]
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    finally:
        for handle in handles:
            os.close(handle)
    for each in running:
        each.result()
    return seconds, cpu, sum(done)


def pcie(size: int, device: str, *, pinned: bool = True, times: int = 5) -> float:
    """The best rate of several copies of ``size`` bytes of host memory to a GPU, in GB/s. Needs torch."""
    import torch

    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).fill_(1)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    best = 0.0
    for _ in range(times):
        began = time.perf_counter()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        best = max(best, size / (time.perf_counter() - began) / GB)
    return best
