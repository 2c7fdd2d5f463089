"""``penstock bench concurrency``: load time by the number of readers, of Penstock and of others that can be told it.

Penstock's own choice is measured beside fixed numbers, on files or from an object store. What one reader gets, and the
number from which more readers gain nothing, tell what limits the storage: latency, a limit for
each connection, or one of the whole.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import penstock
from penstock.arguments import is_url

from . import charts, loaders, result, schedule, states
from .compare import Wanted, carry_out, case_of, options_of, rows_of, scratch_of
from .files import Files
from .report import Chart
from .rows import Rows, run
from .summary import OURS, Panel, panels

READERS = (1, 2, 4, 8, 16, 32)
QUICK_READERS = (1, 4, 16)
STORE_READERS = (1, 4, 16, 32, 64)
CHECKED = "penstock:readers=1"


class Store:
    """A checkpoint behind a URL. No state of it is made: what a server or a network caches is theirs."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.rows = Rows(options, work)
        self.reference = work / "reference.json"
        self.locations: list[str] = []
        self.nbytes = 0

    def stages(self) -> list[str]:
        return [self.options.url.partition(":")[0]]

    @contextlib.contextmanager
    def stage(self, name: str, of: schedule.Schedule) -> Iterator[None]:
        del name
        checkpoint = penstock.open(self.options.url)
        self.locations, self.nbytes = [file for file, _ in checkpoint.files], checkpoint.nbytes
        sizes = {"bytes": self.nbytes, "tensors": len(checkpoint), "files": len(self.locations)}
        of.add_case("checkpoint", sizes)
        # A load by one reader, one range after another, gives the checksums that all others are held against.
        sums = self._load(CHECKED, of.in_time(("reference",)), {"sums": True})["sums"]
        self.reference.write_text(json.dumps(sums))
        yield

    def groups(self, stage: str, number: int) -> list[list[schedule.Axes]]:
        del number
        return [[{"case": "checkpoint", "network": stage, "loader": name} for name in self.rows.names]]

    def measure(self, axes: schedule.Axes, number: int, seconds: float) -> dict[str, Any]:
        name = axes["loader"]
        more = {"reference": str(self.reference) if number == 0 else None}
        return self._load(name, seconds, more) | {"version": self.rows.versions[name]}

    def _load(self, name: str, seconds: float, more: dict[str, Any]) -> dict[str, Any]:
        device = self.options.device
        task = {"do": "load", "loader": name, "files": self.locations, "device": device, "touch": False}
        task |= {"settle": states.enough_memory(self.nbytes) if device == "cpu" else 0}
        return run(task | more, self.options, self.work, seconds=seconds, env=loaders.of(name).env)


def concurrency(location: str | None, wanted: Wanted, command: str, readers: Sequence[int] = ()) -> result.Result:
    """Measures.

    Raises:
        ConfigError: the checkpoint or a loader is none.
    """
    is_remote = location is not None and is_url(location)
    case = case_of(Path(location)) if location is not None and not is_remote else None
    base, skipped = rows_of(wanted, given=location is not None)
    names, skipped = rows(base, readers or numbers(wanted, is_remote=is_remote), skipped)
    with scratch_of(wanted) as scratch:
        options = options_of(wanted, case, names, scratch)
        options.limits = {} if is_remote else options.limits
        options.url = location
        return carry_out("concurrency", Store if is_remote else Files, options, wanted, command, skipped)


def numbers(wanted: Wanted, *, is_remote: bool) -> Sequence[int]:
    """The numbers of readers to try."""
    return QUICK_READERS if wanted.quick else STORE_READERS if is_remote else READERS


def rows(names: Sequence[str], readers: Sequence[int], skipped: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Each loader that can be told a number of readers with each number, Penstock by itself first."""
    found = [OURS]
    for name in names:
        if name == OURS:
            found += [f"{name}:readers={number}" for number in readers]
            continue
        try:
            told = loaders.of(name).readers
        except loaders.PluginError as error:
            skipped[name] = str(error)
            continue
        if told and "-" not in name:
            found += [f"{name}:readers={number}" for number in readers]
        elif not name.startswith(OURS):
            skipped[name] = "it cannot be told how many readers to have"
    return found, skipped


def drawn(document: result.Result) -> list[Chart]:
    """A chart for each panel: seconds over the number of readers."""
    return [_chart(panel) for panel in panels(document) if lines(panel)]


def _chart(panel: Panel) -> Chart:
    ours = panel.ours()
    automatic = ours.median if ours else None
    return f"readers-{panel.state}", panel.title, lambda width: charts.over_readers(lines(panel), automatic, width)


def lines(panel: Panel) -> dict[str, list[tuple[int, float, float, float]]]:
    """Of each loader: readers, median, least and most, by readers."""
    found: dict[str, list[tuple[int, float, float, float]]] = {}
    for row in panel.measured:
        if readers := loaders.settings(row.loader).get("readers"):
            point = (int(readers), row.median, min(row.seconds), max(row.seconds))
            found.setdefault(loaders.kind(row.loader), []).append(point)
    ordered = sorted(found, key=lambda name: (name != OURS, name))
    return {name: sorted(found[name]) for name in ordered}
