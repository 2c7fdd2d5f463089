"""The scheduler of all experiments: what is measured when, and what is written down.

An experiment is a ``Bench``: stages (a checkpoint, a network) and, for each round of one, groups of measurements. The
order within a group is drawn anew for each round: what drifts in a machine meets all of them alike, and none always
comes after the same other one. (They took turns once, so whoever came after the limit's three readings met a disk that
these had worn out.) The result is written after every measurement, so nothing is lost with the process. A measurement
that fails is a sample that says so, and is not tried again in this run; one that hung is not tried in any state.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from . import data, processes, result, states

Axes = dict[str, str]
# What a measurement is taken to need while none like it has been seen: seconds.
GUESS = 15.0


class OutOfTimeError(Exception):
    """The next measurement would exceed the budget."""


class Bench(Protocol):
    """What an experiment gives the scheduler. It may end anything by raising ``OutOfTimeError``."""

    def stages(self) -> list[str]:
        """What is prepared one after another."""

    def stage(self, name: str, schedule: Schedule) -> contextlib.AbstractContextManager[object]:
        """Prepares a stage, and removes afterwards what it needed."""

    def groups(self, stage: str, number: int) -> list[list[Axes]]:
        """The measurements of a round, in groups whose order is drawn."""

    def measure(self, axes: Axes, number: int, seconds: float) -> dict[str, Any]:
        """Carries one out: the answer of its task, with ``cache`` where a state was proved."""


@dataclass
class Limits:
    """How much is measured."""

    rounds: int
    timeout: float
    budget: float | None = None


class Schedule:
    """One run of an experiment, added to a result that may hold earlier ones."""

    def __init__(
        self,
        bench: Bench,
        document: result.Result,
        run: dict[str, Any],
        limits: Limits,
        output: Path | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bench, self.result, self.run, self.limits, self.output = bench, document, run, limits, output
        self._clock = clock
        self._began = clock()
        self._took: dict[tuple[str, ...], float] = {}
        self._broken: set[tuple[str, ...]] = set()
        run |= {"started": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")}
        run |= {"skipped": run.get("skipped", {}), "budget": limits.budget, "unmeasured": 0}
        result.check_same(document, [run], {})
        self._number = len(document["runs"])
        document["runs"].append(run)

    def everything(self) -> None:
        """Measures what was asked for, or what the budget allows of it."""
        todo = {stage: list(self._turns(stage)) for stage in self.bench.stages()}
        left = sum("loader" in axes for turns in todo.values() for _, axes in turns)
        try:
            for stage, turns in todo.items():
                if not turns:
                    continue
                self.in_time((stage,))
                with self.bench.stage(stage, self):
                    for number, axes in turns:
                        if not self._hopeless(axes):
                            self._measure(axes, number)
                        left -= "loader" in axes
        except OutOfTimeError:
            self.run["unmeasured"] = left
        self.save()

    def _turns(self, stage: str) -> Iterator[tuple[int, Axes]]:
        """The rounds of a stage, without what the run that is resumed has got."""
        have = {(item["round"], *item["axes"].items()) for item in self.result["samples"] if "figures" in item}
        order = random.Random(f"{self.run['started']} {stage}")
        for number in range(self.limits.rounds):
            for group in self.bench.groups(stage, number):
                for axes in order.sample(group, len(group)):
                    if (number, *axes.items()) not in have:
                        yield number, axes

    def _hopeless(self, axes: Axes) -> bool:
        """Whether this has failed before in this run, or its state has: it is not tried in every round."""
        values = tuple(axes.values())
        return _without_state(axes) in self._broken or any(
            values[:n] in self._broken for n in range(1, len(values) + 1)
        )

    def add_case(self, name: str, case: dict[str, Any]) -> None:
        """Notes a checkpoint, which must be the one that the result has under this name."""
        result.check_same(self.result, [], {name: case})
        self.result["cases"][name] = case

    def give_up(self, what: str, reason: str, *axes: str) -> None:
        """Skips all measurements whose axes begin with these values, for a reason that is written down."""
        self.run["skipped"][what] = reason
        self._broken.add(axes)

    def in_time(self, kind: tuple[str, ...], at_most: float | None = None) -> float:
        """The seconds that something may take.

        Raises:
            OutOfTimeError: it would exceed the budget.
        """
        seconds = self.limits.timeout if at_most is None else at_most
        if self.limits.budget is None:
            return seconds
        left = self.limits.budget - (self._clock() - self._began)
        if left < self._took.get(kind, GUESS):
            raise OutOfTimeError
        return min(seconds, left)

    def _measure(self, axes: Axes, number: int) -> None:
        kind = tuple(axes.values())
        seconds = self.in_time(kind)
        item: result.Sample = {"run": self._number, "round": number, "axes": axes, "cache": None}
        began = self._clock()
        try:
            answer = self.bench.measure(axes, number, seconds)
            item["cache"] = answer.pop("cache", None)
            item |= result.sample(answer)
        except (processes.FailedError, states.StateError, OSError) as error:
            if isinstance(error, processes.HungError) and seconds < self.limits.timeout:
                raise OutOfTimeError from error
            item["error"] = str(error)
            self._broken.add(_without_state(axes) if isinstance(error, processes.HungError) else kind)
        self._took[kind] = self._clock() - began
        self.result["samples"].append(item)
        self.save()
        say(f"round {number + 1} {' '.join(kind)}: {outcome(item)}")

    def save(self) -> None:
        if self.output:
            result.write(self.output, self.result)


def _without_state(axes: Axes) -> tuple[str, ...]:
    return tuple(value for axis, value in axes.items() if axis not in {"state", "network"})


def outcome(item: result.Sample) -> str:
    """A measurement in one line."""
    if "error" in item:
        return str(item["error"])
    figures, facts = item["figures"], item["facts"]
    if "seconds" not in figures:
        return f"{figures['gb_per_s']:.2f} GB/s"
    said = f"{figures['seconds']:.3f} s"
    if "bytes" in figures:
        said += f", {figures['bytes'] / figures['seconds'] / data.GB:.2f} GB/s"
    if facts.get("bytes_ok") is None:
        return said
    return f"{said}, bytes ok" if facts["bytes_ok"] else f"{said}, WRONG BYTES in {', '.join(facts['wrong'])}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
