"""Tells ``penstock start-report`` when a program's imports end and its weights load. Changes nothing that it does.

Python imports this in the place of the environment's own ``sitecustomize``, which is imported next. Events are lines in
a named pipe. Without the pipe, or when anything here fails, the program runs as it would. Standard library only, and
nothing of Penstock: the program's Python need not have it.
"""

from __future__ import annotations

import builtins
import functools
import importlib.machinery
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_WEIGHTS = {
    "torch.serialization": ("load",),
    "safetensors.torch": ("load_file", "load_model"),
    "safetensors.numpy": ("load_file",),
    "penstock": ("load", "load_into", "load_model", "load_file"),
    "transformers.modeling_utils": ("PreTrainedModel.from_pretrained",),
    "diffusers.pipelines.pipeline_utils": ("DiffusionPipeline.from_pretrained",),
}
"""Functions that load weights, by module. A module that is not imported is not looked for."""
_SHORTEST = 0.001
"""Seconds of an import that is worth a line."""


def _begin(pipe: str) -> None:
    handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    local = threading.local()
    waiting = dict(_WEIGHTS)
    known = 0

    def tell(event: str) -> None:
        # Short lines are written whole; a pipe that is full or closed loses them.
        try:
            os.write(handle, f"{time.monotonic():.6f} penstock-start {event} {os.getpid()}\n".encode()[:512])
        except OSError:
            pass

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def load(*args: Any, **kwargs: Any) -> Any:
            depth = getattr(local, "loads", 0)
            local.loads = depth + 1
            if not depth:
                tell("weights-begin")
            try:
                return function(*args, **kwargs)
            finally:
                local.loads = depth
                if not depth:
                    tell("weights-end")

        return load

    def look() -> None:
        nonlocal known
        if not waiting or len(sys.modules) == known:
            return
        known = len(sys.modules)
        for name in [name for name in waiting if name in sys.modules]:
            module = sys.modules[name]
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                known = 0
                continue
            for path in waiting.pop(name):
                try:
                    _put(module, path, watched)
                except Exception:
                    pass

    real_import = builtins.__import__

    @functools.wraps(real_import)
    def import_(*args: Any, **kwargs: Any) -> Any:
        depth = getattr(local, "imports", 0)
        if depth:
            return real_import(*args, **kwargs)
        local.imports = 1
        begun = time.monotonic()
        try:
            return real_import(*args, **kwargs)
        finally:
            local.imports = 0
            look()
            if time.monotonic() - begun > _SHORTEST and not getattr(local, "loads", 0):
                tell(f"imported {args[0] if args else '?'}")

    builtins.__import__ = import_
    tell("python")


def _put(module: Any, path: str, watched: Callable[..., Any]) -> None:
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, module)
    if owners:
        found = vars(owner)[name]
        if isinstance(found, classmethod):
            setattr(owner, name, classmethod(watched(found.__func__)))
        return
    function = getattr(owner, name)
    made = watched(function)
    setattr(owner, name, made)
    parent = sys.modules.get(module.__name__.rpartition(".")[0])
    if parent is not None and getattr(parent, name, None) is function:
        setattr(parent, name, made)  # torch.load


def _own_sitecustomize() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    if _pipe := os.environ.get("_PENSTOCK_START_EVENTS"):
        _begin(_pipe)
except Exception:
    pass
_own_sitecustomize()
