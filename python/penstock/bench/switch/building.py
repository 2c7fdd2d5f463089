"""From files to a module on the device: in which order it is built, filled and moved; and the same once more.

Building a module initialises its weights, which are then thrown away. ``load_state_dict`` copies, unless it assigns.
Where it comes after ``.to``, every tensor crosses to the device by itself, from pages that nobody has touched yet.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import states
from .models import builders, nbytes, sample
from .proof import proved
from .turns import synchronise

Make = Callable[[Callable[[], Any], list[Path], str], Any]


def read_state(files: list[Path], device: str = "cpu") -> dict[str, Any]:
    """The tensors of files, as safetensors has them."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in files:
        found |= load_file(file, device=device)
    return found


def _initialised(build: Callable[[], Any]) -> Any:
    import torch

    return build().to(torch.bfloat16)


def load_then_to(build: Callable[[], Any], files: list[Path], device: str) -> Any:
    """Built with initialised weights, filled on the CPU, then moved."""
    module = _initialised(build)
    module.load_state_dict(read_state(files), strict=False)
    return module.to(device)


def to_then_load(build: Callable[[], Any], files: list[Path], device: str) -> Any:
    """Built with initialised weights, moved, then filled."""
    module = _initialised(build).to(device)
    module.load_state_dict(read_state(files), strict=False)
    return module


def on_meta(build: Callable[[], Any]) -> Any:
    """The module, its parameters without memory. Buffers that no file holds are as they should be."""
    import torch
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def without_memory(module: Any, name: str, parameter: Any) -> Any:
        del module, name
        there = parameter is None or parameter.is_meta
        return None if there else torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(without_memory)
    try:
        return build().to(torch.bfloat16)
    finally:
        hook.remove()


def assign_then_to(build: Callable[[], Any], files: list[Path], device: str) -> Any:
    """Built without memory, given the mapped tensors themselves, then moved."""
    module = on_meta(build)
    module.load_state_dict(read_state(files), strict=False, assign=True)
    tie(module)
    return module.to(device)


def empty_then_load(build: Callable[[], Any], files: list[Path], device: str) -> Any:
    """Built without memory, given empty memory on the device, then filled."""
    import torch

    module = on_meta(build)
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, device=device)
                part._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
    tie(module)
    module.load_state_dict(read_state(files), strict=False)
    return module.to(device)  # its buffers


def tie(module: Any) -> None:
    """Weights that are one: only one of them is in the files."""
    if hasattr(module, "tie_weights"):
        module.tie_weights()


def ours(build: Callable[[], Any], files: list[Path], device: str) -> Any:
    """``penstock.load_model``."""
    import penstock

    return penstock.load_model(build, [str(file) for file in files], device)


def import_all(made: dict[str, Callable[[], Any]]) -> None:
    """Imports what any of the ways needs, and what the models do: that is no load's."""
    import penstock.model  # noqa: F401

    for build in made.values():
        on_meta(build)


ORDERS: dict[str, Make] = {
    "penstock": ours,
    "load_state_dict, to": load_then_to,
    "to, load_state_dict": to_then_load,
    "meta, assign, to": assign_then_to,
    "meta, empty, load": empty_then_load,
}


def order(task: dict[str, Any]) -> dict[str, Any]:
    """Builds and fills all components in one of the orders."""
    make, device = ORDERS[task["loader"]], task["device"]
    made = builders(task["model"], task["scale"], task["narrow"])
    components = component_files(task)
    import_all(made)
    everything = [file for files in components.values() for file in files]
    with proved(task, everything) as proof:
        began = time.perf_counter()
        modules = {of: make(build, components[of], device) for of, build in made.items()}
        finish(modules, device)
        seconds = time.perf_counter() - began
    return answer(task, seconds, modules) | proof


def reload(task: dict[str, Any]) -> dict[str, Any]:
    """Loads, unloads and loads again: the second load."""
    device, components = task["device"], component_files(task)
    made = builders(task["model"], task["scale"], task["narrow"])
    everything = [file for files in components.values() for file in files]
    import_all(made)
    if task["loader"] == "penstock-pool":
        return _of_pool(task, made, everything)
    make = {"penstock": ours, "safetensors": assign_then_to}[task["loader"]]
    modules = {of: make(build, components[of], device) for of, build in made.items()}
    finish(modules, device)
    del modules
    gc.collect()
    with proved(task, everything) as proof:
        began = time.perf_counter()
        modules = {of: make(build, components[of], device) for of, build in made.items()}
        finish(modules, device)
        seconds = time.perf_counter() - began
    return answer(task, seconds, modules) | proof


def _of_pool(task: dict[str, Any], made: dict[str, Callable[[], Any]], files: list[Path]) -> dict[str, Any]:
    """A pool keeps the masters in host memory: its second load reads nothing."""
    import penstock

    device, directory = task["device"], Path(task["directory"])
    with penstock.ModelPool(device, reserve=0) as pool:
        pool.register("m", {of: directory / of for of in made}, build=made)
        with pool.use("m") as lease:
            lease.wait()
        pool.sleep("m")
        with proved(task, files) as proof:
            began = time.perf_counter()
            with pool.use("m") as lease:
                lease.wait()
                synchronise(device)
                seconds = time.perf_counter() - began
                return answer(task, seconds, dict(lease.items())) | proof


def component_files(task: dict[str, Any]) -> dict[str, list[Path]]:
    """Of each component, its files."""
    made = builders(task["model"], task["scale"], task["narrow"])
    return {of: sorted((Path(task["directory"]) / of).glob("*.safetensors")) for of in made}


def finish(modules: dict[str, Any], device: str) -> None:
    """All of it is there: mapped pages were touched, copies have ended."""
    if device == "cpu":
        for module in modules.values():
            states.touch(module.state_dict())
    synchronise(device)


def answer(task: dict[str, Any], seconds: float, modules: dict[str, Any]) -> dict[str, Any]:
    """What is told of a load, with what became of its bytes."""
    right = sample(modules) == task["expected"]
    size = sum(map(nbytes, modules.values()))
    return {"seconds": seconds, "bytes": size, "bytes_ok": right, "wrong": [] if right else ["sampled tensors"]}
