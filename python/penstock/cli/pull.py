"""``penstock pull``: remote objects copied to a directory, with a bar meanwhile and a line for what was done."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial

import penstock
from penstock._native import shown as without_secrets
from penstock.cli.load import bar
from penstock.cli.output import Output, as_json, plural, printable
from penstock.pulling import preview_entries, pull_entries, source_and_wanted
from penstock.units import rate, size


def pull(
    url: str,
    directory: str,
    *,
    include: list[str] | None,
    exclude: list[str],
    storage_options: Mapping[str, str] | None,
    options: penstock.LoadOptions,
    dry_run: bool,
    verbose: bool,
    quiet: bool,
    json: bool,
) -> None:
    """Pulls and reports."""
    shown = not (quiet or json) and sys.stderr.isatty()
    find = partial(source_and_wanted, url, include, exclude, storage_options, called="--include and --exclude")
    if dry_run:
        pulled = preview_entries(*find(), directory)
    else:
        with bar("pulling", shown=shown) as report:
            source, wanted = find()
            files_done = report.files if report else None
            pulled = pull_entries(source, wanted, directory, progress=report, files_done=files_done, options=options)
    if json:
        as_json(
            {
                "url": without_secrets(url),
                "dry_run": dry_run,
                "directory": str(pulled.directory),
                "files": [file._asdict() for file in pulled.files],
                "bytes": pulled.nbytes,
                "fetched_bytes": pulled.fetched_bytes,
                "seconds": round(pulled.seconds, 6),
            }
        )
        return
    listed = (each(file, dry_run=dry_run) for file in pulled.files if verbose or dry_run)
    last = plan(pulled) if dry_run else summary(pulled)
    Output().lines(map(printable, [*listed, last]))


_WOULD = {"pulled": "fetch", "resumed": "resume", "kept": "keep"}


def each(file: penstock.PulledFile, *, dry_run: bool = False) -> str:
    """One file in a line: how it came to be there, or would, its size, its path."""
    return f"{_WOULD[file.how] if dry_run else file.how:7}  {size(file.nbytes):>8}  {file.path}"


def plan(pulled: penstock.Pulled) -> str:
    """What a pull would do, in one line."""
    missing = [file for file in pulled.files if file.how != "kept"]
    line = f"{plural(len(pulled.files), 'file')}, {size(pulled.nbytes)}: {len(missing):,} to fetch"
    if missing:
        at_most = "at most " if any(file.how == "resumed" for file in missing) else ""
        line += f", {at_most}{size(sum(file.nbytes for file in missing))}"
    return f"{line} (dry run: nothing was fetched)"


def summary(pulled: penstock.Pulled) -> str:
    """The pull in one line."""
    ways = Counter(file.how for file in pulled.files)
    seconds = pulled.seconds
    line = f"{plural(len(pulled.files), 'file')}, {size(pulled.nbytes)} in {pulled.directory}"
    if pulled.fetched_bytes:
        speed = rate(pulled.fetched_bytes, seconds)
        line += f": {size(pulled.fetched_bytes)} fetched in {seconds:.3f} s, {speed}"
    if ways["kept"]:
        line += f", {ways['kept']:,} already there"
    if ways["resumed"]:
        line += f", {ways['resumed']:,} resumed"
    return line
