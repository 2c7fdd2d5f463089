"""``penstock pull``: remote objects copied to a directory, with a bar meanwhile and a line for what was done."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping

import penstock
from penstock._native import shown as without_secrets
from penstock.cli.load import bar
from penstock.cli.output import Output, as_json, plural, printable
from penstock.units import rate, size


def pull(
    url: str,
    directory: str,
    *,
    include: list[str] | None,
    exclude: list[str],
    storage_options: Mapping[str, str] | None,
    options: penstock.LoadOptions,
    verbose: bool,
    quiet: bool,
    json: bool,
) -> None:
    """Pulls and reports."""
    shown = not (quiet or json) and sys.stderr.isatty()
    with bar("pulling", shown=shown) as report:
        pulled = penstock.pull(
            url,
            directory,
            allow_patterns=include,
            ignore_patterns=exclude,
            progress=report,
            storage_options=storage_options,
            options=options,
        )
    if json:
        as_json(
            {
                "url": without_secrets(url),
                "directory": str(pulled.directory),
                "files": [file._asdict() for file in pulled.files],
                "bytes": pulled.nbytes,
                "fetched_bytes": pulled.fetched_bytes,
                "seconds": round(pulled.seconds, 6),
            }
        )
        return
    listed = map(each, pulled.files) if verbose else ()
    Output().lines(map(printable, [*listed, summary(pulled)]))


def each(file: penstock.PulledFile) -> str:
    """One file in a line: how it came to be there, its size, its path."""
    return f"{file.how:7}  {size(file.nbytes):>8}  {file.path}"


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
