"""Published figures: reads them from the results, and draws the charts of docs/performance.md.

    python -m benchmarks.published          # writes docs/charts/*.svg

``published.toml`` names the result and the key of each figure. A figure from files has to have cache proof: each of
its measurements says how much was cached, and that is what its state promises. This module measures nothing.
"""

from __future__ import annotations

import html
import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CHARTS = ROOT / "docs" / "charts"
# The share of the file that may be cached in each state. tmpfs is memory, and needs no proof.
CACHED = {"cold": (0.0, 0.01), "half": (0.45, 0.55), "warm": (0.99, 1.0)}


class UnprovedError(Exception):
    """A measurement that does not show the state of the page cache that it was made in."""


def published() -> dict[str, Any]:
    """What published.toml holds: figures and charts."""
    import tomllib

    table: dict[str, Any] = tomllib.loads((ROOT / "benchmarks" / "published.toml").read_text())
    return table


def value(figure: dict[str, Any]) -> float:
    """The figure as its result has it: the median of all measurements that its key names."""
    result = json.loads((RESULTS / f"{figure['result']}.json").read_text())
    found = _matching(result[figure["list"]], figure["where"])
    if not found:
        raise KeyError(f"{figure['id']}: {figure['result']} has no {figure['where']}")
    state = figure["where"].get("state")
    if state in CACHED:
        _prove(figure["id"], state, _matching(result["measurements"], figure["where"]))
    return statistics.median(item[figure["value"]] for item in found)


def _matching(items: list[dict[str, Any]], where: dict[str, str]) -> list[dict[str, Any]]:
    return [item for item in items if all(item.get(key) == wanted for key, wanted in where.items())]


def _prove(name: str, state: str, measurements: list[dict[str, Any]]) -> None:
    least, most = CACHED[state]
    if not measurements:
        raise UnprovedError(f"{name}: no measurements")
    for item in measurements:
        cached = item.get("cached")
        if cached is None or not least <= cached <= most:
            raise UnprovedError(f"{name}: round {item.get('round')} is {state}, but {cached} of it was cached")


def chart(title: str, bars: list[tuple[str, float, str]]) -> str:
    """Horizontal bars, as SVG: label, length and the text at its end."""
    longest = max(length for _, length, _ in bars)
    height = 44 + 30 * len(bars)
    size = f'viewBox="0 0 640 {height}" width="640" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">',
        f'<rect width="640" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-weight="bold" fill="#222222">{html.escape(title)}</text>',
    ]
    for place, (label, length, text) in enumerate(bars):
        top, width = 40 + 30 * place, round(380 * length / longest, 1)
        color = "#1f6feb" if label.lower() == "penstock" else "#8c959f"
        lines += [
            f'<text x="186" y="{top + 16}" text-anchor="end" fill="#222222">{html.escape(label)}</text>',
            f'<rect x="194" y="{top}" width="{width}" height="22" fill="{color}"/>',
            f'<text x="{200 + width}" y="{top + 16}" fill="#222222">{html.escape(text)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def charts() -> dict[str, str]:
    """Every chart by its file's name."""
    table = published()
    figures = {figure["id"]: figure for figure in table["figure"]}
    return {
        entry["file"]: chart(
            entry["title"],
            [(label, value(figures[name]), f"{figures[name]['text']} s") for label, name in entry["bars"]],
        )
        for entry in table["chart"]
    }


if __name__ == "__main__":
    CHARTS.mkdir(exist_ok=True)
    for file, text in charts().items():
        (CHARTS / file).write_text(text)
