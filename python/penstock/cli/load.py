"""``penstock load``: a load for real, with a bar while it runs and figures afterwards."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from fnmatch import fnmatchcase
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

import penstock
from penstock.cli.inspect import Output


def load(
    paths: list[str],
    device: str,
    pattern: str | None,
    framework: str | None,
    config: penstock.Config,
    *,
    mmap: bool,
    stats: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Loads and reports. The seconds include opening: they are what a program would wait for."""
    framework = framework or ("pt" if importlib.util.find_spec("torch") else "np")
    # Importing a framework is not loading.
    __import__({"pt": "torch", "np": "numpy"}.get(framework, "penstock"))
    began = time.perf_counter()
    ckpt = penstock.open(paths, config=config)
    names = [name for name in ckpt.offset_keys() if pattern is None or fnmatchcase(name, pattern)]
    if mmap:
        loaded = ckpt.load(names, device=device, framework=framework, mmap=True, prefault=True)
    else:
        shown = not (quiet or as_json) and sys.stderr.isatty()
        console = Console(stderr=True, quiet=not shown)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
            task = bar.add_task("loading", total=None)
            loaded = ckpt.load(
                names,
                device=device,
                framework=framework,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    seconds = time.perf_counter() - began
    nbytes = sum(ckpt[name].nbytes for name in loaded)
    figures: dict[str, Any] = {
        "tensors": len(loaded),
        "bytes": nbytes,
        "device": device,
        "framework": framework,
        "seconds": round(seconds, 4),
        "gb_per_s": round(nbytes / seconds / 1e9, 3),
        "stats": None if ckpt.stats is None else ckpt.stats.as_dict(),
    }
    if as_json:
        print(json.dumps(figures, indent=1))
        return
    limit = "" if ckpt.stats is None else f", limited by {ckpt.stats.limited_by}"
    print(
        f"{len(loaded):,} tensors, {nbytes / 1e9:.2f} GB to {device} in {seconds:.3f} s: "
        f"{figures['gb_per_s']:.2f} GB/s{limit}"
    )
    if stats and figures["stats"]:
        Output().print(_table(figures["stats"]))


def _table(figures: dict[str, Any]) -> Table:
    made = Table(box=box.SIMPLE, show_header=False, pad_edge=False, show_edge=False)
    made.add_column()
    made.add_column(justify="right")
    for name, value in figures.items():
        shown = (
            f"{value:.4f}" if isinstance(value, float) else "; ".join(value) if isinstance(value, list) else f"{value}"
        )
        made.add_row(name.replace("_", " "), f"{value:,}" if type(value) is int else shown)
    return made
