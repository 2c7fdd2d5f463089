"""Intervals hold the median as often as they say; rounds end when these are narrow, and the result says why."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("numpy")
from penstock.bench import intervals, result, schedule


def test_an_interval_misses_the_median_at_most_one_time_in_twenty() -> None:
    draw = random.Random(7)
    for count in (6, 9, 15):
        found = [intervals.of_median([draw.lognormvariate(0, 1) for _ in range(count)]) for _ in range(2000)]
        missed = sum(not (of.low <= 1 <= of.high) for of in found if of)
        assert missed / len(found) < 0.06, count


def test_there_is_no_interval_of_five_samples() -> None:
    assert intervals.of_median([1.0] * 5) is None
    assert intervals.of_median([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]) == (3.5, 1.0, 6.0)
    assert not intervals.is_narrow([1.0] * 5, 0.05)
    assert intervals.is_narrow([1.0] * 6, 0.05)


class Rows:
    """Two loaders of one state; ``spread`` of the second is how far its rounds lie apart."""

    def __init__(self, spread: float, cost: float = 1.0) -> None:
        self.now, self.spread, self.cost = 0.0, spread, cost

    def clock(self) -> float:
        return self.now

    def stages(self) -> list[str]:
        return ["case"]

    @contextlib.contextmanager
    def stage(self, name: str, of: schedule.Schedule) -> Iterator[None]:
        yield

    def groups(self, stage: str, number: int) -> list[list[schedule.Axes]]:
        return [[{"case": stage, "state": state, "loader": name} for name in ("a", "b")] for state in ("cold", "warm")]

    def measure(self, axes: schedule.Axes, number: int, seconds: float) -> dict[str, Any]:
        self.now += self.cost
        varies = axes["state"] == "warm" and axes["loader"] == "b"
        return {"seconds": 1.0 + self.spread * (number % 2) * varies}


def ended(bench: Rows, document: result.Result | None = None, **limits: Any) -> dict[str, tuple[str, int]]:
    document = result.empty("fake") if document is None else document
    run = {"command": "c", "device": "cpu", "machine": {}, "versions": {}}
    asked = schedule.Limits(**({"rounds": 20, "timeout": 100.0, "precision": 0.05} | limits))
    schedule.Schedule(bench, document, run, asked, None, bench.clock).everything()
    return {of["axes"]["state"]: (of["by"], of["rounds"]) for of in result.validate(document)["runs"][-1]["ended"]}


def test_rounds_end_when_every_interval_is_narrow() -> None:
    assert ended(Rows(0.0)) == {"cold": ("interval", 6), "warm": ("interval", 6)}


def test_a_state_that_varies_goes_on_after_the_others() -> None:
    assert ended(Rows(0.5)) == {"cold": ("interval", 6), "warm": ("rounds", 20)}


def test_the_budget_ends_rounds_and_the_result_says_so() -> None:
    found = ended(Rows(0.5), budget=50.0)
    assert found["cold"] == ("interval", 6)
    assert found["warm"][0] == "budget"
    assert 6 < found["warm"][1] < 20


def test_a_resumed_run_goes_on_until_the_interval_is_narrow() -> None:
    document = result.empty("fake")
    assert ended(Rows(0.0), document, rounds=4) == {"cold": ("rounds", 4), "warm": ("rounds", 4)}
    again = Rows(0.0)
    assert ended(again, document) == {"cold": ("interval", 6), "warm": ("interval", 6)}
    assert again.now == 8, "two rounds of four rows"
