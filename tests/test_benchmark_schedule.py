"""The scheduler draws the order, keeps the budget and resumes; results are of the schema; helps fit a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
from benchmarks import cli, experiments

from penstock.bench import processes, result, schedule

NAMES = [f"loader{number}" for number in range(6)]


class Fake:
    """Rows that take a second each, on a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.measured: list[tuple[int, str, str]] = []
        self.fails: dict[str, Exception] = {}

    def clock(self) -> float:
        return self.now

    def stages(self) -> list[str]:
        return ["case"]

    @contextlib.contextmanager
    def stage(self, name: str, schedule: schedule.Schedule) -> Iterator[None]:
        yield

    def groups(self, stage: str, number: int) -> list[list[schedule.Axes]]:
        return [[{"case": stage, "state": state, "loader": name} for name in NAMES] for state in ("cold", "warm")]

    def measure(self, axes: schedule.Axes, number: int, seconds: float) -> dict[str, Any]:
        self.now += 1
        self.measured.append((number, axes["state"], axes["loader"]))
        if axes["loader"] in self.fails:
            raise self.fails[axes["loader"]]
        return {"seconds": 1.0, "cache": {"before": 0.0 if axes["state"] == "cold" else 1.0}, "version": "1"}


def carry_out(bench: Fake, document: result.Result | None = None, **limits: Any) -> result.Result:
    document = document or result.empty("fake")
    run = {"command": "c", "device": "cpu", "machine": {}, "versions": {}}
    asked = schedule.Limits(**({"rounds": 4, "timeout": 100.0} | limits))
    schedule.Schedule(bench, document, run, asked, None, bench.clock).everything()
    return result.validate(document)


def test_rows_are_interleaved_round_by_round_in_an_order_that_is_drawn_anew() -> None:
    bench = Fake()
    carry_out(bench)
    assert [item[:2] for item in bench.measured[:: len(NAMES)]] == [
        (number, state) for number in range(4) for state in ("cold", "warm")
    ]
    orders = [[name for *_, name in bench.measured[at : at + 6]] for at in range(0, 48, 6)]
    assert all(sorted(order) == NAMES for order in orders)
    assert len({tuple(order) for order in orders}) > 4


def test_nothing_is_begun_that_would_not_end_within_the_budget() -> None:
    bench = Fake()
    found = carry_out(bench, budget=schedule.GUESS + 3.5)
    assert bench.measured
    assert found["runs"][0]["unmeasured"] == 48 - len(bench.measured)
    assert bench.now <= schedule.GUESS + 3.5


def test_a_resumed_run_measures_what_is_missing() -> None:
    first, second = Fake(), Fake()
    found = carry_out(first, rounds=1)
    carry_out(second, found, rounds=2)
    assert {number for number, *_ in second.measured} == {1}
    assert len(found["samples"]) == 24
    assert {item["run"] for item in found["samples"]} == {0, 1}


def test_what_failed_is_a_sample_and_not_tried_in_every_round() -> None:
    bench = Fake()
    bench.fails = {"loader1": processes.FailedError("no"), "loader2": processes.HungError("no end")}
    found = carry_out(bench)
    errors = [item["axes"]["loader"] for item in found["samples"] if "error" in item]
    # What hung in one state is not tried in another.
    assert sorted(errors) == ["loader1", "loader1", "loader2"]


def a_result() -> dict[str, Any]:
    return carry_out(Fake(), rounds=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(schema="penstock-bench/0"), "schema: 'penstock-bench/0' instead of"),
        (lambda r: r.pop("experiment"), "experiment: no str"),
        (lambda r: r["runs"][0].pop("machine"), r"runs\[0\].machine: missing"),
        (lambda r: r["runs"][0].pop("versions"), r"runs\[0\].versions: missing"),
        (lambda r: r["samples"][0].update(run=7), r"samples\[0\].run: no such run"),
        (lambda r: r["samples"][0].update(axes={}), r"samples\[0\].axes: missing"),
        (lambda r: r["samples"][0].pop("cache"), r"samples\[0\].cache: missing; null says"),
        (lambda r: r["samples"][0].update(cache={"before": 7}), r"samples\[0\].cache: no share"),
        (lambda r: r["samples"][0].pop("figures"), r"samples\[0\]: either figures or error"),
        (lambda r: r["samples"][0].update(figures={"seconds": "1"}), "a value is no number"),
        (lambda r: r.update(samples=[7]), r"samples\[0\]: no JSON object"),
        (lambda r: r.update(runs=[7]), r"runs\[0\].command: missing"),
    ],
)
def test_what_is_no_result_is_refused_and_says_where(change: Any, message: str) -> None:
    document = a_result()
    change(document)
    with pytest.raises(result.SchemaError, match=message):
        result.validate(document)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(result.SchemaError, match=r"x\.json: "):
        result.read(tmp_path / "x.json")


@pytest.mark.parametrize("share", [None, 0.5])
def test_a_sample_without_proof_is_readable_and_not_cold(share: float | None) -> None:
    document = a_result()
    (item, *_) = (item for item in document["samples"] if item["axes"]["state"] == "cold")
    item["cache"] = None if share is None else {"before": share}
    result.validate(document)
    with pytest.raises(result.UnprovedError, match="is cold, but"):
        result.prove(item)


@pytest.mark.parametrize("name", ["", "list", "report", "merge", *experiments.every()])
def test_help_fits_80_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--help"] if name else ["--help"])
    lines = capsys.readouterr().out.splitlines()
    long = [line for line in lines if len(line) > 79 and "block_bytes=" not in line]
    assert len(lines) > 3
    assert not long


def test_the_list_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(experiments.every())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "nowhere.json"], "nowhere.json"),
        (["rivals", "--loaders", "absent", "--device", "cpu"], "no loader absent"),
        (["rivals", "--states", "tepid"], "tepid is none of cold, half, warm"),
        (["pairs"], "--site penstock@(before|after)=DIR is needed"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        cli.main(arguments)
