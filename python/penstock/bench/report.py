"""The report: one HTML file that needs nothing else, and the files beside it (JSON, CSV, PNG and SVG charts).

The page has the charts inline, each in a wide and a narrow form, and follows the reader's light or dark setting. It is
made of ``summary`` alone.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import charts, data, intervals, result
from .summary import OURS, Panel, Row, headlines, notes, panels, samples_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CSS = """
:root{color-scheme:light dark;--card:#f6f8fa}
@media (prefers-color-scheme: dark){:root{--card:#161b22}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.55 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:1.7rem;line-height:1.25;margin:0 0 4px}
h2{font-size:1.2rem;margin:40px 0 8px}
p{margin:8px 0}
.quiet{color:var(--muted);font-size:.9rem}
.short{background:var(--card);border-left:4px solid var(--ours);border-radius:6px;padding:10px 18px;margin:20px 0}
.short li{margin:6px 0}
.short ul{padding-left:18px;margin:4px 0}
figure{margin:12px 0}
figure svg{display:block;width:100%;max-width:820px;height:auto;overflow:visible}
.narrow{display:none}
@media (max-width: 620px){.wide{display:none}.narrow{display:block}main{padding:20px 14px 48px}}
.scroll+.scroll{margin-top:14px}
.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch}
table{border-collapse:separate;border-spacing:0;width:100%;font-size:.86rem;font-variant-numeric:tabular-nums}
th,td{padding:6px 8px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}
th{color:var(--muted);font-weight:600}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--page)}
tr.ours td{font-weight:600;color:var(--ours)}
.bad{color:var(--limit);font-weight:600}
td.why{white-space:normal;text-align:left;color:var(--muted);min-width:220px}
code{background:var(--card);padding:1px 5px;border-radius:4px;font-size:.88em;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 18px;font-size:.9rem;margin:8px 0}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}
"""
TITLES = {
    "compare": "loaders compared",
    "concurrency": "load time by the number of readers",
    "switch": "switching between models",
    "engine": "until the first answer",
}
CLOCKS = {
    "switch": """What is timed is what each heading says; imports come before it.""",
    "engine": """The time runs from the start of the process until its first answer. Steps are told by the engine's log,
or by hooks in Python; one whose end nobody told is in the next.""",
}
FILES = "The time runs from opening the files until the last tensor can be used; imports come before it."
CHECKS = {
    "switch": "What was loaded is compared with what was written, at places drawn from it.",
    "engine": "What an engine says with each loader is compared with what it said first.",
}
SUMS = "The bytes of all tensors are compared with checksums of the files, once for each loader and state."
Chart = tuple[str, str, Callable[[float], "Figure"]]
"""The file's name without its end, the title, and what draws it in a width."""


def write(directory: Path, document: result.Result, extra: Sequence[Chart] = ()) -> list[Path]:
    """Writes everything to a directory: the files, the page first.

    Args:
        extra: charts of an experiment of its own, instead of a comparison's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    found = panels(document)
    drawn = extra or [_chart(panel, several=len({panel.case for panel in found}) > 1) for panel in found]
    written = [directory / "report.html", directory / "result.json", directory / "samples.csv"]
    written[0].write_text(page(document, found, drawn))
    result.write(written[1], document)
    written[2].write_text(samples_csv(document))
    for name, title, draw in drawn:
        if draw is not _nothing:
            for path, content in (
                (directory / f"{name}.svg", charts.svg(draw(charts.WIDE), title, alone=True).encode()),
                (directory / f"{name}.png", charts.png(draw(charts.WIDE))),
            ):
                path.write_bytes(content)
                written.append(path)
    return written


def _nothing(_: float) -> Figure:
    raise ValueError("nothing to draw")


def _chart(panel: Panel, *, several: bool) -> Chart:
    name = "-".join(filter(None, [panel.case if several else "", panel.state])).replace("/", "-")
    draw = charts.stacked if panel.stages else charts.comparison
    return (
        name.replace(" ", "-").replace(",", ""),
        panel.title,
        (lambda width: draw(panel, width)) if panel.measured else _nothing,
    )


def page(document: result.Result, found: Sequence[Panel], drawn: Sequence[Chart]) -> str:
    """The page."""
    run = document["runs"][-1]
    heading = f"Penstock: {TITLES.get(document['experiment'], document['experiment'])}"
    parts = [f"<h1>{_text(heading)}</h1>", f'<p class="quiet">{_text(_about(document))}</p>']
    if said := headlines(found):
        items = "".join(f"<li>{_text(line)}</li>" for line in said)
        parts.append(f'<div class="short"><strong>In short</strong><ul>{items}</ul></div>')
    parts += [f'<p class="bad">{_text(note)}</p>' for note in notes(document)]
    shown = list(drawn)
    for panel in found:
        parts.append(f"<h2>{_text(panel.title)}</h2>")
        chart = next((chart for chart in shown if chart[1] == panel.title), None)
        parts += [_figure(chart)] if chart and chart[2] is not _nothing else []
        parts += [_table(panel), _stages(panel), f'<p class="quiet">{_text(panel.ended)}</p>' if panel.ended else ""]
    parts += [_skipped(run), _method(document), _machine(run)]
    body = "\n".join(filter(None, parts))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(heading)}</title><style>{charts.THEME}{CSS}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def _figure(chart: Chart) -> str:
    name, title, draw = chart
    forms = (("wide", charts.WIDE), ("narrow", charts.NARROW))
    # Each form has a title of its own: ids within a page differ by it.
    drawn = (
        f'<div class="{form}">{charts.svg(draw(width), f"{title} ({form})", alone=False)}</div>'
        for form, width in forms
    )
    return f'<figure id="{_text(name)}">{"".join(drawn)}</figure>'


HEADS = (
    "loader",
    "seconds",
    "95 % interval",
    "least-most",
    "ratio",
    "GB/s",
    "first s",
    "CPU s",
    "peak MB",
    "from disk",
    "bytes",
)


def _table(panel: Panel) -> str:
    rows = "".join(_row(row) for row in panel.rows)
    heads = "".join(f"<th>{_text(head)}</th>" for head in HEADS)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _stages(panel: Panel) -> str:
    """The seconds of stages, where there are any."""
    if not panel.stages:
        return ""
    heads = "".join(f"<th>{_text(head)}</th>" for head in ("seconds by stage", *panel.stages))
    rows = "".join(
        f"<tr{' class=ours' if row.loader == OURS else ''}><td>{_text(row.loader)}</td>"
        + "".join(f"<td>{row.stages.get(stage, 0.0):.3f}</td>" for stage in panel.stages)
        + "</tr>"
        for row in panel.measured
    )
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _row(row: Row) -> str:
    name = f"{row.loader} {row.version}".strip()
    if not row.seconds:
        return (
            f'<tr><td>{_text(name)}</td><td class="why" colspan="{len(HEADS) - 1}">{_text(row.error or "")}</td></tr>'
        )
    cells = [name, *cells_of(row)]
    wrong = ' class="bad"' if row.bytes_checked == "WRONG" else ""
    told = "".join(f"<td>{_text(cell)}</td>" for cell in cells[:-1]) + f"<td{wrong}>{_text(cells[-1])}</td>"
    return f"<tr{' class=ours' if row.loader == OURS else ''}>{told}</tr>"


def cells_of(row: Row) -> list[str]:
    """What is told of a row that was measured, in the order of ``HEADS`` after the loader."""
    known = row.interval
    return [
        f"{row.median:.3f}",
        f"{known.low:.3f}-{known.high:.3f}" if known else "too few",
        f"{min(row.seconds):.3f}-{max(row.seconds):.3f}",
        f"{row.ratio:.2f}×" if row.ratio else "",
        f"{row.rate:.2f}" if row.nbytes else "",
        "" if row.first is None else f"{row.first:.3f}",
        "" if row.cpu is None else f"{row.cpu:.2f}",
        "" if row.peak is None else f"{row.peak / 1e6:.0f}",
        "" if row.device is None else f"{row.device:.0%}",
        row.bytes_checked + (f", {row.unproved} without proof" if row.unproved else ""),
    ]


def _about(document: result.Result) -> str:
    run = document["runs"][-1]
    known = run["machine"]
    sizes = [f"{case['bytes'] / data.GB:.3g} GB in {case['tensors']} tensors" for case in document["cases"].values()]
    # Questions about one model have one size.
    parts = [*dict.fromkeys(sizes), f"to {run.get('device', 'cpu')}", f"{known.get('cpu')}, {known.get('cores')} cores"]
    return ", ".join(map(str, [*parts, known.get("filesystem"), str(run.get("started", ""))[:10]]))


def _skipped(run: dict[str, Any]) -> str:
    if not run.get("skipped"):
        return ""
    return f"<h2>Left out</h2>{_pairs(run['skipped'].items())}"


def _method(document: result.Result) -> str:
    samples = [item for item in document["samples"] if "figures" in item and "loader" in item["axes"]]
    unproved = sum(not result.is_proved(item) for item in samples)
    precision = document["runs"][-1].get("precision", intervals.BAR)
    proof = f"In no chart and no figure, for want of that proof: {unproved}."
    of = document["experiment"]
    text = f"""{len(samples)} measurements, each in a process of its own, in an order drawn anew for each round.
{CLOCKS.get(of, FILES)} Rounds go on until the 95 % interval of each median and of each ratio is within
±{precision:.0%}, or the budget ends. Intervals are by ranks, and there is none below six rounds. Thin lines and bands
reach from the least to the most. Before each measurement in a state of the page cache, mincore(2) says how much of the
files is cached; after it, the kernel says how much came from the device.
{proof if unproved else "Every one has that proof."}
{CHECKS.get(of, SUMS)}"""
    return f"<h2>How it was measured</h2><p>{_text(text)}</p>"


def _machine(run: dict[str, Any]) -> str:
    # Rows of one loader have one version.
    versions = {name.partition(":")[0]: version for name, version in run["versions"].items() if version}
    known = [(key.replace("_", " "), value) for key, value in run["machine"].items() if value is not None]
    doctor = "<code>penstock doctor</code> says what limits loads here, and what to change."
    repeat = f"<p>Repeat it: <code>{_text(run['command'])}</code>. {doctor}</p>"
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"<h2>Machine</h2>{_pairs([*known, ('versions', told)])}{repeat}"


def _pairs(pairs: Iterable[tuple[str, Any]]) -> str:
    return f"<dl>{''.join(f'<dt>{_text(key)}</dt><dd>{_text(value)}</dd>' for key, value in pairs)}</dl>"


def _text(value: Any) -> str:
    return html.escape(str(value))
