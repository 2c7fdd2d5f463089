"""Tables of a result, as Markdown: medians, rates, shares of the machine's limit, and rows beside others by rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from . import data
from .result import Result, Sample

RESAMPLES = 10_000
# What may be told of each row: heading, figure, its unit, and which of its values counts.
COLUMNS: list[tuple[str, str, float, str, Callable[[list[float]], float]]] = [
    ("weights s", "weights_seconds", 1.0, "{:.2f}", statistics.median),
    ("model s", "model_seconds", 1.0, "{:.2f}", statistics.median),
    ("ready s", "ready_seconds", 1.0, "{:.2f}", statistics.median),
    ("CPU s", "cpu_seconds", 1.0, "{:.2f}", statistics.median),
    ("read GB", "read_bytes", data.GB, "{:.2f}", statistics.median),
    ("network GB", "network_bytes", data.GB, "{:.2f}", statistics.median),
    ("flush s", "flush_seconds", 1.0, "{:.2f}", statistics.median),
    ("first s", "first_seconds", 1.0, "{:.3f}", statistics.median),
    ("given back s", "given_seconds", 1.0, "{:.4f}", statistics.median),
    ("of link", "of_link", 1.0, "{:.2f}", statistics.median),
    ("copied GB", "copied_last", data.GB, "{:.2f}", statistics.median),
    ("waste", "waste", 1.0, "{:.3f}", statistics.median),
    ("peak RSS MB", "peak_rss", 1e6, "{:.0f}", max),
    ("GPU peak, torch MB", "gpu_peak_torch", 1e6, "{:.0f}", max),
    ("GPU used MB", "gpu_used", 1e6, "{:.0f}", max),
    ("above the model MB", "allocated_above", 1e6, "{:.0f}", max),
]
Group = dict[str, list[Sample]]


def groups(result: Result) -> dict[tuple[str, ...], Group]:
    """The samples of loaders, by the axes before ``loader`` and then by loader."""
    found: dict[tuple[str, ...], Group] = {}
    for item in result["samples"]:
        if "loader" in item["axes"] and ("error" in item or "seconds" in item["figures"]):
            at = tuple(value for axis, value in item["axes"].items() if axis != "loader")
            found.setdefault(at, {}).setdefault(item["axes"]["loader"], []).append(item)
    return found


def good(items: Iterable[Sample]) -> list[Sample]:
    return [item for item in items if "figures" in item]


def median(items: Sequence[Sample], figure: str = "seconds") -> float:
    return float(statistics.median(item["figures"][figure] for item in items))


def limit(result: Result, case: str, state: str) -> tuple[float, str] | None:
    """The least seconds that the machine allows for a case in a state, and what they are spent on."""

    def best(*names: str, of_state: str | None = None) -> float | None:
        """The median of the best setting: what one setting reached once may be the machine's noise."""
        rates: dict[str, list[float]] = {}
        for item in good(result["samples"]):
            axes = item["axes"]
            if axes.get("limit") in names and of_state in {None, axes.get("state")}:
                rates.setdefault(axes["setting"], []).append(item["figures"]["gb_per_s"])
        return max(map(statistics.median, rates.values()), default=None)

    nbytes = result["cases"].get(case, {}).get("bytes", 0)
    if state in {"cold", "half"}:
        stages = [(best("disk", "disk-whole"), "disk", nbytes if state == "cold" else nbytes / 2)]
    else:
        name = {"warm": "page cache"}.get(state, state)
        stages = [(best("page-cache", "ready", of_state=state), name, nbytes)]
    if result["runs"] and result["runs"][0].get("device") != "cpu":
        stages.append((best("pcie"), "PCIe", nbytes))
    if any(rate is None for rate, _, _ in stages):
        return None
    return max((size / rate / data.GB, name) for rate, name, size in stages if rate)


def shares_of_rounds(rounds: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """Of each name, its rates over the mean of all in the same round, which a disk that wanders does not move."""
    shares: dict[str, list[float]] = {}
    for rates in rounds:
        mean = statistics.mean(rates.values())
        for name, rate in rates.items():
            shares.setdefault(name, []).append(rate / mean)
    return shares


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of these values; zero for a single one."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def interval(before: list[float], after: list[float]) -> tuple[float, float, float]:
    """The ratio of the medians (after / before) and its 95 % interval, by bootstrap over pairs."""
    draws = np.random.default_rng(0).integers(0, len(before), (RESAMPLES, len(before)))
    ratios = np.median(np.array(after)[draws], axis=1) / np.median(np.array(before)[draws], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(np.median(after) / np.median(before)), float(low), float(high)


def beside(ours: list[Sample], theirs: list[Sample], figure: str = "seconds") -> list[float]:
    """One row's figure in terms of another's, round by round, for as many bytes: plain clients may have read less."""
    of_theirs = {item["round"]: item["figures"] for item in good(theirs)}
    found = []
    for item in good(ours):
        figures, others = item["figures"], of_theirs.get(item["round"], {})
        if figures.get(figure) and others.get(figure):
            size = others.get("bytes", 1) / figures.get("bytes", 1) if "bytes" in others else 1.0
            found.append(size * figures[figure] / others[figure])
    return found


def baseline(group: Group, name: str, prefix: str) -> str | None:
    """The fastest of the rows that a row is compared with: those that begin so, and load to where it does.

    ``object_store`` has rows that fill memory which exists; ``penstock-into`` is compared with those, others are not.
    """
    where = name.partition(":")[2]
    if prefix == "object_store":
        prefix += "-ready@" if name.startswith("penstock-into") else "@"
        where = ""
    near = [
        other
        for other in group
        if other.startswith(prefix)
        and good(group[other])
        and (prefix.endswith((":", "@")) or other.partition(":")[2] == where or "=" in where + other)
    ]
    return min(near, key=lambda other: median(good(group[other])) / _size(group[other]), default=None)


def _size(items: list[Sample]) -> float:
    return float(good(items)[0]["figures"].get("bytes", 1))


def checked(group: Group, name: str) -> str:
    """What became of the bytes, or, of an engine, whether it said what the format ``auto`` says."""
    facts = [item["facts"] for item in good(group[name])]
    checks = [of["bytes_ok"] for of in facts if of.get("bytes_ok") is not None]
    outcomes = [of["outcome"] for of in facts if "outcome" in of]
    if outcomes:
        auto = name.partition("-")[0] + "-auto"
        expected = next((item["facts"]["outcome"] for item in good(group.get(auto, []))), None)
        return "unknown" if expected is None else "equal" if all(of == expected for of in outcomes) else "OTHERS"
    return "not checked" if not checks else "ok" if all(checks) else "WRONG"


def tables(result: Result, prefixes: Sequence[str] = ()) -> str:
    """The rows as Markdown: one table for each case and state, or network."""
    lines: list[str] = []
    for at, group in groups(result).items():
        lines += _table(result, at, group, prefixes)
    for run in result["runs"]:
        lines += [f"- {what}: skipped, {reason}" for what, reason in run.get("skipped", {}).items()]
        if run.get("unmeasured"):
            lines.append(f"- {run['unmeasured']} measurements were left out: the budget of {run['budget']:g} s ended")
    return "\n".join(lines)


def _table(result: Result, at: tuple[str, ...], group: Group, prefixes: Sequence[str]) -> list[str]:
    every = good([item for items in group.values() for item in items])
    shown = [column for column in COLUMNS if any(column[1] in item["figures"] for item in every)]
    least = limit(result, *at) if len(at) == 2 else None
    case = result["cases"].get(at[0] if at else "", {})
    size = f": {case['bytes'] / data.GB:.2f} GB in {case['tensors']} tensors" if case.get("tensors") else ""
    bound = f", limit {least[0]:.3f} s ({least[1]})" if least else ""
    heads = ["loader", "seconds", "least-most", "GB/s", "of the round", *(["of limit"] if least else [])]
    heads += [*(column[0] for column in shown), "bytes", *(f"beside {prefix}" for prefix in prefixes)]
    lines = [f"### {', '.join(at)}{size}{bound}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    rounds: dict[int, dict[str, float]] = {}
    for item in every:
        rounds.setdefault(item["round"], {})[item["axes"]["loader"]] = (
            item["figures"].get("bytes", 1) / item["figures"]["seconds"]
        )
    shares = shares_of_rounds(rounds.values())
    for name in sorted(group, key=lambda name: median(good(group[name])) if good(group[name]) else math.inf):
        items = good(group[name])
        errors = [item["error"] for item in group[name] if "error" in item]
        version = items[-1]["facts"].get("version") if items else ""
        cells = [f"{name} {version or ''}".strip()]
        if not items:
            said = f"failed: {errors[-1]}".replace("|", "/")
            lines.append(f"| {' | '.join([*cells, said, *[''] * (len(heads) - 2)])} |")
            continue
        seconds = [item["figures"]["seconds"] for item in items]
        of = shares[name]
        cells += [f"{statistics.median(seconds):.3f}", f"{min(seconds):.3f}-{max(seconds):.3f}"]
        sized = "bytes" in items[0]["figures"]
        cells.append(f"{_size(items) / statistics.median(seconds) / data.GB:.2f}" if sized else "")
        cells.append(f"{statistics.mean(of):.2f} ± {standard_error(of):.2f}")
        cells += [f"{least[0] / statistics.median(seconds):.2f}"] if least else []
        for _, figure, unit, form, pick in shown:
            values = [item["figures"][figure] for item in items if figure in item["figures"]]
            cells.append(form.format(pick(values) / unit) if values else "")
        cells.append(checked(group, name) + (f", {len(errors)} failed" if errors else ""))
        lines.append(f"| {' | '.join(cells + [_beside(group, name, prefix) for prefix in prefixes])} |")
    return [*lines, ""]


def _beside(group: Group, name: str, prefix: str) -> str:
    """Time and CPU time in terms of the other row's, each the median of rounds with its extent, or its interval."""
    other = baseline(group, name, prefix)
    if other is None or other == name:
        return ""
    told = []
    for figure, what in (("seconds", "time"), ("cpu_seconds", "CPU")):
        ratios = beside(group[name], group[other], figure)
        if ratios and prefix.endswith("@before"):
            ratio, low, high = _paired(group, name, other, figure)
            told.append(f"{what} {ratio:.3f} [{low:.3f}, {high:.3f}]")
        elif ratios:
            told.append(f"{what} {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
    return f"{', '.join(told)} of {other}" if told else ""


def _paired(group: Group, name: str, other: str, figure: str) -> tuple[float, float, float]:
    before = {item["round"]: item["figures"][figure] for item in good(group[other])}
    after = {item["round"]: item["figures"][figure] for item in good(group[name])}
    both = sorted(before.keys() & after.keys())
    return interval([before[number] for number in both], [after[number] for number in both])
