"""``penstock load``: a load for real, with a bar while it runs and figures afterwards.

What is timed is what a program waits for: opening the checkpoint and loading it. Importing the framework and waking the
device come first and are not counted. The tensors are held until the end, as a program would hold them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

import penstock
from penstock.cli.output import Output, as_json, bare_table, plural, printable, size
from penstock.cli.selecting import matching
from penstock.errors import SelectionError

if TYPE_CHECKING:
    from rich.table import Table

Report = Callable[[int, int], object]

MEANINGS = {
    "bytes": "of the tensors",
    "read_bytes": "read, gaps and alignment included",
    "cached_bytes": "of those, from the page cache",
    "direct_bytes": "of those, from the device, past the page cache",
    "buffered_bytes": "of those, from the device, through the page cache",
    "network_bytes": "of those, from an object store or HTTP server",
    "calls": "reads asked of the storage",
    "push_backs": "of those, answered with 'too fast' by an object store",
    "tensors": "loaded",
    "blocks": "pieces the work was cut into",
    "readers": "threads that read, at most at once",
    "first_readers": "of those, at the beginning",
    "cores_share": "of their time, at work on a core or waiting for one",
    "tried": "numbers of readers, and the rate of each",
    "block_bytes": "bytes of a piece",
    "staging_bytes": "most host memory on the way to a device",
    "storage": "what most of the bytes lie on",
    "pinned": "whether that memory was registered with the device",
    "seconds": "from start to the last byte",
    "gb_per_s": "1e9 bytes a second",
    "reading_seconds": "of the readers' time: reading",
    "cached_reading_seconds": "of that: copying from the page cache",
    "copying_seconds": "of the readers' time: copying in host memory",
    "device_wait_seconds": "of the readers' time: waiting for the device",
    "consumer_wait_seconds": "of the readers' time: waiting for memory to fill",
    "limited_by": "where most of the readers' time went",
}
"""What the figures of ``LoadStats`` say, in a few words each."""


class Wish(NamedTuple):
    """What to load, and how."""

    paths: list[str]
    names: list[str]
    patterns: list[str]
    device: str
    framework: str | None
    mmap: bool
    config: penstock.Config


def load(wish: Wish, *, stats: bool, quiet: bool, json: bool) -> None:
    """Loads and reports."""
    shown = not (quiet or json) and sys.stderr.isatty()
    framework = wish.framework or default_framework()
    device = wake(framework, wish.device)
    began = time.perf_counter()
    ckpt = penstock.open(wish.paths, config=wish.config)
    opened = time.perf_counter()
    names = chosen(ckpt, wish)
    with bar(f"loading to {device}", shown=shown) as report:
        if wish.mmap:
            tensors = ckpt.load(names, device=device, framework=framework, mmap=True, prefault=True)
        else:
            tensors = ckpt.load(names, device=device, framework=framework, progress=report)
    settle(framework, device)
    seconds = time.perf_counter() - began
    nbytes = sum(ckpt[name].nbytes for name in tensors)
    figures: dict[str, Any] = {
        "paths": wish.paths,
        "device": device,
        "framework": framework,
        "mmap": wish.mmap,
        "tensors": len(tensors),
        "bytes": nbytes,
        "seconds": round(seconds, 6),
        "open_seconds": round(opened - began, 6),
        "gb_per_s": round(nbytes / seconds / 1e9, 6),
        "stats": ckpt.stats.as_dict() if ckpt.stats else None,
    }
    if json:
        as_json(figures)
        return
    out = Output()
    out.lines([summary(figures)])
    if stats and ckpt.stats:
        out.print()
        out.print(table(ckpt.stats.as_dict()))
    elif stats:
        out.lines(["a mapped load has no further figures: the kernel does the reading"], style="dim")


def chosen(ckpt: penstock.Checkpoint, wish: Wish) -> list[str]:
    """The names to load, in the order of their bytes.

    Raises:
        TensorNotFoundError: for a name that the checkpoint does not hold.
        SelectionError: when nothing matches: loading nothing is never meant.
    """
    for name in wish.names:
        ckpt[name]
    asked = set(wish.names)
    keep = matching(wish.patterns)
    names = [name for name in ckpt.offset_keys() if (not asked or name in asked) and keep(name)]
    if not names and wish.patterns:
        patterns = " or ".join(map(repr, wish.patterns))
        raise SelectionError(
            f"no tensor matches {patterns} (there are {len(ckpt):,})",
            remedy="penstock inspect shows the names; quote patterns, so that the shell leaves them alone",
        )
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


@contextmanager
def bar(description: str, *, shown: bool) -> Iterator[Report | None]:
    """A progress bar on stderr, gone when the load is over; what it is told of is a function of (done, total)."""
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
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def summary(figures: dict[str, Any]) -> str:
    """The load in one line."""
    seconds, nbytes = figures["seconds"], figures["bytes"]
    how = "mapped" if figures["mmap"] else f"to {figures['device']}"
    limit = f", limited by {figures['stats']['limited_by']}" if figures["stats"] and nbytes else ""
    rate = figures["gb_per_s"]
    speed = f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}" if rate >= 0.1 else f"{rate:.2g}"  # noqa: PLR2004
    return f"{plural(figures['tensors'], 'tensor')}, {size(nbytes)} {how} in {seconds:.3f} s: {speed} GB/s{limit}"


def table(stats: dict[str, Any]) -> Table:
    """Every figure with what it says. Figures that this version of the command does not know are shown all the same."""
    made = bare_table()
    made.add_column("figure", no_wrap=True)
    made.add_column("value", justify="right")
    made.add_column("meaning", style="dim")
    for name, value in stats.items():
        if name == "notes" and isinstance(value, list):
            for note in value:
                made.add_row("note", "", Text(printable(str(note))))
            continue
        made.add_row(Text(name.replace("_", " ")), Text(_figure(name, value)), Text(MEANINGS.get(name, "")))
    return made


def _figure(name: str, value: object) -> str:
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: "not looked at"}[value]
    if isinstance(value, int):
        if name.endswith("bytes"):
            return size(value, binary=name in {"block_bytes", "staging_bytes"})
        return f"{value:,}"
    if name == "tried" and isinstance(value, list):
        return ", ".join(f"{readers}: {rate:.2f} GB/s" for readers, rate in value) or "nothing"
    if isinstance(value, float):
        return f"{value:.3f} s" if name.endswith("seconds") else f"{value:.3f}"
    return str(value)
