"""``penstock doctor``: a diagnosis in the terminal, as JSON, or as a text for a ticket."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from rich.table import Table
from rich.text import Text

from penstock._native import shown as without_secrets
from penstock.cli.output import Output, as_json, plural, printable
from penstock.doctor import report
from penstock.doctor.diagnosis import diagnose, findings
from penstock.doctor.facts import Facts
from penstock.doctor.finding import Finding
from penstock.units import size

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold"}
_LABELS = 17
"""Columns of what stands left of the figures."""


def doctor(
    paths: list[str],
    device: str | None,
    *,
    storage_options: Mapping[str, str] | None,
    anonymous: bool,
    json: bool,
) -> None:
    """Diagnoses, and reports."""
    facts = diagnose(paths, device, storage_options=storage_options)
    if json:
        as_json(report.as_dict(facts))
    elif anonymous:
        sys.stdout.write(report.anonymous(facts))
    else:
        show(facts, paths)


def show(facts: Facts, paths: list[str]) -> None:
    """Prints a diagnosis for the owner of the machine."""
    out = Output()
    versions = (f"{name} {version}" for name, version in facts.versions.items())
    out.lines([", ".join([*versions, f"Linux {facts.machine.kernel}"])], style="dim")
    if paths:
        section(out, "Checkpoint", _checkpoint(facts, paths))
    section(out, "Measured here", ((name, f"{rate:.2f} GB/s") for name, rate in report.rates(facts).items()))
    gpus = list(report.links(facts)) or ["none found"]
    section(out, "Machine", [*report.machine(facts).items(), *(("GPU", line) for line in gpus)])
    section(
        out, "Engines", ((f"{engine.name} {engine.version}", engine.why_not or engine.how) for engine in facts.engines)
    )
    judged = findings(facts)
    title = plural(len(judged), "finding") if judged else "Nothing to improve was found"
    out.print()
    out.lines([title], style="bold")
    for finding in judged:
        _finding(out, finding)
    out.print()
    out.lines((f"not found out: {what}" for what in facts.missing), style="dim")
    out.lines([f"took {facts.seconds:.1f} s; --anonymous prints a text for a ticket"], style="dim")


def section(out: Output, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """A title and its figures; nothing where there are none."""
    made = Table.grid(padding=(0, 2))
    made.add_column(min_width=_LABELS, overflow="fold", max_width=max(out.width // 3, _LABELS))
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(Text(f"  {printable(name)}"), Text(printable(value)))
    if made.row_count:
        out.print()
        out.lines([title], style="bold")
        out.print(made)


def _checkpoint(facts: Facts, paths: list[str]) -> Iterable[tuple[str, str]]:
    yield "location", ", ".join(map(without_secrets, paths))
    if ckpt := facts.checkpoint:
        share = "" if ckpt.is_remote else f", {report.cached(ckpt.cached_share)}"
        yield "size", f"{size(ckpt.nbytes)} in {plural(ckpt.files, 'file')}"
        yield "storage", f"{ckpt.storage}{share}"
    if remote := facts.remote:
        far = "" if remote.round_trip is None else f", {remote.round_trip * 1e3:.0f} ms away"
        region = f", region {remote.region}" if remote.region else ""
        yield "server", f"{remote.host}{region}{far}"
        if remote.credentials:
            yield "credentials", remote.credentials
    yield from report.predicted(facts).items()


def _finding(out: Output, finding: Finding) -> None:
    cause, remedy = map(printable, finding.said())
    made = Table.grid(padding=(0, 1))
    made.add_column(no_wrap=True, min_width=9)
    made.add_column(overflow="fold")
    made.add_row(Text(f"  {finding.severity}", style=_STYLES[finding.severity]), Text(cause))
    made.add_row(Text("  try", style="cyan"), Text(remedy))
    out.print()
    out.print(made)
