"""``penstock bench compare``: every installed loader over one checkpoint, in each state of the page cache.

Without a checkpoint one of random weights is made, of a size that the machine can hold. ``quick`` is for two minutes:
fewer rows, a small checkpoint, processes that are forked from one which has imported torch.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

from . import checkpoints, data, intervals, loaders, machine, result, schedule
from .files import LIMITS, Files

STATES = ("cold", "half", "warm", "tmpfs")
QUICK = ("penstock", "safetensors", "runai", "fastsafetensors", "instanttensor", "tensorizer")
FULL = (
    "penstock", "penstock-stream", "penstock-mmap", "safetensors", "safetensors-clone", "safetensors-prefetch",
    "runai", "runai-buffered", "fastsafetensors", "fastsafetensors-buffered", "instanttensor",
    "instanttensor-buffered", "tensorizer",
)  # fmt: skip
QUICK_SECONDS, FULL_SECONDS = 100.0, 900.0
"""Budgets: of ``--quick`` so much that all of it ends within two minutes."""
QUICK_GB, FULL_GB = 0.25, 2.0
MOST_ROUNDS = 60
HELD = 4
"""A checkpoint that is made has at most this fraction of the free memory and of the free disk."""


@dataclass(frozen=True)
class Wanted:
    """What is asked for."""

    path: Path | None = None
    device: str = "cpu"
    states: tuple[str, ...] = STATES
    loaders: tuple[str, ...] = ()
    quick: bool = False
    gb: float | None = None
    budget: float | None = None
    rounds: int = MOST_ROUNDS
    precision: float = intervals.BAR
    output: Path | None = None
    resume: bool = False
    timeout: float = 120.0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return self.budget or (QUICK_SECONDS if self.quick else FULL_SECONDS)


def case_of(path: Path) -> checkpoints.Case:
    """The checkpoint of a file or of a directory.

    Raises:
        ConfigError: there is none.
    """
    if path.is_file() and path.suffix == ".safetensors":
        return checkpoints.of_files([path])
    found = checkpoints.given(path) if path.is_dir() else None
    if found is None or not found.nbytes:
        cause = "there is no .safetensors file with tensors to measure"
        raise ConfigError(cause=cause, location=str(path), remedy="Give a .safetensors file or a directory of them")
    return found


def rows_of(wanted: Wanted, *, given: bool) -> tuple[list[str], dict[str, str]]:
    """The loaders to try, and those that are left out with the reason."""
    skipped: dict[str, str] = {}
    names = list(wanted.loaders)
    if not names:
        names = [*(QUICK if wanted.quick else FULL), *loaders.foreign()]
        # On the CPU, mapping the files is what safetensors does, and what Penstock can do.
        names += ["penstock-mmap"] if wanted.quick and wanted.device == "cpu" else []
        if wanted.device != "cpu" and "penstock-mmap" in names:
            names.remove("penstock-mmap")
    if given:
        for name in [name for name in names if name.startswith("tensorizer")]:
            names.remove(name)
            skipped[name] = "it reads a format of its own; without PATH, a checkpoint is made for it too"
    return names, skipped


def size(wanted: Wanted, directory: Path) -> float:
    """The GB of a checkpoint that is made in a directory."""
    asked = wanted.gb or (QUICK_GB if wanted.quick else FULL_GB)
    free = min(machine.available_memory(), shutil.disk_usage(directory).free)
    return min(asked, free / HELD / data.GB)


def compare(wanted: Wanted, command: str) -> result.Result:
    """Measures. The result is written to ``result.json`` of the output directory after each measurement.

    Raises:
        ConfigError: the checkpoint, a loader or a state is none.
    """
    for state in wanted.states:
        if state not in STATES:
            raise ConfigError(cause=f"{state!r} is no state", remedy=f"Use some of {', '.join(STATES)}")
    case = case_of(wanted.path) if wanted.path else None
    names, skipped = rows_of(wanted, given=case is not None)
    with scratch_of(wanted) as scratch:
        return carry_out("compare", Files, options_of(wanted, case, names, scratch), wanted, command, skipped)


def carry_out(
    experiment: str,
    make: Callable[[argparse.Namespace, Path], Any],
    options: argparse.Namespace,
    wanted: Wanted,
    command: str,
    skipped: dict[str, str],
) -> result.Result:
    """Runs an experiment with what was asked for.

    Raises:
        ConfigError: a loader is none, or the result to go on with is another experiment's.
    """
    output = wanted.output / "result.json" if wanted.output else None
    document = result.empty(experiment)
    if wanted.resume and output and output.exists():
        document = result.read(output)
        if document["experiment"] != experiment:
            cause = f"the result is one of {document['experiment']}, not of {experiment}"
            raise ConfigError(cause=cause, location=str(output), remedy="Give another --output")
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="penstock-bench-") as work:
        try:
            bench = make(options, Path(work))
        except KeyError as error:
            raise ConfigError(cause=str(error.args[0]), remedy="Name some of these") from error
        about = {
            "command": command,
            "device": wanted.device,
            "machine": machine.about(options.directory, wanted.device),
            "versions": {name: machine.version_of(name) for name in ("penstock-loader", "torch", "numpy")}
            | bench.rows.versions,
            "skipped": skipped | bench.rows.skipped,
        }
        # What has gone by since the command began counts too.
        seconds = max(1.0, wanted.seconds - (time.monotonic() - wanted.began))
        limits = schedule.Limits(wanted.rounds, wanted.timeout, seconds, wanted.precision)
        schedule.Schedule(bench, document, about, limits, output).everything()
    return document


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as an exception: measured processes have sessions of their own, and would outlive it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def scratch_of(wanted: Wanted) -> Iterator[Path]:
    # Beside the report where there is one: /tmp may be memory, of which no state can be made.
    home = wanted.output or None
    with tempfile.TemporaryDirectory(prefix=".penstock-bench-", dir=home) as scratch:
        yield Path(scratch)


def options_of(wanted: Wanted, case: checkpoints.Case | None, names: list[str], scratch: Path) -> argparse.Namespace:
    directory = case.files[0].parent if case else scratch / "checkpoints"
    directory.mkdir(exist_ok=True)
    known: dict[str, Any] = {
        "directory": directory,
        "given": case,
        "device": wanted.device,
        "states": list(wanted.states),
        "cases": ["llama"],
        "gb": 0.0 if case else size(wanted, directory),
        "tensors": 0,
        "one_gb": 0.0,
        "files": 2,
        "loaders": [row for name in names for row in loaders.expand(name)],
        "site": {},
        "env": {},
        "limits": {state: LIMITS[state] for state in wanted.states},
        "limit_rounds": 2,
        "rotate": False,
        "second_cold": False,
        "process": "fork",
        "tmpfs": Path("/dev/shm"),  # noqa: S108 - where Linux has a tmpfs
    }
    return argparse.Namespace(**known)
