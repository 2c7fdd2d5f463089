"""``penstock bench engine``: seconds until the first answer of each installed engine, by loader, in steps.

A Llama of random weights is made with what engines need beside it, unless one is given. Each measurement is a start of
its own. The loaders of an engine must say the same: the first answer that came is what others are held against.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.errors import ConfigError

from .. import checkpoints, data, machine, result, states
from ..compare import Wanted, carry_out, case_of, scratch_of
from ..rows import run
from ..schedule import Axes, Schedule, say
from .engines import COMPILED, EAGER, ENGINES, MODES

STATES = ("cold", "warm", "cold-machine")
QUICK_GB, FULL_GB = 0.25, 2.0
HELD = 5
"""A model that is made has at most this fraction of the free memory and of the free disk."""


@dataclass(frozen=True)
class Asked:
    """What is asked for, besides what every bench is."""

    engines: tuple[str, ...] = ()
    modes: tuple[str, ...] = (EAGER,)
    tp: int = 1


class EngineStarts:
    """What the scheduler measures."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.rows = SimpleNamespace(versions=options.versions, skipped=options.skipped)
        self._case: checkpoints.Case
        self._counted = False
        self._said: dict[str, Any] = {}

    def stages(self) -> list[str]:
        return ["model"]

    @contextlib.contextmanager
    def stage(self, name: str, schedule: Schedule) -> Iterator[None]:
        given = self.options.given
        if given is None:
            say(f"making a {name}")
            self._case = checkpoints.make(name, self.options.directory, gb=self.options.gb, files=2)
            write_tokenizer(self._case.files[0].parent)
        else:
            self._case = given
        self._counted = states.counts_reads(self._case.files[0])
        say(f"{name}: {self._case.nbytes / data.GB:.2f} GB in {self._case.tensors} tensors")
        for case in dict.fromkeys(axes["case"] for group in self.groups(name, 0) for axes in group):
            schedule.add_case(case, self._case.as_dict())
        yield

    def groups(self, stage: str, number: int) -> list[list[Axes]]:
        del stage, number
        options = self.options
        return [
            [{"case": _case(engine, mode), "state": state, "loader": row} for row in rows]
            for engine, rows in options.rows.items()
            for mode in options.modes
            for state in options.states
        ]

    def measure(self, axes: Axes, number: int, seconds: float) -> dict[str, Any]:
        engine, _, mode = axes["case"].partition(", ")
        caches = self.work / "caches" / axes["case"].replace(", ", "-") / axes["loader"]
        if axes["state"] != "warm":
            # A cold start has compiled nothing before.
            caches = self.work / "caches" / f"cold-{number}-{axes['case']}-{axes['loader']}".replace(", ", "-")
            shutil.rmtree(caches, ignore_errors=True)
        task: dict[str, Any] = {"do": "engine", "engine": engine, "mode": mode or EAGER, "caches": str(caches)} | axes
        task |= {"model": str(self._case.files[0].parent), "files": [str(file) for file in self._case.files]}
        task |= {"bytes": self._case.nbytes, "counted": self._counted}
        task |= {"device": self.options.device, "tp": self.options.tp}
        answer = run(task, self.options, self.work, seconds=seconds, env={})
        outcome = answer.pop("outcome_said")
        right = outcome == self._said.setdefault(axes["case"], outcome)
        answer |= {"bytes_ok": right, "wrong": [] if right else ["another answer than the first loader's"]}
        ours = axes["loader"] == "penstock"
        return answer | {"version": self.options.versions["penstock-loader" if ours else engine]}


def _case(engine: str, mode: str) -> str:
    return engine if mode == EAGER else f"{engine}, {mode}"


def engine(path: Path | None, wanted: Wanted, asked: Asked, command: str) -> result.Result:
    """Measures.

    Raises:
        ConfigError: an engine, a mode, a state or a model is none.
    """
    for given, known, what in (
        (asked.engines, tuple(ENGINES), "engine"), (asked.modes, MODES, "mode"), (wanted.states, STATES, "state")
    ):  # fmt: skip
        for word in given:
            if word not in known:
                raise ConfigError(cause=f"{word!r} is no {what}", remedy=f"Use some of {', '.join(known)}")
    case = None if path is None else case_of(path)
    if case is not None and not (case.files[0].parent / "config.json").exists():
        raise ConfigError(
            cause="an engine needs config.json beside the weights",
            location=str(path),
            remedy="Give a model's directory",
        )
    rows, skipped, versions = rows_of(wanted, asked)
    if not rows:
        raise ConfigError(cause=f"no engine is installed: {', '.join(ENGINES)}", remedy="pip install transformers")
    with scratch_of(wanted) as scratch:
        gb = wanted.gb or (QUICK_GB if wanted.quick else FULL_GB)
        free = min(machine.available_memory(), shutil.disk_usage(scratch).free)
        options = argparse.Namespace(
            directory=scratch, device=wanted.device, given=case, gb=min(gb, free / HELD / data.GB), rows=rows,
            modes=asked.modes, states=wanted.states, tp=asked.tp, skipped=skipped, versions=versions, site={},
        )  # fmt: skip
        return carry_out("engine", EngineStarts, options, wanted, command, skipped)


def rows_of(wanted: Wanted, asked: Asked) -> tuple[dict[str, list[str]], dict[str, str], dict[str, str | None]]:
    """The loaders of each engine that is here; what is left out, with the reason; versions."""
    rows: dict[str, list[str]] = {}
    skipped: dict[str, str] = {}
    versions = {"penstock-loader": machine.version_of("penstock-loader")}
    for name, known in ENGINES.items():
        if asked.engines and name not in asked.engines:
            continue
        versions[name] = known.version
        if known.version is None:
            skipped[name] = "it is not installed"
            continue
        rows[name] = []
        for loader, needs in known.loaders.items():
            if needs is not None and machine.version_of(needs) is None:
                skipped[f"{name}, {loader}"] = f"{needs} is not installed"
            elif not wanted.loaders or loader in wanted.loaders:
                rows[name].append(loader)
    if COMPILED in asked.modes and wanted.device == "cpu" and shutil.which("g++") is None:
        raise ConfigError(cause="compiling for the CPU needs g++", remedy="Install it, or leave --modes out")
    return rows, skipped, versions


def write_tokenizer(directory: Path) -> None:
    """What servers ask of a model beside its weights: one word for each of its first tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    known = {"[UNK]": 0} | {f"w{number}": number for number in range(1, 512)}
    words = Tokenizer(WordLevel(known, unk_token="[UNK]"))  # noqa: S106
    words.pre_tokenizer = Whitespace()
    special = {"unk_token": "[UNK]", "eos_token": "w1", "pad_token": "w2"}
    made = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    made.save_pretrained(directory)
