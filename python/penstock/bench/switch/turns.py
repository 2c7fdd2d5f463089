"""Models that take turns on a device, by the ways of ``arms``; what eviction and adoption by a pool cost.

``of_link`` is the time that the bytes take over the link, from pinned memory in large copies, measured in the same
process right after, as a share of the time taken. On the CPU a link is a copy in memory, and ``.to`` moves nothing.
"""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path
from typing import Any

from .. import measure
from .arms import ARMS, OURS
from .models import OTHER, builders, filled, nbytes, sample


def run(task: dict[str, Any]) -> dict[str, Any]:
    """A → b → a by one arm: the last switch, until all of a can be used."""
    state, directory = task["state"], Path(task["directory"])
    if state == "adopt":
        return _adopt(task)
    kind = task["model"]
    models = {"a": built(task, kind, 0), "b": built(task, OTHER[kind], 1)}
    size = {name: sum(map(nbytes, modules.values())) for name, modules in models.items()}
    expected = sample(models["a"])
    room = max(size.values()) if state == "room for one" else 2 * sum(size.values())
    arm = ARMS[task["loader"]](models, task["device"], room, directory)
    del models
    gc.collect()
    if state == "evict":
        return _evict(task, arm, size["a"])
    took, first = [], []
    for _ in range(task["repeats"] + 1):
        for name in ("a", "b"):
            began = time.perf_counter()
            at = arm.bring(name, lambda: synchronise(task["device"]))
            took.append((name, at[-1] - began))
            first.append((name, at[0] - began))
    figures = arm.figures()
    right = expected == arm.check("a", sample)
    # The first turn brings models there for the first time.
    seconds = [one for name, one in took if name == "a"][1:]
    moved = size["a"] if state == "room for one" else 0
    return {
        "seconds": statistics.median(seconds),
        "first_seconds": statistics.median([one for name, one in first if name == "a"][1:]),
        "least": min(seconds),
        "most": max(seconds),
        "bytes": size["a"],
        "bytes_ok": right,
        "wrong": [] if right else ["sampled tensors"],
        **figures,
    } | (_of_link(task, moved, statistics.median(seconds)) if moved else {})


def built(task: dict[str, Any], kind: str, seed: int) -> dict[str, Any]:
    """The components of a model, in host memory."""
    made = builders(kind, task["scale"], task["narrow"])
    return {of: filled(build, 10 * seed + number) for number, (of, build) in enumerate(made.items())}


def synchronise(device: str) -> None:
    """Waits for what the device still has to do."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def _of_link(task: dict[str, Any], moved: int, seconds: float) -> dict[str, Any]:
    """How long the bytes take over the link, beside how long they took."""
    import torch

    cuda = task["device"] != "cpu"
    host = torch.empty(min(moved, 1 << 30), dtype=torch.uint8, pin_memory=cuda).fill_(1)
    there = torch.empty_like(host, device=task["device"])
    took = []
    for _ in range(5):
        began = time.perf_counter()
        there.copy_(host, non_blocking=True)
        synchronise(task["device"])
        took.append(time.perf_counter() - began)
    rate = host.numel() / min(took)
    return {"link_gb_per_s": rate / 1e9, "of_link": moved / rate / seconds}


def _evict(task: dict[str, Any], arm: Any, size: int) -> dict[str, Any]:
    import torch

    cuda = task["device"] != "cpu"
    taken, given, used = [], [], 0
    for _ in range(task["repeats"]):
        before = torch.cuda.mem_get_info()[0] if cuda else 0
        arm.bring("a", lambda: synchronise(task["device"]))
        used = before - torch.cuda.mem_get_info()[0] if cuda else 0
        began = time.perf_counter()
        arm.pool.sleep("a")
        taken.append(time.perf_counter() - began)
        if cuda:
            torch.empty(size, dtype=torch.uint8, device=task["device"])
            torch.cuda.synchronize()
        given.append(time.perf_counter() - began)
        if cuda:
            torch.cuda.empty_cache()
    found = {"seconds": statistics.median(taken), "given_seconds": statistics.median(given), "bytes": size}
    return found | ({"gpu_used": used, "waste": used / size - 1} if cuda else {})


def _adopt(task: dict[str, Any]) -> dict[str, Any]:
    modules = built(task, task["model"], 0)
    size = sum(map(nbytes, modules.values()))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, began = measure.status("VmRSS"), time.perf_counter()
    ARMS[OURS]({"a": modules}, task["device"], size, Path(task["directory"]))
    return {"seconds": time.perf_counter() - began, "bytes": size, "peak_rss": max(measure.status("VmHWM") - before, 0)}
