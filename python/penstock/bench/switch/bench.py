"""``penstock bench switch``: what limits switching between models, part by part, on the CPU or a GPU.

A model is made, of real shapes with weights that nobody trained, and removed again. Each measurement is a process of
its own, forked from one that has imported torch; where files are read, the state of the cache is made and proved there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.errors import ConfigError

from .. import data, limits, machine, processes, result, states
from ..compare import Wanted, carry_out, scratch_of
from ..rows import run, without_directories
from ..schedule import Axes, Schedule, say
from . import arms, building, copying, models, reading, stages

PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "read": dict.fromkeys(("cold", "warm"), tuple(reading.ARMS)),
    "order": dict.fromkeys(("cold", "warm"), tuple(building.ORDERS)),
    "reload": {"warm": ("penstock", "penstock-pool", "safetensors")},
    "copy": {"to the GPU": tuple(copying.ARMS)},
    "turns": {
        "room for one": ("penstock", "to", "accelerate", "components-manager"),
        "room for both": ("penstock", "to"),
        "twins": ("penstock", "to", "thaw"),
    },
    "pool": {"adopt": ("penstock",), "evict": ("penstock",)},
    "request": dict.fromkeys(("cold", "warm"), ("penstock", "torch", *stages.PRETRAINED))
    | {"host": ("penstock", "torch")},
}
"""Of each part, its states, and the arms of each."""
QUICK_PARTS = ("read", "order", "reload", "turns", "request")
NOT_QUICK = {("order", "cold")}
QUICK_GB, FULL_GB = 0.125, 2.0
QUICK_SECONDS = 100.0
HELD = 8
"""Two models, their masters and their copies have at most so much of the free memory."""
LIMIT_ROUNDS = 2


@dataclass(frozen=True)
class Asked:
    """What is asked for, besides what every bench is."""

    parts: tuple[str, ...] = ()
    model: str | None = None
    repeats: int = 3


class Switch:
    """What the scheduler measures."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.rows = SimpleNamespace(versions=_versions(), skipped=options.skipped)
        self._resident: processes.Resident | None = None
        self._files: list[str] = []
        self._nbytes = 0
        self._counted = False

    def stages(self) -> list[str]:
        return [self.options.model]

    @contextlib.contextmanager
    def stage(self, name: str, schedule: Schedule) -> Iterator[None]:
        home = self.options.directory
        say(f"making {name}")
        try:
            made = self._run({"case": "write", "state": "", "loader": ""}, schedule.in_time(("write",)))
            self._files, self._nbytes = made["files"], made["bytes"]
            self._counted = states.counts_reads(Path(self._files[0]))
            say(f"{name}: {self._nbytes / data.GB:.2f} GB in {made['tensors']} tensors")
            sizes = {"bytes": self._nbytes, "tensors": made["tensors"], "files": len(self._files)}
            for part in self.options.parts:
                schedule.add_case(part, sizes | {"model": name})
            yield
        finally:
            self._end()
            shutil.rmtree(home, ignore_errors=True)

    def groups(self, stage: str, number: int) -> list[list[Axes]]:
        del stage
        found = []
        for part in self.options.parts:
            for state, rows in PARTS[part].items():
                at = {"case": part, "state": state}
                group = [at | {"loader": row} for row in rows if self._wants(part, state, row)]
                if group and part == "read" and number < LIMIT_ROUNDS:
                    limit = {"cold": "disk", "warm": "page-cache"}[state]
                    group += [at | {"limit": limit, "setting": one} for one in limits.settings(limit)]
                found.append(group)
        return found

    def _wants(self, part: str, state: str, row: str) -> bool:
        wanted = self.options.loaders
        if (part, state) in self.options.left_out or row in self.options.left_out:
            return False
        return not wanted or row in wanted or row == arms.OURS

    def measure(self, axes: Axes, number: int, seconds: float) -> dict[str, Any]:
        del number
        if "limit" in axes:
            share = states.set_cache([Path(file) for file in self._files], axes["state"])
            task = {"do": "limit", "files": self._files, "device": self.options.device} | axes
            answer = run(task, self.options, self.work, seconds=seconds, env={})
            return answer | {"cache": {"before": round(share, 4)}}
        return self._run(axes, seconds) | {"version": self.rows.versions.get(arms.PACKAGES.get(axes["loader"], ""))}

    def _run(self, axes: Axes, seconds: float) -> dict[str, Any]:
        options = self.options
        task = {"do": "switch", "files": self._files, "bytes": self._nbytes, "counted": self._counted}
        task |= {name: getattr(options, name) for name in ("model", "scale", "narrow", "device", "repeats")}
        task |= {"directory": str(options.directory)} | axes
        if axes.get("state") == "twins":
            task["model"] = models.LLAMA
        if self._resident is None:
            self._resident = processes.Resident("fork", imports=models.MODULES[options.model])
        try:
            return self._resident.run(task, seconds=seconds)
        except processes.HungError:
            self._end()
            raise
        except processes.FailedError as error:
            raise processes.FailedError(without_directories(str(error), options, self.work)) from error

    def _end(self) -> None:
        if self._resident is not None:
            self._resident.close()
            self._resident = None


def switch(wanted: Wanted, asked: Asked, command: str) -> result.Result:
    """Measures.

    Raises:
        ConfigError: a part or a model is none, or what it needs is not installed.
    """
    for part in asked.parts:
        if part not in PARTS:
            raise ConfigError(cause=f"{part!r} is no part", remedy=f"Use some of {', '.join(PARTS)}")
    model = _model(asked.model)
    parts = asked.parts or (QUICK_PARTS if wanted.quick else tuple(PARTS))
    with scratch_of(wanted) as scratch:
        gb = wanted.gb or (QUICK_GB if wanted.quick else FULL_GB)
        gb = min(gb, machine.available_memory() / HELD / data.GB, shutil.disk_usage(scratch).free / HELD / data.GB)
        scale, narrow = models.sizes_for(model, gb)
        skipped, left_out = _left_out(parts, wanted.device, model)
        left_out |= NOT_QUICK if wanted.quick and not asked.parts else set()
        directory = scratch / "model"
        directory.mkdir()
        options = argparse.Namespace(
            directory=directory, device=wanted.device, parts=parts, model=model, scale=scale, narrow=narrow,
            repeats=asked.repeats, loaders=wanted.loaders, skipped=skipped, left_out=left_out, site={},
        )  # fmt: skip
        return carry_out("switch", Switch, options, wanted, command, skipped)


def _model(asked: str | None) -> str:
    """The model that was asked for; by default the one of most components whose libraries are installed."""
    if asked is None:
        return next(kind for kind, needs in models.KINDS.items() if all(map(machine.version_of, needs)))
    if asked not in models.KINDS:
        raise ConfigError(cause=f"{asked!r} is no model", remedy=f"Use one of {', '.join(models.KINDS)}")
    for package in models.KINDS[asked]:
        if machine.version_of(package) is None:
            cause = f"the model {asked} needs the package {package}"
            raise ConfigError(cause=cause, remedy=f"pip install {package}, or use --model {models.PLAIN}")
    return asked


def _left_out(parts: tuple[str, ...], device: str, model: str) -> tuple[dict[str, str], set[Any]]:
    """What cannot be measured here: with reasons, and by arm or by part and state."""
    skipped: dict[str, str] = {}
    left_out: set[Any] = set()
    if "request" in parts and model == models.PLAIN:
        left_out.update(stages.PRETRAINED)
    if "copy" in parts and device == "cpu":
        skipped["copies to the GPU"] = "there is no GPU"
        left_out.add(("copy", "to the GPU"))
    if "turns" in parts:
        for arm, package in arms.PACKAGES.items():
            if machine.version_of(package) is None:
                skipped[arm] = f"{package} is not installed"
                left_out.add(arm)
        if model == models.PLAIN or "thaw" in left_out:
            left_out.add(("turns", "twins"))
        if device == "cpu":
            others = {"to", "accelerate", "components-manager"} - left_out
            skipped |= dict.fromkeys(sorted(others), "on the CPU it moves nothing")
            left_out |= others
    return skipped, left_out


def _versions() -> dict[str, str | None]:
    names = ("penstock-loader", "safetensors", *models.KINDS[models.FLUX], *arms.PACKAGES.values())
    found: dict[str, str | None] = {}
    for name in dict.fromkeys(names):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
