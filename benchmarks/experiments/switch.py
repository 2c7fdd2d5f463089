"""Models that take turns on a device: the pool, ``.to`` both ways, accelerate's hooks; and how a model starts.

Each sample is a fresh process, which builds its models (``switch_models``) before the clock. States:

    one     Flux, then Llama, then Flux, with room for one: the last switch, until all of Flux can be used
    both    the same with room for both
    evict   Flux leaves the device; then until torch could allocate its bytes
    adopt   Flux becomes the pool's; with what host memory it took above the model
    warm    from files in the page cache to a model that can be used; and ``cold``, from the disk

``of_link`` is the time that the bytes take over the link, from pinned memory in large copies, measured in the same
process right before, as a share of the time taken. On the CPU a link is a copy in memory, and ``.to`` moves nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.switch_models import FLUX, LLAMA, builders, filled, nbytes
from penstock.bench import measure, states
from penstock.bench.rows import run
from penstock.bench.schedule import Axes, Schedule

from . import IMPORTABLE, Experiment

POOL, TO, ACCELERATE = "penstock-pool", "to", "accelerate"
STATES = {"one": (POOL, TO, ACCELERATE), "both": (POOL, TO), "evict": (POOL,), "adopt": (POOL,)}
STARTS = {"warm": (POOL, TO), "cold": (POOL, TO)}


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
            for path in _files(self.options.directory):
                path.unlink()

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
    return sorted(directory.glob(f"{FLUX}-*.safetensors"))


# ---- what runs in the process of a sample


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """Measures one state of one arm."""
    import torch

    torch.set_grad_enabled(False)
    state, directory = task["state"], Path(task["directory"])
    if state in {"write", "size"}:
        return _write(task, directory, write=state == "write")
    if task["device"] != "cpu":
        torch.cuda.set_device(task["device"])
        torch.empty(1 << 20, device=task["device"]).fill_(1)
    if state in STARTS:
        return _start(task, directory)
    if state == "adopt":
        return _adopt(task)
    models = {name: _built(task, name, seed) for seed, name in enumerate((FLUX, LLAMA))}
    size = {name: sum(map(nbytes, modules.values())) for name, modules in models.items()}
    room = max(size.values()) if state == "one" else 2 * sum(size.values())
    arm = ARMS[task["arm"]](models, task["device"], room)
    if state == "evict":
        return _evict(task, arm, size[FLUX])
    expected = _sample_of(models[FLUX])
    took, first = [], []
    for _ in range(task["repeats"] + 1):
        for name in (FLUX, LLAMA):
            began = time.perf_counter()
            at = arm.bring(name, lambda: _synchronise(task["device"]))
            took.append((name, at[-1] - began))
            first.append((name, at[0] - began))
    right = expected == arm.check(FLUX, _sample_of)
    # The first turn brings models there for the first time.
    seconds = [one for name, one in took if name == FLUX][1:]
    moved = size[FLUX] if state == "one" else 0
    return {
        "seconds": statistics.median(seconds),
        "first_seconds": statistics.median([one for name, one in first if name == FLUX][1:]),
        "least": min(seconds),
        "most": max(seconds),
        "bytes": size[FLUX],
        "bytes_ok": right,
        "wrong": [] if right else ["sampled tensors"],
        **arm.figures(),
    } | (_of_link(task, moved, statistics.median(seconds)) if moved else {})


class Pool:
    """Penstock's."""

    def __init__(self, models: dict[str, dict[str, Any]], device: str, room: int) -> None:
        from penstock import ModelPool

        total = sum(nbytes(module) for modules in models.values() for module in modules.values())
        self.pool = ModelPool(device, host_budget=2 * total, device_budget=room + (1 << 20))
        for name, modules in models.items():
            self.pool.adopt(name, type("Pipeline", (), {"components": modules}))
        self._began = 0

    def bring(self, name: str, done: Callable[[], None]) -> list[float]:
        """Returns when each component could be used."""
        self._began = self.pool.stats().copied_bytes
        at = []
        with self.pool.use(name) as lease:
            for component in lease:
                lease[component]
                done()
                at.append(time.perf_counter())
        return at

    def check(self, name: str, of: Callable[[dict[str, Any]], Any]) -> Any:
        with self.pool.use(name) as lease:
            return of(dict(lease.items()))

    def figures(self) -> dict[str, Any]:
        return {"copied_last": self.pool.stats().copied_bytes - self._began}


class To:
    """``module.to``, both ways."""

    def __init__(self, models: dict[str, dict[str, Any]], device: str, room: int) -> None:
        self.models, self.device = models, device
        self._fits = room >= sum(nbytes(module) for modules in models.values() for module in modules.values())

    def bring(self, name: str, done: Callable[[], None]) -> list[float]:
        for other, modules in self.models.items():
            if other != name and not self._fits:
                for module in modules.values():
                    module.to("cpu")
        at = []
        for module in self.models[name].values():
            module.to(self.device)
            done()
            at.append(time.perf_counter())
        return at

    def check(self, name: str, of: Callable[[dict[str, Any]], Any]) -> Any:
        return of(self.models[name])

    def figures(self) -> dict[str, Any]:
        return {}


class Accelerate(To):
    """``cpu_offload_with_hook``, which diffusers' ``enable_model_cpu_offload`` is made of."""

    def __init__(self, models: dict[str, dict[str, Any]], device: str, room: int) -> None:
        from accelerate import cpu_offload_with_hook

        super().__init__(models, device, room)
        self.hooks = {
            name: [cpu_offload_with_hook(module, device)[1] for module in modules.values()]
            for name, modules in models.items()
        }

    def bring(self, name: str, done: Callable[[], None]) -> list[float]:
        for other, hooks in self.hooks.items():
            if other != name and not self._fits:
                for hook in hooks:
                    hook.offload()
        at = []
        for module in self.models[name].values():
            module._hf_hook.pre_forward(module)
            done()
            at.append(time.perf_counter())
        return at


ARMS: dict[str, Any] = {POOL: Pool, TO: To, ACCELERATE: Accelerate}


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


def _evict(task: dict[str, Any], arm: Pool, size: int) -> dict[str, Any]:
    import torch

    cuda = task["device"] != "cpu"
    taken, given, used = [], [], 0
    for _ in range(task["repeats"]):
        before = torch.cuda.mem_get_info()[0] if cuda else 0
        arm.bring(FLUX, lambda: _synchronise(task["device"]))
        used = before - torch.cuda.mem_get_info()[0] if cuda else 0
        began = time.perf_counter()
        arm.pool.sleep(FLUX)
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
    Pool({FLUX: modules}, task["device"], size)
    return {"seconds": time.perf_counter() - began, "bytes": size, "peak_rss": max(measure.status("VmHWM") - before, 0)}


def _write(task: dict[str, Any], directory: Path, *, write: bool) -> dict[str, Any]:
    import torch

    total, tensors = 0, 0
    made = builders(FLUX, task["scale"], task["narrow"])
    for number, (of, build) in enumerate(made.items()):
        if write:
            from safetensors.torch import save_model

            module = filled(build, number)
            save_model(module, str(directory / f"{FLUX}-{of}.safetensors"))
        else:
            with torch.device("meta"):
                module = build().to(torch.bfloat16)
        total += nbytes(module)
        tensors += len(module.state_dict())
        del module
    return {"bytes": total, "tensors": tensors, "files": len(made)}


def _start(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    """From files to a model that can be used, built without initialising it by either arm."""
    import torch

    made = builders(FLUX, task["scale"], task["narrow"])
    if task["arm"] == POOL:
        import penstock  # noqa: F401 - not the load's
        from penstock import ModelPool
    else:
        from safetensors.torch import load_file
    from penstock.model import no_init

    for build in made.values():
        # What it imports is not the load's.
        with torch.device("meta"):
            build()
    files = {of: directory / f"{FLUX}-{of}.safetensors" for of in made}
    share = states.set_cache(list(files.values()), task["state"])
    began = time.perf_counter()
    if task["arm"] == POOL:
        pool = ModelPool(task["device"], reserve=0)
        pool.register(FLUX, files, build=made)
        with pool.use(FLUX) as lease:
            lease.wait()
            _synchronise(task["device"])
            seconds = time.perf_counter() - began
    else:
        for of, build in made.items():
            with no_init():
                module = build()
            module.load_state_dict(load_file(files[of]), assign=True, strict=False)
            module.to(task["device"])
            if task["device"] == "cpu":
                states.touch(module.state_dict())
        _synchronise(task["device"])
        seconds = time.perf_counter() - began
    size = sum(path.stat().st_size for path in files.values())
    return {"seconds": seconds, "bytes": size, "cache": {"before": round(share, 4)}}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--states", metavar="A,B", help=", ".join([*STATES, *STARTS]))
    add("--scale", type=float, metavar="S", help="of the numbers of layers; 1 is Flux-dev (33 GB) and Llama-3-8B (16)")
    add("--narrow", type=int, metavar="N", help="divides the widths, for a try")
    add("--repeats", type=int, metavar="N", help="turns that are measured in a process")


EXPERIMENT = Experiment(
    "switch",
    "models that take turns on a device",
    "The pool beside .to both ways, and accelerate's hooks. Needs transformers.",
    Switching,
    add_options,
    {
        "device": "cuda:0", "rounds": 1, "states": "one,both,evict,adopt,warm,cold", "loaders": "", "timeout": 120.0,
        "scale": 0.25, "narrow": 1, "repeats": 3,
    },
    ("to",),
)  # fmt: skip
