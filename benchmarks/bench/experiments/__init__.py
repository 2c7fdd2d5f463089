"""The experiments: each says what it compares, with which defaults, and how one measurement is made.

``files.py`` has all that load files of a disk or of memory; these differ in their defaults alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import loaders, processes
from ..schedule import Bench


@dataclass(frozen=True)
class Experiment:
    """One experiment of the command."""

    name: str
    summary: str
    about: str
    make: Callable[[argparse.Namespace, Path], Bench]
    add_options: Callable[[argparse.ArgumentParser], None]
    defaults: dict[str, Any] = field(default_factory=dict)
    # Each row is compared with the fastest of those whose names begin so, round by round.
    beside: tuple[str, ...] = ()


def every() -> dict[str, Experiment]:
    """All experiments by name."""
    from . import disk_cache, files, remote, sharing, switch

    found = [*files.EXPERIMENTS, remote.EXPERIMENT, disk_cache.EXPERIMENT, sharing.EXPERIMENT, switch.EXPERIMENT]
    return {experiment.name: experiment for experiment in found}


class Rows:
    """The loaders of a run: which can be measured here, their packages and their environment."""

    def __init__(self, options: argparse.Namespace, env: dict[str, str] | None = None) -> None:
        self.options = options
        self.env = env or {}
        self.versions = {name: loaders.version(name, self.site(name)) for name in options.loaders}
        reasons = {name: loaders.reason_to_skip(name, self.versions[name], options.device) for name in options.loaders}
        self.skipped = {name: reason for name, reason in reasons.items() if reason}
        self.names = [name for name in options.loaders if name not in self.skipped]

    def site(self, name: str) -> str | None:
        """The directory whose packages come first for a row."""
        found: str | None = self.options.site.get(name, self.options.site.get(loaders.labelled(name)))
        return found

    def env_of(self, name: str) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [self.site(name), os.environ.get("PYTHONPATH", "")]))
        return self.env | loaders.of(name).env | ({"PYTHONPATH": path} if path else {})


def without_directories(text: str, options: argparse.Namespace, work: Path) -> str:
    """An error message that names no directory of this machine."""
    for place in [work, options.directory, getattr(options, "tmpfs", work), *options.site.values(), sys.prefix]:
        text = text.replace(f"{Path(place).resolve()}/", "").replace(f"{place}/", "")
    return text


def run(
    task: dict[str, Any], options: argparse.Namespace, work: Path, *, seconds: float, env: dict[str, str]
) -> dict[str, Any]:
    """Runs a task in a fresh process; what its failure says names no directory."""
    try:
        return processes.run(task, work, seconds=seconds, env=env)
    except processes.HungError:
        raise
    except processes.FailedError as error:
        raise processes.FailedError(without_directories(str(error), options, work)) from error
