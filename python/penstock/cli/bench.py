"""``penstock bench``: measurements that anyone can repeat, as a table, and as a report that can be sent to others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from penstock._native import shown as without_secrets
from penstock.bench import report, result
from penstock.bench.compare import Wanted, compare
from penstock.bench.summary import OURS, Panel, Row, headlines, notes, panels
from penstock.cli.output import NARROW, Output, as_json, bare_table, printable

if TYPE_CHECKING:
    from penstock.bench.engine.bench import Asked as Engines
    from penstock.bench.switch.bench import Asked

_WIDE, _VERSIONS = 110, 130
"""The columns from which a table has everything, and from which versions stand beside names."""
Column = tuple[str, Callable[[Row], str], int]
"""The heading, what is told of a row, and the width of the terminal from which it is shown."""


def run_compare(wanted: Wanted, *, json: bool) -> None:
    """Compares, and shows."""
    if wanted.output:
        wanted.output.mkdir(parents=True, exist_ok=True)
    told(compare(wanted, _command()), wanted.output, json=json)


def run_concurrency(location: str | None, wanted: Wanted, readers: Sequence[int], *, json: bool) -> None:
    """Measures by the number of readers, and shows."""
    from penstock.bench.concurrency import concurrency, drawn

    if wanted.output:
        wanted.output.mkdir(parents=True, exist_ok=True)
    document = concurrency(location, wanted, _command(), readers)
    told(document, wanted.output, json=json, charts=drawn(document))


def run_switch(wanted: Wanted, asked: Asked, *, json: bool) -> None:
    """Measures what switching between models takes, and shows."""
    from penstock.bench.switch.bench import switch

    if wanted.output:
        wanted.output.mkdir(parents=True, exist_ok=True)
    told(switch(wanted, asked, _command()), wanted.output, json=json)


def run_engine(path: Path | None, wanted: Wanted, asked: Engines, *, json: bool) -> None:
    """Measures how long engines take until they answer, and shows."""
    from penstock.bench.engine.bench import engine

    if wanted.output:
        wanted.output.mkdir(parents=True, exist_ok=True)
    told(engine(path, wanted, asked, _command()), wanted.output, json=json)


def told(document: result.Result, output: Path | None, *, json: bool, charts: Sequence[report.Chart] = ()) -> None:
    """Prints a result, and writes its report."""
    written = report.write(output, document, charts) if output else []
    if json:
        as_json(document)
        return
    out = Output()
    show(out, document)
    if written:
        out.lines([f"report: {printable(str(written[0]))}"])
    else:
        out.lines(["--output DIRECTORY writes a report with charts; penstock doctor says what to change"], style="dim")


def show(out: Output, document: result.Result) -> None:
    """Prints the tables of a result, and what they say."""
    found = panels(document)
    for panel in found:
        _panel(out, panel)
    for run in document["runs"][-1:]:
        out.lines((printable(f"left out: {what}: {why}") for what, why in run.get("skipped", {}).items()), style="dim")
    out.print()
    for line in headlines(found):
        out.print(Text(printable(line)))
    out.lines(notes(document), style="yellow")
    out.print()


def _columns(panel: Panel, width: int) -> list[Column]:
    def cell(number: int) -> Callable[[Row], str]:
        return lambda row: report.cells_of(row)[number] if row.seconds else ""

    every: list[Column] = [
        ("seconds", cell(0), 0),
        ("95 % interval", cell(1), 75),
        ("least-most", cell(2), _WIDE),
        ("ratio", cell(3), 0),
        ("GB/s", cell(4), 0),
        ("first s", cell(5), _WIDE),
        ("CPU s", cell(6), NARROW + 10),
        ("peak MB", cell(7), _WIDE),
        ("from disk", cell(8), _WIDE),
        ("bytes", cell(9), 0),
    ]
    return [column for column in every if width >= column[2] and any(column[1](row) for row in panel.measured)]


def _panel(out: Output, panel: Panel) -> None:
    out.print()
    limit = f" (reading the {panel.limit[1]} allows {panel.limit[0]:.3g} s)" if panel.limit else ""
    out.lines([f"{panel.title}{limit}"], style="bold")
    columns = _columns(panel, out.width)
    table = bare_table()
    table.add_column("loader", overflow="fold")
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=heading != "bytes")
    for row in panel.measured:
        style = "bold" if row.loader == OURS else ""
        name = f"{row.loader} {row.version}" if out.width >= _VERSIONS else row.loader
        table.add_row(*(Text(printable(text), style=style) for text in [name, *(of(row) for _, of, _ in columns)]))
    if columns:
        out.print(table)
    if panel.stages:
        stages = bare_table()
        stages.add_column("seconds by stage", overflow="fold")
        for stage in panel.stages:
            stages.add_column(stage, justify="right", no_wrap=True)
        for row in panel.measured:
            stages.add_row(Text(printable(row.loader)), *(f"{row.stages.get(of, 0.0):.3f}" for of in panel.stages))
        out.print(stages)
    for row in panel.rows:
        if row.error:
            out.lines([printable(f"{row.loader} failed: {row.error}")], style="red")
    if panel.ended:
        out.lines([panel.ended], style="dim")


def _command() -> str:
    """The command line, without directories of this machine and secrets of URLs."""
    words = [without_secrets(word) if "://" in word else Path(word).name or word for word in sys.argv[1:]]
    return " ".join(["penstock", *words])
