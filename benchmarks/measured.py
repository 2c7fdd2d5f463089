"""What runs in the fresh process of one measurement: everything up to the clock, the clock, and everything after it.

Before the clock: imports, the CUDA context, the first load of a "second load". Timed: opening, loading, and waiting for
the device; on the CPU, touching every page, since a mapped file is read by its first use (not where nothing can be
mapped: files that come over a network). After it: memory, and the
checksums of all tensors where they lie. The result goes to a file, so that what a loader prints, or how it dies at
exit, does not matter.
"""

from __future__ import annotations

import gc
import json
import resource
import time
from pathlib import Path
from typing import Any

from . import checksum, common, limits, loaders


def measure(
    loader: str, files: list[str], device: str, reference: str | None, touch: bool = True, settle: int = 0
) -> dict[str, Any]:
    """One load of the files by one loader; with ``reference``, a JSON file of checksums, every byte is checked.

    So many bytes of memory are settled right before the clock: a host takes free pages back within seconds, which is
    what imports take.
    """
    import torch

    row = loaders.of(loader)
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device)
        torch.empty(1 << 20, device=device).fill_(1)
        torch.cuda.synchronize()
    else:
        torch.zeros(1).clone()
    notes: dict[str, Any] = {}
    load = row.prepare(device, notes)
    if row.second:
        # torch keeps the memory of the tensors that are dropped, as it does for anyone who loads another model.
        load(files)
        gc.collect()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        free, held = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
    if settle:
        common.settle_memory(settle)
    reset_peak_rss()
    rss, usage = _status("VmRSS"), resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    tensors = load(files)
    if cuda:
        torch.cuda.synchronize()
    elif touch:
        common.touch(tensors)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    result: dict[str, Any] = {
        "seconds": round(seconds, 4),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime, 3),
        "peak_rss": max(0, _status("VmHWM") - rss),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "torch": torch.__version__,
    }
    if cuda:
        result["gpu_peak_torch"] = torch.cuda.max_memory_allocated() - held
        result["gpu_used"] = free - torch.cuda.mem_get_info()[0]
    if notes:
        result |= notes
    elsewhere = {str(tensor.device) for tensor in tensors.values()} - {str(torch.empty(0, device=device).device)}
    if elsewhere:
        raise RuntimeError(f"tensors were left on {', '.join(sorted(elsewhere))}")
    if reference is not None:
        wrong = checksum.wrong(checksum.of_tensors(tensors), json.loads(Path(reference).read_text()))
        result |= {"bytes_ok": not wrong, "wrong": wrong[:8]}
    return result


def reset_peak_rss() -> None:
    """Makes ``VmHWM`` the peak from now on: imports and the CUDA context are not the load's."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """The answer to ``load``, ``limit`` or ``serialise``."""
    asked = dict(task)
    do = asked.pop("do")
    if do == "load":
        return measure(**asked)
    if do == "limit":
        files = [Path(file) for file in asked["files"]]
        return limits.measure(asked["limit"], files, asked["setting"], asked["device"])
    loaders.write_own_format(asked["files"], asked["target"])
    return {}
