"""Charts by matplotlib: bars of medians with their range, and lines over the number of readers.

A chart is made in light colours for PNG. As SVG each colour is a CSS variable, so that one text suits light and dark
pages (``THEME``). It knows no results but what ``summary`` makes of them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .summary import OURS, Panel, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    # name: light, dark. No two of the light ones are equal: they are found in the SVG by their value.
    "text": ("#1f2328", "#e6edf3"),
    "page": ("#fefefe", "#0d1117"),
    "muted": ("#59636e", "#9198a1"),
    "grid": ("#d8dee4", "#30363d"),
    "ours": ("#0969da", "#58a6ff"),
    "ours-soft": ("#54a0f0", "#1f6feb"),
    "other": ("#8c959f", "#6e7681"),
    "limit": ("#bc4c00", "#f0883e"),
    "line-1": ("#1a7f37", "#3fb950"),
    "line-2": ("#8250df", "#bc8cff"),
    "line-3": ("#bf3989", "#f778ba"),
}
THEME = (
    ":root{" + "".join(f"--{name}:{light};" for name, (light, _) in COLOURS.items()) + "}"
    "@media (prefers-color-scheme: dark){:root{" + "".join(f"--{name}:{dark};" for name, (_, dark) in COLOURS.items())
    + "}}"
)  # fmt: skip
WIDE, NARROW = 7.6, 3.6
"""Inches, at 100 pixels each."""


def colour(name: str) -> str:
    return COLOURS[name][0]


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(colour("grid"))
    axes.tick_params(colors=colour("muted"), length=0, labelsize=10)
    axes.set_axisbelow(True)
    return figure, axes


def comparison(panel: Panel, width: float = WIDE) -> Figure:
    """A bar for each loader's median, a line for the least and the most, and the machine's limit."""
    rows = panel.measured
    figure, axes = _figure(width, 0.75 + 0.36 * len(rows))
    ours = panel.ours()
    longest = max([max(row.seconds) for row in rows] + [panel.limit[0] if panel.limit else 0.0])
    for place, row in enumerate(rows):
        axes.barh(place, row.median, height=0.66, color=colour(_bar(row)))
        axes.plot([min(row.seconds), max(row.seconds)], [place, place], color=colour("text"), linewidth=1)
        times = f" ({row.ratio:.2f}×)" if ours and row is not ours and row.ratio else ""
        axes.annotate(
            f"{row.median:.3g} s{times}",
            (max(row.seconds), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
            color=colour("text"),
            bbox={"facecolor": colour("page"), "edgecolor": "none", "pad": 1.0},
        )
    axes.set_yticks(range(len(rows)), [row.loader for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(colour("text"))
        label.set_fontweight("bold" if row.loader == OURS else "normal")
    axes.invert_yaxis()
    # Room for the text at the end of the longest bar.
    axes.set_xlim(0, longest * (1.28 if width > NARROW else 1.75))
    axes.xaxis.set_major_locator(_few(4 if width > NARROW else 3))
    axes.grid(axis="x", color=colour("grid"), linewidth=0.8)
    axes.set_xlabel("seconds", color=colour("muted"), fontsize=10)
    if panel.limit:
        seconds, what = panel.limit
        axes.axvline(seconds, color=colour("limit"), linewidth=1.4, linestyle=(0, (4, 3)))
        text = f"what reading the {what} allows" if width > NARROW else f"limit ({what})"
        text = f"{text}: {seconds:.3g} s"
        axes.set_title(text, loc="left", fontsize=10, color=colour("limit"), pad=6)
    return figure


def stacked(panel: Panel, width: float = WIDE) -> Figure:
    """A bar for each loader, of the stages of its way: medians, so their sum may differ a little from the whole."""
    rows, stages = panel.measured, panel.stages
    columns = 4 if width > NARROW else 2
    figure, axes = _figure(width, 1.1 + 0.42 * len(rows) + 0.25 * -(-len(stages) // columns))
    tones = ("ours", "line-1", "line-2", "line-3", "other", "limit", "ours-soft", "muted")
    for number, stage in enumerate(stages):
        lengths = [row.stages.get(stage, 0.0) for row in rows]
        before = [sum(row.stages.get(other, 0.0) for other in stages[:number]) for row in rows]
        axes.barh(range(len(rows)), lengths, left=before, height=0.62, color=colour(tones[number % 8]), label=stage)
    for place, row in enumerate(rows):
        axes.annotate(
            f"{row.median:.3g} s" + (f" ({row.ratio:.2f}×)" if row.ratio and row.loader != OURS else ""),
            (sum(row.stages.values()), place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=10,
            color=colour("text"), bbox={"facecolor": colour("page"), "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row.loader for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(colour("text"))
        label.set_fontweight("bold" if row.loader == OURS else "normal")
    axes.invert_yaxis()
    axes.set_xlim(0, max(sum(row.stages.values()) for row in rows) * (1.28 if width > NARROW else 1.75))
    axes.xaxis.set_major_locator(_few(4 if width > NARROW else 3))
    axes.grid(axis="x", color=colour("grid"), linewidth=0.8)
    axes.set_xlabel("seconds", color=colour("muted"), fontsize=10)
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=10, labelcolor=colour("text"))
    return figure


def _bar(row: Row) -> str:
    return "ours" if row.loader == OURS else "ours-soft" if row.loader.startswith(OURS) else "other"


def _few(ticks: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(ticks)


def over_readers(
    lines: Mapping[str, Sequence[tuple[int, float, float, float]]], automatic: float | None, width: float = WIDE
) -> Figure:
    """Seconds over the number of readers: of each loader, readers, median, least and most.

    ``automatic`` is what Penstock takes when it finds the number by itself.
    """
    figure, axes = _figure(width, 3.6)
    names = ("ours", "line-1", "line-2", "line-3", "other")
    for number, (name, points) in enumerate(lines.items()):
        tone = colour(names[min(number, len(names) - 1)])
        readers, medians, least, most = zip(*points, strict=True)
        axes.fill_between(readers, least, most, color=tone, alpha=0.15, linewidth=0)
        axes.plot(readers, medians, color=tone, marker="o", markersize=5, linewidth=2, label=name)
    if automatic is not None:
        label = f"{OURS}, automatic: {automatic:.3g} s"
        axes.axhline(automatic, color=colour("limit"), linewidth=1.6, linestyle=(0, (4, 3)), label=label)
    axes.set_xscale("log", base=2)
    every = sorted({point[0] for points in lines.values() for point in points})
    axes.set_xticks(every, [str(number) for number in every])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=colour("grid"), linewidth=0.8)
    axes.set_xlabel("readers", color=colour("muted"), fontsize=10)
    axes.set_ylabel("seconds", color=colour("muted"), fontsize=10)
    columns = 3 if width > NARROW else 1
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=10, labelcolor=colour("text"))
    return figure


def png(figure: Figure) -> bytes:
    made = io.BytesIO()
    figure.savefig(made, format="png", dpi=160, facecolor="white")
    return made.getvalue()


def svg(figure: Figure, title: str, *, alone: bool) -> str:
    """The chart as SVG whose colours follow the page, or, ``alone``, the reader's settings."""
    import matplotlib as mpl

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}
    made = io.StringIO()
    with mpl.rc_context(settings):
        figure.savefig(made, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = made.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for name, (light, _) in COLOURS.items():
        text = text.replace(light, f"var(--{name})")
    # matplotlib names a list of fonts that it knows; a page has its own.
    text = re.sub(r"font: ((?:\w+ )?)([\d.]+)px [^;\"]*", r"font: \1\2px system-ui, sans-serif", text)
    head = f'<svg role="img" aria-label="{_escaped(title)}" '
    text = head + text[len("<svg ") :]
    if alone:
        at = text.index(">") + 1
        text = f"{text[:at]}<style>{THEME}</style>{text[at:]}"
    return text


def _escaped(text: str) -> str:
    import html

    return html.escape(text, quote=True)
