"""The way of one request through its stages: cold, in a restarted worker, and in a worker that has the model.

    read     files to host memory
    switch   host memory to modules that the device can use
    compute  a pass over all weights

``cold`` has nothing in the page cache, ``warm`` is a worker that was started again, and ``host`` one that keeps the
model in host memory, so that only the copy is left. A download comes before ``read`` where weights are remote.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from .. import states
from .building import answer, component_files, finish, import_all, on_meta, read_state, tie
from .models import FLUX, builders, compute
from .proof import proved
from .turns import synchronise

PRETRAINED = ("from_pretrained", "from_pretrained, parallel")


def run(task: dict[str, Any]) -> dict[str, Any]:
    """A request of one arm in one state."""
    os.environ["HF_ENABLE_PARALLEL_LOADING"] = "YES" if task["loader"] == PRETRAINED[1] else "NO"
    made = builders(task["model"], task["scale"], task["narrow"])
    import_all(made)
    if task["loader"] == "penstock":
        return _pool(task, made)
    if task["loader"] in PRETRAINED:
        return _pretrained(task, made)
    return _by_hand(task, made)


def _pool(task: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    import penstock

    directory, device = Path(task["directory"]), task["device"]
    files = [file for found in component_files(task).values() for file in found]
    with penstock.ModelPool(device, reserve=0) as pool:
        pool.register("m", {of: directory / of for of in made}, build=made)
        if task["state"] == "host":
            with pool.use("m") as lease:
                lease.wait()
            pool.sleep("m")
            return _request(task, pool)
        with proved(task, files) as proof:
            found = _request(task, pool)
        return found | proof


def _request(task: dict[str, Any], pool: Any) -> dict[str, Any]:
    device = task["device"]
    began = time.perf_counter()
    with pool.use("m") as lease:
        modules = dict(lease.items())
        compute(modules)
        synchronise(device)
        seconds = time.perf_counter() - began
    stages = lease.stages
    with pool.use("m") as again:
        told = answer(task, seconds, dict(again.items()))
    figures = {f"stage_{name}": getattr(stages, name) for name in ("download", "read", "switch", "compute")}
    figures["stage_compute"] = max(seconds - sum(figures[f"stage_{of}"] for of in ("download", "read", "switch")), 0.0)
    return told | figures


def _pretrained(task: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """What diffusers and transformers do: ``from_pretrained(...).to(device)``, without what holds few bytes."""
    import torch

    directory, device = Path(task["directory"]), task["device"]
    files = [file for found in component_files(task).values() for file in found]
    if task["model"] == FLUX:
        from diffusers import FluxPipeline

        without = dict.fromkeys(("vae", "tokenizer", "tokenizer_2", "image_encoder", "feature_extractor"))
    else:
        from transformers import LlamaForCausalLM
    with proved(task, files) as proof:
        at = [time.perf_counter()]
        if task["model"] == FLUX:
            loaded = FluxPipeline.from_pretrained(directory, torch_dtype=torch.bfloat16, **without)
            modules = {of: getattr(loaded, of) for of in made}
        else:
            loaded = LlamaForCausalLM.from_pretrained(directory / "model", torch_dtype=torch.bfloat16)
            modules = {"model": loaded}
        if device == "cpu":
            finish(modules, device)
        at.append(time.perf_counter())
        loaded.to(device)
        synchronise(device)
        at.append(time.perf_counter())
        compute(modules)
        synchronise(device)
        at.append(time.perf_counter())
    return answer(task, at[-1] - at[0], modules) | _stages(at) | proof


def _stages(at: list[float]) -> dict[str, float]:
    return {f"stage_{name}": at[n + 1] - at[n] for n, name in enumerate(("read", "switch", "compute"))}


def _by_hand(task: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """What serving code does with torch and safetensors: reads state dicts, assigns them, moves the modules."""
    components, device = component_files(task), task["device"]
    files = [file for found in components.values() for file in found]

    def read() -> dict[str, Any]:
        found = {of: read_state(components[of]) for of in made}
        for tensors in found.values():
            # Mapped files are read by their first use.
            states.touch(tensors)
        return found

    def switch(found: dict[str, Any]) -> dict[str, Any]:
        modules = {}
        for of, build in made.items():
            modules[of] = on_meta(build)
            modules[of].load_state_dict(found[of], strict=False, assign=True)
            tie(modules[of])
            modules[of].to(device)
        finish(modules, device)
        return modules

    def request(kept: dict[str, Any] | None) -> tuple[list[float], dict[str, Any]]:
        at = [time.perf_counter()]
        found = kept or read()
        at.append(time.perf_counter())
        modules = switch(found)
        at.append(time.perf_counter())
        compute(modules)
        synchronise(device)
        at.append(time.perf_counter())
        return at, modules

    proof: dict[str, Any] = {}
    if task["state"] == "host":
        at, modules = request(read())
    else:
        with proved(task, files) as proof:
            at, modules = request(None)
    return answer(task, at[-1] - at[0], modules) | _stages(at) | proof
