"""Models that take turns on a device, by the ways of ``switch_arms``; and how a pipeline starts.

Each sample is a fresh process, which builds its models (``switch_models``) before the clock. States:

    one     Flux, then Llama, then Flux, with room for one: the last switch, until all of Flux can be used
    llama   the same with two Llamas
    both    Flux and Llama, with room for both
    evict   Flux leaves the device; then until torch could allocate its bytes
    adopt   Flux becomes the pool's; with what host memory it took above the model
    warm    from files in the page cache to a pipeline on the device; and ``cold``, from the disk

``of_link`` is the time that the bytes take over the link, from pinned memory in large copies, measured in the same
process right before, as a share of the time taken. On the CPU a link is a copy in memory, and ``.to`` moves nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.switch_arms import ARMS, FROM, PARALLEL, POOL
from benchmarks.switch_models import FLUX, LLAMA, builders, filled, nbytes, pipeline
from penstock.bench import limits, measure, states
from penstock.bench.rows import run
from penstock.bench.schedule import Axes, Schedule

from . import IMPORTABLE, Experiment

_EXPECTED = "sample.json"
"""What is sampled of the tensors that were written."""
DISK = "disk-limit"
"""The disk's own rate, by the best of some plain readers: no model."""
STATES = {
    "one": (POOL, "to", "accelerate", "components-manager"), "llama": (POOL, "to", "thaw"), "both": (POOL, "to"),
    "evict": (POOL,), "adopt": (POOL,),
}  # fmt: skip
STARTS = {"warm": (POOL, FROM, PARALLEL), "cold": (POOL, FROM, PARALLEL, DISK)}


class Switching:
    """What is measured, one process each."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self._task = {"do": __name__, "scale": options.scale, "narrow": options.narrow, "device": options.device}
        self._task |= {"directory": str(options.directory), "repeats": options.repeats}

    def stages(self) -> list[str]:
        return [FLUX]

    @contextlib.contextmanager
    def stage(self, name: str, schedule: Schedule) -> Iterator[None]:
        writes = bool(set(self.options.states) & STARTS.keys())
        try:
            made = self._run({"state": "write" if writes else "size", "arm": ""}, self.options.timeout)
            schedule.add_case(name, {"bytes": made["bytes"], "tensors": made["tensors"], "files": made["files"]})
            yield
        finally:
            shutil.rmtree(self.options.directory / FLUX, ignore_errors=True)

    def groups(self, stage: str, number: int) -> list[list[Axes]]:
        del number
        arms = {**STATES, **STARTS}
        wanted = self.options.loaders
        return [
            [{"case": stage, "state": state, "loader": arm} for arm in arms[state] if not wanted or arm in wanted]
            for state in self.options.states
        ]

    def measure(self, axes: Axes, number: int, seconds: float) -> dict[str, Any]:
        del number
        return self._run({"state": axes["state"], "arm": axes["loader"]}, seconds)

    def _run(self, task: dict[str, str], seconds: float) -> dict[str, Any]:
        return run(self._task | task, self.options, self.work, seconds=seconds, env=IMPORTABLE)


def _files(directory: Path) -> list[Path]:
    return sorted((directory / FLUX).rglob("*.safetensors"))


# ---- what runs in the process of a sample


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """Measures one state of one arm."""
    import torch

    torch.set_grad_enabled(False)
    state, directory = task["state"], Path(task["directory"])
    if state in {"write", "size"}:
        return _write(task, directory, write=state == "write")
    if state in STARTS:
        os.environ["HF_ENABLE_PARALLEL_LOADING"] = "YES" if task["arm"] == PARALLEL else "NO"
    if task["device"] != "cpu":
        torch.cuda.set_device(task["device"])
        torch.empty(1 << 20, device=task["device"]).fill_(1)
    if state in STARTS:
        return _start(task, directory)
    if state == "adopt":
        return _adopt(task)
    kinds = {"a": LLAMA, "b": LLAMA} if state == "llama" else {"a": FLUX, "b": LLAMA}
    models = {name: _built(task, kind, seed) for seed, (name, kind) in enumerate(kinds.items())}
    size = {name: sum(map(nbytes, modules.values())) for name, modules in models.items()}
    expected = _sample_of(models["a"])
    room = max(size.values()) if state in {"one", "llama"} else 2 * sum(size.values())
    arm = ARMS[task["arm"]](models, task["device"], room, directory)
    del models
    gc.collect()
    if state == "evict":
        return _evict(task, arm, size["a"])
    took, first = [], []
    for _ in range(task["repeats"] + 1):
        for name in kinds:
            began = time.perf_counter()
            at = arm.bring(name, lambda: _synchronise(task["device"]))
            took.append((name, at[-1] - began))
            first.append((name, at[0] - began))
    figures = arm.figures()
    right = expected == arm.check("a", _sample_of)
    # The first turn brings models there for the first time.
    seconds = [one for name, one in took if name == "a"][1:]
    moved = size["a"] if state in {"one", "llama"} else 0
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


def _built(task: dict[str, Any], model: str, seed: int) -> dict[str, Any]:
    made = builders(model, task["scale"], task["narrow"])
    return {of: filled(build, 10 * seed + number) for number, (of, build) in enumerate(made.items())}


def _sample_of(modules: dict[str, Any]) -> list[Any]:
    """The beginning and the end of some tensors of each component."""
    import torch

    found = []
    for module in modules.values():
        tensors = list(module.parameters())
        for tensor in (tensors[0], tensors[len(tensors) // 2], tensors[-1]):
            bits = tensor.detach().reshape(-1).view(torch.uint8)
            found.append([*bits[:16].tolist(), *bits[-16:].tolist()])
    return found


def _synchronise(device: str) -> None:
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
        _synchronise(task["device"])
        took.append(time.perf_counter() - began)
    rate = host.numel() / min(took)
    return {"link_gb_per_s": rate / 1e9, "of_link": moved / rate / seconds}


def _evict(task: dict[str, Any], arm: Any, size: int) -> dict[str, Any]:
    import torch

    cuda = task["device"] != "cpu"
    taken, given, used = [], [], 0
    for _ in range(task["repeats"]):
        before = torch.cuda.mem_get_info()[0] if cuda else 0
        arm.bring("a", lambda: _synchronise(task["device"]))
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
    modules = _built(task, FLUX, 0)
    size = sum(map(nbytes, modules.values()))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, began = measure.status("VmRSS"), time.perf_counter()
    ARMS[POOL]({FLUX: modules}, task["device"], size, Path(task["directory"]))
    return {"seconds": time.perf_counter() - began, "bytes": size, "peak_rss": max(measure.status("VmHWM") - before, 0)}


def _write(task: dict[str, Any], directory: Path, *, write: bool) -> dict[str, Any]:
    import torch

    made = builders(FLUX, task["scale"], task["narrow"])
    if write:
        modules = {of: filled(build, number) for number, (of, build) in enumerate(made.items())}
        pipeline(modules).save_pretrained(directory / FLUX)
        (directory / FLUX / _EXPECTED).write_text(json.dumps(_sample_of(modules)))
    else:
        with torch.device("meta"):
            modules = {of: build().to(torch.bfloat16) for of, build in made.items()}
    tensors = sum(len(module.state_dict()) for module in modules.values())
    files = len(_files(directory)) if write else 0
    return {"bytes": sum(map(nbytes, modules.values())), "tensors": tensors, "files": files}


def _start(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    """From files to a pipeline on the device: what diffusers makes, without what holds few bytes."""
    if task["arm"] == DISK:
        files = [str(file) for file in _files(directory)]
        share = states.set_cache(_files(directory), task["state"])
        tried = [{"limit": "disk", "files": files, "setting": one} for one in limits.settings("disk")]
        best = min((limits.run_task(one) for one in tried), key=lambda found: float(found["seconds"]))
        return best | {"cache": {"before": round(share, 4)}}
    import torch
    from diffusers import FluxPipeline

    import penstock

    made = builders(FLUX, task["scale"], task["narrow"])
    for build in made.values():
        # What it imports is not the load's.
        with torch.device("meta"):
            build()
    files = _files(directory)
    share = states.set_cache(files, task["state"])
    began, read = time.perf_counter(), states.device_bytes()
    if task["arm"] == POOL:
        pool = penstock.ModelPool(task["device"], reserve=0)
        pool.register(FLUX, {of: directory / FLUX / of for of in made}, build=made)
        with pool.use(FLUX) as lease:
            lease.wait()
            _synchronise(task["device"])
            seconds = time.perf_counter() - began
            sample = _sample_of(dict(lease.items()))
    else:
        without = dict.fromkeys(("vae", "tokenizer", "tokenizer_2", "image_encoder", "feature_extractor"))
        loaded = FluxPipeline.from_pretrained(directory / FLUX, torch_dtype=torch.bfloat16, **without)
        loaded.to(task["device"])
        if task["device"] == "cpu":
            for of in made:
                states.touch(getattr(loaded, of).state_dict())
        _synchronise(task["device"])
        seconds = time.perf_counter() - began
        sample = _sample_of({of: getattr(loaded, of) for of in made})
    size = sum(path.stat().st_size for path in files)
    right = sample == json.loads((directory / FLUX / _EXPECTED).read_text())
    return {
        "seconds": seconds,
        "bytes": size,
        "bytes_ok": right,
        "wrong": [] if right else ["sampled tensors"],
        "cache": {"before": round(share, 4), "read": states.device_bytes() - read},
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--states", metavar="A,B", help=", ".join([*STATES, *STARTS]))
    add("--scale", type=float, metavar="S", help="of the numbers of layers; 1 is Flux-dev (33 GB) and Llama-3-8B (16)")
    add("--narrow", type=int, metavar="N", help="divides the widths, for a try")
    add("--repeats", type=int, metavar="N", help="turns that are measured in a process")


EXPERIMENT = Experiment(
    "switch",
    "models that take turns on a device",
    "The pool beside .to, accelerate, diffusers' manager and thaw-vllm.",
    Switching,
    add_options,
    {
        "device": "cuda:0", "rounds": 1, "states": "one,both,evict,adopt,warm,cold", "loaders": "", "timeout": 120.0,
        "scale": 0.25, "narrow": 1, "repeats": 3,
    },
    ("to",),
)  # fmt: skip
