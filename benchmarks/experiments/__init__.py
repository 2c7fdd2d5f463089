"""The experiments: each says what it compares, with which defaults, and how one measurement is made.

``files`` has those of ``penstock.bench.files``, which load files of a disk or of memory: these differ in their defaults
alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.bench.schedule import Bench

# What lets a fresh process import this package, for tasks that are a module of it.
IMPORTABLE = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
}


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
    from . import disk_cache, files, remote, sharing

    found = [*files.EXPERIMENTS, remote.EXPERIMENT, disk_cache.EXPERIMENT, sharing.EXPERIMENT]
    return {experiment.name: experiment for experiment in found}
