"""``penstock load``: a load for real, with a bar while it runs and figures afterwards.

What is timed is what a program waits for: opening the checkpoint and loading it. Importing the framework and waking the
device come first and are not counted. The tensors are held until the end, as a program would hold them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

import penstock
from penstock._native import shown as without_secrets
from penstock.cli.failures import interrupt_ends_process
from penstock.cli.output import NARROW, Output, as_json, bare_table, plural, printable
from penstock.cli.selecting import matching, no_match
from penstock.units import rate, size

if TYPE_CHECKING:
    from rich.table import Table


class Figure(NamedTuple):
    """How a figure of ``LoadStats`` is shown."""

    group: str
    label: str
    meaning: str


FIGURES = {
    "storage": Figure("source", "storage", "what most of the bytes lie on"),
    "storage_kind": Figure("source", "storage class", "as metrics have it"),
    "bytes": Figure("source", "tensor bytes", "bytes of the tensors"),
    "tensors": Figure("source", "tensors", "tensors loaded"),
    "read_bytes": Figure("source", "bytes read", "with gaps and alignment"),
    "cached_bytes": Figure("source", "from page cache", "copied from the page cache"),
    "direct_bytes": Figure("source", "direct I/O", "read past the page cache (O_DIRECT)"),
    "buffered_bytes": Figure("source", "buffered I/O", "read through the page cache"),
    "network_bytes": Figure("source", "from network", "from an object store or HTTP server"),
    "verified_bytes": Figure("source", "verified", "compared with the manifest"),
    "verification_excess_bytes": Figure("source", "read to verify", "read only because blocks are verified whole"),
    "calls": Figure("source", "read calls", "reads or requests made"),
    "throttled": Figure("source", "throttled", "requests answered 429 or 503"),
    "seconds": Figure("time", "load time", "from start to the last byte; opening is not in it"),
    "gb_per_s": Figure("time", "load rate", "tensor bytes in that time"),
    "reading_seconds": Figure("time", "reading", "summed over reader threads"),
    "cached_reading_seconds": Figure("time", "reading page cache", "the part of reading that was copying cached pages"),
    "copying_seconds": Figure("time", "host copies", "summed over reader threads"),
    "device_wait_seconds": Figure("time", "waiting for device", "summed over reader threads"),
    "consumer_wait_seconds": Figure("time", "waiting for memory", "for destinations to read into, summed"),
    "cpu_seconds": Figure("time", "CPU time", "that reader threads had a core, summed"),
    "limited_by": Figure("time", "limited by", "where most of the reader threads' time went"),
    "readers": Figure("threads", "readers", "most reader threads at once"),
    "tried": Figure("threads", "tuning", "reader threads tried, and the rate of each"),
    "blocks": Figure("memory", "blocks", "pieces the work was cut into"),
    "block_bytes": Figure("memory", "block size", "bytes of a block"),
    "staging_bytes": Figure("memory", "staging memory", "most host memory on the way to a device"),
    "pinned": Figure("memory", "pinned", "whether staging memory was registered with the device"),
}


def load(
    paths: list[str],
    names: list[str],
    patterns: list[str],
    device: str,
    framework: str | None,
    *,
    mmap: bool,
    options: penstock.LoadOptions,
    storage_options: Mapping[str, str] | None,
    trust: str | None,
    stats: bool,
    all_stats: bool,
    quiet: bool,
    json: bool,
) -> None:
    """Loads and reports."""
    shown = not (quiet or json) and sys.stderr.isatty()
    framework = framework or default_framework()
    with interrupt_ends_process(as_json=json):
        device = wake(framework, device)
    began = time.perf_counter()
    ckpt = penstock.open(paths, storage_options=storage_options, trust=trust, options=options)
    opened = time.perf_counter()
    names = chosen(ckpt, names, patterns)
    nbytes = sum(ckpt[name].nbytes for name in names)
    with bar(f"loading to {device}", shown=shown, total=nbytes) as report:
        if mmap:
            tensors = ckpt.load(names, device=device, framework=framework, mmap=True, prefault=True)
        else:
            tensors = ckpt.load(names, device=device, framework=framework, progress=report)
    settle(framework, device)
    seconds = time.perf_counter() - began
    figures: dict[str, Any] = {
        "paths": [without_secrets(path) for path in paths],
        "device": device,
        "framework": framework,
        "mmap": mmap,
        "tensors": len(tensors),
        "bytes": nbytes,
        "total_seconds": round(seconds, 6),
        "open_seconds": round(opened - began, 6),
        "total_gb_per_s": round(nbytes / seconds / 1e9, 6),
        "stats": ckpt.stats.as_dict() if ckpt.stats else None,
    }
    if json:
        as_json(figures)
        return
    out = Output()
    out.lines([summary(figures)])
    if not (stats or all_stats):
        return
    if ckpt.stats:
        found = ckpt.stats.as_dict()
        out.print()
        out.print(table(found, every=all_stats, explained=out.width >= NARROW))
        out.print()
        out.lines(filter(None, [ckpt.stats.advice, *(f"note: {printable(str(note))}" for note in found["notes"])]))
    else:
        out.lines(["a mapped load has no further figures: the kernel does the reading"], style="dim")


def chosen(ckpt: penstock.Checkpoint, wanted: list[str], patterns: list[str]) -> list[str]:
    """The names to load, in the order of their bytes.

    Raises:
        TensorNotFoundError: for a name that the checkpoint does not hold.
        SelectionError: when nothing matches: loading nothing is never meant.
    """
    for name in wanted:
        ckpt[name]
    asked = set(wanted)
    keep = matching(patterns)
    names = [name for name in ckpt.offset_keys() if (not asked or name in asked) and keep(name)]
    if not names and patterns:
        raise no_match(patterns, f"of the {len(asked):,} that --names chose" if asked else f"there are {len(ckpt):,}")
    return names


def default_framework() -> str:
    """The framework to load with: torch where it is installed, else numpy, else bytes that any library could take."""
    return next((name for name, package in (("pt", "torch"), ("np", "numpy")) if _installed(package)), "dlpack")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def wake(framework: str, device: str) -> str:
    """Imports the framework and makes its first allocation on the device, which costs a second in itself."""
    from penstock.frameworks.base import framework as find

    library = find(framework)
    where = library.device(device)
    if where != "cpu":
        library.empties(["U8"], [(1,)], where)
    return where


def settle(framework: str, device: str) -> None:
    """Waits for what the device still has to do for the load."""
    if device != "cpu" and framework in {"pt", "torch", "pytorch"}:
        importlib.import_module("torch").cuda.synchronize(device)


class Bar:
    """A progress bar that is shown: a function of (bytes done, bytes in all)."""

    def __init__(self, progress: Progress, description: str, total: int | None) -> None:
        self._progress, self._description = progress, description
        self._task = progress.add_task(description, total=total)

    def __call__(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def files(self, done: int, total: int) -> None:
        """Of how many files how many are complete."""
        self._progress.update(self._task, description=f"{self._description} {done:,}/{plural(total, 'file')}")


@contextmanager
def bar(description: str, *, shown: bool, total: int | None = None) -> Iterator[Bar | None]:
    """A progress bar on stderr, gone when the load is over; None if none is to be shown."""
    if not shown:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as progress:
        yield Bar(progress, description, total)


def summary(figures: dict[str, Any]) -> str:
    """The load in one line."""
    nbytes = figures["bytes"]
    how = "mapped" if figures["mmap"] else f"to {figures['device']}"
    limit = f", limited by {figures['stats']['limited_by']}" if figures["stats"] and nbytes else ""
    total, opening = figures["total_seconds"], figures["open_seconds"]
    times = f"{total:.3f} s ({opening:.3f} s of it to open)"
    return f"{plural(figures['tensors'], 'tensor')}, {size(nbytes)} {how} in {times}: {rate(nbytes, total)}{limit}"


def table(stats: dict[str, Any], *, every: bool, explained: bool = True) -> Table:
    """Figures by group, with what they mean if ``explained``; without ``every``, those that say something.

    Figures that this version of the command does not know are shown all the same.
    """
    made = bare_table()
    made.add_column("figure", no_wrap=True)
    made.add_column("value", justify="right", overflow="fold")
    if explained:
        made.add_column("meaning", style="dim")
    groups = dict.fromkeys(figure.group for figure in FIGURES.values()) | {"other": None}
    for group in groups:
        known = [name for name, figure in FIGURES.items() if figure.group == group and name in stats]
        names = (
            known
            if group != "other"
            else [name for name in stats if name not in FIGURES and name not in {"notes", "advice"}]
        )
        shown = [name for name in names if every or stats[name] not in (0, None, False, [])]
        if shown:
            made.add_row(Text(group, style="bold"))
        for name in shown:
            figure = FIGURES.get(name, Figure("other", name.replace("_", " "), ""))
            cells = [f"  {figure.label}", _figure(name, stats[name]), *([figure.meaning] if explained else [])]
            made.add_row(*map(Text, cells))
    return made


def _figure(name: str, value: object) -> str:  # noqa: PLR0911
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: "not measured"}[value]
    if isinstance(value, int):
        if name.endswith("bytes"):
            return size(value, binary=name in {"block_bytes", "staging_bytes"})
        return f"{value:,}"
    if name == "tried" and isinstance(value, list):
        return ", ".join(f"{readers}: {rate(gb * 1e9, 1)}" for readers, gb in value) or "none"
    if name == "gb_per_s" and isinstance(value, float):
        return rate(value * 1e9, 1)
    if isinstance(value, float):
        return f"{value:.3f} s" if name.endswith("seconds") else f"{value:.3f}"
    return str(value)
