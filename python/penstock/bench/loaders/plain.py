"""Plain threads that read files with ``O_DIRECT`` to small buffers which are ready: no tensors, the disk's own rate.

``plain:threads=16+kib=512`` has requests of 512 KiB; with ``+block_kib=4096`` each thread reads blocks of 4 MiB by such
requests, where otherwise all threads read side by side.
"""

from __future__ import annotations

from pathlib import Path

from penstock.doctor import limits

from . import Load, Loader, Tensors, Use


def read(use: Use) -> Load:
    request = int(use.settings["kib"]) << 10
    block = int(use.settings.get("block_kib", 0)) << 10 or request
    threads = int(use.settings["threads"])
    place = limits.to_small_buffers(threads, request)

    def load(files: list[str]) -> Tensors:
        paths = [Path(file) for file in files]
        use.notes["bytes"] = sum(path.stat().st_size for path in paths)
        limits.read_files(paths, threads, block, place, direct=True, request=request)
        return {}

    return load


LOADERS = {"plain": Loader("", read, checked=False)}
