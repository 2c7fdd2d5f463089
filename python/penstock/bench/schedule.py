"""The scheduler of all experiments: what is measured when, and what is written down.

An experiment is a ``Bench``: stages (a checkpoint, a network) and, for each round of one, groups of measurements. The
order within a group is drawn anew for each round: what drifts in a machine meets all of them alike, and none always
comes after the same other one. (They took turns once, so whoever came after the limit's three readings met a disk that
these had worn out.) The result is written after every measurement, so nothing is lost with the process. A measurement
that fails is a sample that says so, and is not tried again in this run; one that hung is not tried in any state.

With a ``precision``, a group's rounds end once the median of each of its rows, and each ratio to the first row of the
same round, is known so well. The run says of each group what ended it: ``interval``, ``rounds`` or ``budget``.
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

from . import data, intervals, processes, result, states

Axes = dict[str, str]
# Axes that rows have in common.
Group = tuple[tuple[str, str], ...]
# What the first measurement is taken to need: seconds. Later ones of a new kind, what the longest so far took.
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
    # The half width of intervals at which a group's rounds end, as a share.
    precision: float | None = None


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
        self._settled: set[Group] = set()
        run |= {"started": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")}
        run |= {"skipped": run.get("skipped", {}), "budget": limits.budget, "unmeasured": 0}
        result.check_same(document, [run], {})
        self._number = len(document["runs"])
        document["runs"].append(run)

    def everything(self) -> None:
        """Measures what was asked for, or what the budget allows of it."""
        todo = {stage: list(self._turns(stage)) for stage in self.bench.stages()}
        left = sum("loader" in axes for turns in todo.values() for _, axes in turns)
        out_of_time = False
        try:
            for stage, turns in todo.items():
                if not turns:
                    continue
                self.in_time((stage,))
                with self.bench.stage(stage, self):
                    for number, axes in turns:
                        if not self._hopeless(axes) and not self._is_settled(axes):
                            self._measure(axes, number)
                        left -= "loader" in axes
        except OutOfTimeError:
            out_of_time = True
            self.run["unmeasured"] = left if self.limits.precision is None else 0
        self._say_what_ended(out_of_time=out_of_time)
        self.save()

    def _is_settled(self, axes: Axes) -> bool:
        """Whether the medians and ratios of the group are known as well as was asked for."""
        if self.limits.precision is None:
            return False
        group = _group(axes)
        if group in self._settled:
            return True
        rows = self._rows(group)
        if not rows or not _are_narrow(rows, self.limits.precision):
            return False
        self._settled.add(group)
        return True

    def _rows(self, group: Group) -> dict[str, dict[int, float]]:
        """The seconds of each loader of a group, by round."""
        rows: dict[str, dict[int, float]] = {}
        for item in self.result["samples"]:
            axes = item["axes"]
            if "loader" in axes and "seconds" in item.get("figures", {}) and _group(axes) == group:
                rows.setdefault(axes["loader"], {})[item["round"]] = item["figures"]["seconds"]
        return rows

    def _say_what_ended(self, *, out_of_time: bool) -> None:
        if self.limits.precision is None:
            return
        groups = {_group(item["axes"]): None for item in self.result["samples"] if "loader" in item["axes"]}
        ended = []
        for group in groups:
            rows = self._rows(group)
            by = "interval" if rows and _are_narrow(rows, self.limits.precision) else "rounds"
            by = "budget" if by == "rounds" and out_of_time else by
            ended.append({"axes": dict(group), "by": by, "rounds": max(map(len, rows.values()), default=0)})
        self.run |= {"precision": self.limits.precision, "ended": ended}

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
        if left < self._took.get(kind, max(self._took.values(), default=GUESS)):
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


def _group(axes: Axes) -> Group:
    """What rows that are compared have in common."""
    return tuple((axis, value) for axis, value in axes.items() if axis not in {"loader", "limit", "setting"})


def _are_narrow(rows: dict[str, dict[int, float]], precision: float) -> bool:
    first = next(iter(rows.values()))
    ratios = ([of[number] / first[number] for number in of.keys() & first.keys()] for of in rows.values())
    return all(intervals.is_narrow([*of.values()], precision) for of in rows.values()) and all(
        intervals.is_narrow(found, precision) for found in ratios
    )


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
