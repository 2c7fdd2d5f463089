"""Published figures of the manual: reads them from the results, and draws the charts of docs/performance.md.

    python -m benchmarks.published          # writes docs/charts/*.svg

``published.toml`` names the result of each figure, and the axes of its samples. A figure from files has to have cache
proof: each of its samples says how much was cached, and that is what its state promises. This module measures nothing.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from penstock.bench import bars, data, result

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CHARTS = ROOT / "docs" / "charts"


def published() -> dict[str, Any]:
    """What published.toml holds: figures and charts."""
    import tomllib

    table: dict[str, Any] = tomllib.loads((ROOT / "benchmarks" / "published.toml").read_text())
    return table


def value(figure: dict[str, Any]) -> float:
    """The figure as its result has it: the median of all samples that it names, in the unit of the page.

    Raises:
        UnprovedError: one of them does not show the state of the page cache that it was made in.
    """
    document = result.read(RESULTS / f"{figure['result']}.json")
    found = _median(document, figure, figure["where"])
    return found * figure.get("times", 1.0) / (_median(document, figure, figure["over"]) if "over" in figure else 1.0)


def _median(document: result.Result, figure: dict[str, Any], where: dict[str, str]) -> float:
    named = [
        item for item in document["samples"] if all(item["axes"].get(axis) == wanted for axis, wanted in where.items())
    ]
    found = [float(at) for item in named if (at := _figure(item.get("figures", {}), figure["value"])) is not None]
    if not found:
        raise KeyError(f"{figure['id']}: {figure['result']} has no {where}")
    for item in named:
        result.prove(item)
    return statistics.median(found)


def _figure(figures: dict[str, Any], name: str) -> Any:
    """A figure of a sample; its rate, where it has the parts."""
    if name == "gb_per_s" and name not in figures and "bytes" in figures:
        return figures["bytes"] / figures["seconds"] / data.GB
    return figures.get(name)


def charts() -> dict[str, str]:
    """Every chart by its file's name."""
    table = published()
    figures = {figure["id"]: figure for figure in table["figure"]}
    return {
        entry["file"]: bars.bars(
            entry["title"],
            [(label, value(figures[name]), f"{figures[name]['text']} s") for label, name in entry["bars"]],
        )
        for entry in table["chart"]
    }


if __name__ == "__main__":
    CHARTS.mkdir(exist_ok=True)
    for file, text in charts().items():
        (CHARTS / file).write_text(text)
