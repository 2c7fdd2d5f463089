"""One timed load: everything up to the clock, the clock, and everything after it.

Before the clock: imports, the CUDA context, the first load of a "second load". Timed: opening, loading, and waiting for
the device; on the CPU, touching every page, since a mapped file is read by its first use (not where nothing can be
mapped: files that come over a network). After it: memory, and the checksums of all tensors where they lie.
"""

from __future__ import annotations

import gc
import json
import resource
import threading
import time
from pathlib import Path
from typing import Any

from . import checksum, loaders, states


class Watch:
    """Samples how much memory of the GPU is in use, by anyone."""

    def __init__(self, device: str) -> None:
        self.peak = 0
        self._device = device
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        import torch

        while not self._over.wait(0.005):
            free, total = torch.cuda.mem_get_info(self._device)
            self.peak = max(self.peak, total - free)

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self.peak


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """Loads ``files`` by the row ``loader`` to ``device``.

    With ``reference``, a JSON file of checksums, every byte is checked. ``settle`` bytes of memory are settled right
    before the clock: a host takes free pages back within seconds, which is what imports take.
    """
    import torch

    name, files, device = task["loader"], task["files"], task["device"]
    row = loaders.of(name)
    cuda = device.startswith("cuda")
    _wake(device)
    notes: dict[str, Any] = {}
    load = row.prepare(loaders.Use(device, loaders.settings(name), notes))
    if row.second:
        # torch keeps the memory of the tensors that are dropped, as it does for anyone who loads another model.
        load(files)
        gc.collect()
        if task.get("state") in {"cold", "half", "warm"}:
            # The first load may have left the files in another state.
            share = states.set_cache([Path(file) for file in files], task["state"])
            notes["cache"] = {"before": round(share, 4)}
    watch, free, held = None, 0, 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        free, held = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
        watch = Watch(device) if row.watched else None
    if task.get("settle"):
        states.settle_memory(task["settle"])
    Path("/proc/self/clear_refs").write_text("5")  # the peak from now on: imports are not the load's
    rss, read, usage = status("VmRSS"), device_bytes(), resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    tensors = load(files)
    if cuda:
        torch.cuda.synchronize()
    elif task.get("touch", True):
        states.touch(tensors)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    result: dict[str, Any] = {
        "seconds": round(seconds, 4),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime, 3),
        "peak_rss": max(0, status("VmHWM") - rss),
        "bytes": notes.pop("bytes", None) or sum(tensor.nbytes for tensor in tensors.values()),
        "device_bytes": device_bytes() - read,
        "torch": torch.__version__,
    }
    if cuda:
        result |= _of_gpu(free, held, watch)
    if row.finish:
        row.finish(notes)
    elsewhere = {str(tensor.device) for tensor in tensors.values()} - {str(torch.empty(0, device=device).device)}
    if elsewhere:
        raise RuntimeError(f"tensors were left on {', '.join(sorted(elsewhere))}")
    if task.get("reference") and row.checked and "dtype" not in loaders.settings(name):
        wrong = checksum.wrong(checksum.of_tensors(tensors), json.loads(Path(task["reference"]).read_text()))
        result |= {"bytes_ok": not wrong, "wrong": wrong[:8]}
    return result | notes


def _wake(device: str) -> None:
    """Makes the CUDA context: what a first call costs is no load's."""
    import torch

    if device == "cpu":
        torch.zeros(1).clone()
        return
    torch.cuda.set_device(device)
    torch.empty(1 << 20, device=device).fill_(1)
    torch.cuda.synchronize()


def _of_gpu(free: int, held: int, watch: Watch | None) -> dict[str, int]:
    """The GPU's memory after a load, before which so much was free, and held by torch."""
    import torch

    final = torch.cuda.memory_allocated()
    found = {
        "gpu_peak_torch": torch.cuda.max_memory_allocated() - held,
        "gpu_used": free - torch.cuda.mem_get_info()[0],
        "allocated_above": torch.cuda.max_memory_allocated() - final,
        "reserved_above": torch.cuda.max_memory_reserved() - final,
    }
    if watch:
        found["in_use_above"] = watch.end() - (torch.cuda.mem_get_info()[1] - free) - final
    return found


def status(field: str) -> int:
    """Bytes of the process, as the kernel has them under that name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def device_bytes() -> int:
    """What the kernel has read from devices for this process."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"])
