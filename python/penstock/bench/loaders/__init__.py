"""The loaders that are compared, one plug-in each, used as its own manual says.

A row's name says what is measured: ``runai``, ``safetensors@0.9`` for the same from other packages (``--site``),
``penstock:readers=16+block_bytes=1048576`` with settings. The part before the first ``-`` names the plug-in, a module
of this folder with a table ``LOADERS``; ``make(name)`` of a plug-in makes rows that no table can list.

Other distributions bring plug-ins as entry points of the group ``penstock.bench.loaders``: the entry's name is the
plug-in's, its value a module with ``LOADERS``. It is imported by the command too, so it imports its library in
``prepare``.

A plug-in knows neither the clock nor the state of the page cache. It imports what it needs in ``prepare``, since
importing is not loading, and returns the function that is timed: files in, tensors out that the caller may keep.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import itertools
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

Tensors = dict[str, Any]
Load = Callable[[list[str]], Tensors]
GROUP = "penstock.bench.loaders"
PLUGINS = [
    "penstock", "safetensors", "runai", "fastsafetensors", "instanttensor", "tensorizer", "transformers", "vllm",
    "sglang", "plain",
]  # fmt: skip


@dataclass(frozen=True)
class Use:
    """What a loader is prepared for. It may add to ``notes``, which are kept with the measurement."""

    device: str
    settings: dict[str, str]
    notes: dict[str, Any]

    def arrived(self) -> None:
        """Says that a tensor can be used: the first call is the time of the first tensor."""
        self.notes.setdefault("first_at", time.perf_counter())


def no_load(use: Use) -> Load:
    """Of rows that are no function of files: their task says what they do."""
    raise TypeError(f"cannot be loaded with on {use.device}")


@dataclass(frozen=True)
class Loader:
    """How a row is measured."""

    distribution: str
    prepare: Callable[[Use], Load] = no_load
    env: dict[str, str] = field(default_factory=dict)
    # The task of ``worker.py`` that measures it.
    task: str = "load"
    # Whether it can load to the CPU.
    cpu: bool = True
    # Whether the second load of the process is what is measured.
    second: bool = False
    # Whether it reads its own format, made of the same tensors beforehand.
    own_format: bool = False
    # Whether its tensors can be compared with the files, and whether the GPU's memory is sampled.
    checked: bool = True
    watched: bool = False
    # The first version that has what is called.
    since: tuple[int, ...] = ()
    # The variable of the environment that sets how many readers it has: of ``NAME:readers=8``.
    readers: str = ""
    # Called after the clock, with the notes.
    finish: Callable[[dict[str, Any]], object] | None = None


def kind(name: str) -> str:
    """What is loaded with: ``penstock`` of ``penstock@old:readers=16``."""
    return re.split("[@:]", name, maxsplit=1)[0]


def labelled(name: str) -> str:
    """The name without its settings, for which ``--site`` may name packages."""
    return name.partition(":")[0]


def settings(name: str) -> dict[str, str]:
    """The settings in the name of a row."""
    return dict(pair.partition("=")[::2] for pair in name.partition(":")[2].split("+") if pair)


def expand(name: str) -> list[str]:
    """All rows of a name with alternatives: ``penstock:readers=1|2`` is two."""
    head, colon, tail = name.partition(":")
    if not colon:
        return [name]
    pairs = [pair.partition("=") for pair in tail.split("+")]
    each = [[f"{key}={value}" for value in values.split("|")] for key, _, values in pairs]
    return [f"{head}:{'+'.join(chosen)}" for chosen in itertools.product(*each)]


def of(name: str) -> Loader:
    """The loader of a row.

    Raises:
        KeyError: no plug-in has it; the message lists those that there are.
    """
    module = plugin(kind(name))
    row: Loader | None = module.LOADERS.get(kind(name)) if module else None
    if module and row is None and hasattr(module, "make"):
        row = module.make(kind(name))
    if row is None:
        raise KeyError(f"no loader {kind(name)}: {', '.join(names())}")
    if kind(name).startswith("penstock"):
        env = {f"PENSTOCK_{key.upper()}": value for key, value in settings(name).items()}
    else:
        told = settings(name).get("readers")
        env = {row.readers: told} if row.readers and told else {}
    return replace(row, env=row.env | env)


class PluginError(RuntimeError):
    """A plug-in of another distribution that cannot be imported, or has no table."""


def plugin(name: str) -> Any:
    """The module of a loader, or None.

    Raises:
        PluginError: it is another distribution's, and broken.
    """
    found = name.partition("-")[0]
    if found in PLUGINS:
        return importlib.import_module(f".{found}", __package__)
    for entry in importlib.metadata.entry_points(group=GROUP, name=found):
        try:
            module = entry.load()
            module.LOADERS.keys()
        except Exception as error:
            raise PluginError(f"the plug-in {entry.value} fails: {type(error).__name__}: {error}") from error
        return module
    return None


def foreign() -> list[str]:
    """The plug-ins that other distributions bring, by name."""
    return sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUP)} - set(PLUGINS))


def names() -> list[str]:
    """All rows of the tables of our own plug-ins."""
    return [name for found in PLUGINS for name in plugin(found).LOADERS]


def version(name: str, site: str | None) -> str | None:
    """The version that a row would use, from its metadata; None if it is not installed. Nothing is imported."""
    path = [site, *sys.path] if site else sys.path
    distribution = of(name).distribution
    if distribution == "":
        return ""
    if distribution == "penstock" and site is None:
        distribution = "penstock-loader"
    for found in importlib.metadata.distributions(name=distribution, path=path):
        return found.version
    # A source tree on PYTHONPATH has no metadata.
    return "unpackaged" if importlib.machinery.PathFinder.find_spec(distribution.replace("-", "_"), path) else None


def reason_to_skip(name: str, version: str | None, device: str) -> str | None:
    """Why a row cannot be measured here, if it cannot."""
    row = of(name)
    if version is None:
        return f"{row.distribution} is not installed"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version))
    if numbers and numbers < row.since:
        return f"{row.distribution} {version} has no such call, {'.'.join(map(str, row.since))} has"
    if device == "cpu" and not row.cpu:
        return "loads to GPUs only"
    return None
