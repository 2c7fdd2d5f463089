"""Results of the comparison: rows from measurements, results merged from several runs, the table.

A result is a dict as it is written to JSON: ``runs`` (machine, versions, command), ``cases``, ``limits``,
``measurements`` (every single one, failures included) and ``rows``, which are computed from the others here.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from . import common

FORMAT = 1
Result = dict[str, Any]


def empty() -> Result:
    return {"format": FORMAT, "runs": [], "cases": {}, "limits": [], "measurements": [], "rows": []}


def read(path: Path) -> Result:
    result: Result = json.loads(path.read_text())
    if result.get("format") != FORMAT:
        raise ValueError(f"{path.name} is no result of this program, or of another version of it")
    return result


def write(path: Path, result: Result) -> None:
    result["rows"] = rows(result)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.rename(path)


def merge(results: list[Result]) -> Result:
    """One result of several, which must be of the same machine, device and checkpoints."""
    merged = empty()
    for result in results:
        check_same(merged, result["runs"], result["cases"])
        first = len(merged["runs"])
        merged["runs"] += result["runs"]
        merged["cases"] |= result["cases"]
        for kind in ("limits", "measurements"):
            merged[kind] += [item | {"run": item["run"] + first} for item in result[kind]]
    merged["rows"] = rows(merged)
    return merged


def check_same(result: Result, runs: list[dict[str, Any]], cases: dict[str, Any]) -> None:
    """Raises ValueError where runs or cases are not comparable with those of the result."""
    for run in runs:
        for other in result["runs"][:1]:
            here, there = _hardware(run), _hardware(other)
            if here != there:
                raise ValueError(f"results of different machines are not compared: {here} and {there}")
    for name, case in cases.items():
        if result["cases"].get(name, case) != case:
            raise ValueError(f"the case {name} is not the same: {case} and {result['cases'][name]}")


def _hardware(run: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for figures to be compared. A kernel or a driver may differ: each run says its own."""
    machine = run["machine"]
    return {
        "device": run["device"],
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "gpu": (machine["gpu"] or "").split(",")[0],
        "filesystem": machine["filesystem"],
    }


def limit(result: Result, case: str, state: str) -> tuple[float, str] | None:
    """The least seconds that the machine allows for a case in a state, and what they are spent on."""
    nbytes = result["cases"][case]["bytes"]

    def best(name: str, of_state: str | None = None) -> float | None:
        """The median of the best setting: what one setting reached once may be the machine's noise."""
        rates: dict[str, list[float]] = {}
        for item in result["limits"]:
            if item["limit"] == name and of_state in {None, item["state"]}:
                rates.setdefault(item["setting"], []).append(item["gb_per_s"])
        return max(map(statistics.median, rates.values()), default=None)

    stages: list[tuple[float | None, str, float]] = []
    if state in {"cold", "half"}:
        stages.append((best("disk"), "disk", nbytes if state == "cold" else nbytes / 2))
    else:
        stages.append((best("page-cache", state), "page cache" if state == "warm" else "tmpfs", nbytes))
    if result["runs"][0]["device"] != "cpu":
        stages.append((best("pcie"), "PCIe", nbytes))
    if any(rate is None for rate, _, _ in stages):
        return None
    return max((size / rate / common.GB, name) for rate, name, size in stages if rate)


def rows(result: Result) -> list[dict[str, Any]]:
    """One row for each case, state and loader: medians of its measurements, worst cases of its memory."""
    taken: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for item in result["measurements"]:
        taken.setdefault((item["case"], item["state"], item["loader"]), []).append(item)
    made = []
    for (case, state, loader), items in taken.items():
        good = [item for item in items if "seconds" in item]
        row: dict[str, Any] = {"case": case, "state": state, "loader": loader, "version": items[-1]["version"]}
        if good:
            seconds = statistics.median(item["seconds"] for item in good)
            checks = [item["bytes_ok"] for item in good if "bytes_ok" in item]
            least = limit(result, case, state)
            row |= {
                "seconds": round(seconds, 4),
                "all_seconds": [item["seconds"] for item in good],
                "gb_per_s": round(good[0]["bytes"] / seconds / common.GB, 3),
                "of_limit": round(least[0] / seconds, 3) if least else None,
                "limit": least[1] if least else None,
                "limit_seconds": round(least[0], 4) if least else None,
                "cpu_seconds": round(statistics.median(item["cpu_seconds"] for item in good), 3),
                "peak_rss": max(item["peak_rss"] for item in good),
                "bytes_ok": all(checks) if checks else None,
            }
            for memory in ("gpu_peak_torch", "gpu_used"):
                if memory in good[0]:
                    row[memory] = max(item[memory] for item in good)
        errors = [item["error"] for item in items if "error" in item]
        if errors:
            row |= {"error": errors[-1], "failed": len(errors)}
        made.append(row)
    return made


def table(result: Result) -> str:
    """The rows as Markdown, one table for each case and state."""
    lines = []
    gpu = result["runs"] and result["runs"][0]["device"] != "cpu"
    heads = ["loader", "seconds", "GB/s", "of limit", "CPU s", "peak RSS +"]
    heads += ["GPU memory: torch / all"] if gpu else []
    heads += ["bytes"]
    for case, state in dict.fromkeys((row["case"], row["state"]) for row in result["rows"]):
        facts = result["cases"][case]
        least = limit(result, case, state)
        bound = f", limit {least[0]:.3f} s ({least[1]})" if least else ""
        size = f"{facts['bytes'] / common.GB:.2f} GB, {facts['tensors']} tensors, {facts['files']} files"
        lines += [f"### {case}, {state}: {size}{bound}", ""]
        lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        of_state = [row for row in result["rows"] if (row["case"], row["state"]) == (case, state)]
        for row in sorted(of_state, key=lambda row: row.get("seconds", float("inf"))):
            lines.append(f"| {' | '.join(_cells(row, len(heads)))} |")
        lines.append("")
    skipped = {what: reason for run in result["runs"] for what, reason in run["skipped"].items()}
    lines += [f"- {what}: skipped, {reason}" for what, reason in skipped.items()]
    for run in result["runs"]:
        if run["unmeasured"]:
            lines.append(f"- {run['unmeasured']} measurements were left out: the budget of {run['budget']:g} s ended")
    return "\n".join(lines)


def _cells(row: dict[str, Any], count: int) -> list[str]:
    name = f"{row['loader']} {row['version'] or ''}".strip()
    if "seconds" not in row:
        return [name, f"failed: {row['error'].replace('|', '/')}", *[""] * (count - 2)]
    cells = [
        name,
        f"{row['seconds']:.3f}",
        f"{row['gb_per_s']:.2f}",
        f"{row['of_limit']:.2f}" if row["of_limit"] else "",
        f"{row['cpu_seconds']:.2f}",
        _size(row["peak_rss"]),
    ]
    if "gpu_used" in row:
        cells.append(f"{_size(row['gpu_peak_torch'])} / {_size(row['gpu_used'])}")
    checked = {True: "ok", False: "WRONG", None: "not checked"}[row["bytes_ok"]]
    return [*cells, checked + (f", {row['failed']} failed" if "failed" in row else "")]


def _size(nbytes: int) -> str:
    return f"{nbytes / common.GB:.2f} GB" if abs(nbytes) >= common.GB else f"{nbytes / 1e6:.0f} MB"
