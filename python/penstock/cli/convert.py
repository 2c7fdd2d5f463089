"""``penstock convert``: pickled weights to safetensors, with a bar meanwhile and a line for what was done."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import penstock
from penstock.cli.load import bar
from penstock.cli.output import Output, as_json, plural, printable
from penstock.saving.writing import SHARD_BYTES
from penstock.units import rate, size


def convert(
    source: str,
    location: str,
    *,
    shard_bytes: int | None,
    manifest: bool,
    overwrite: bool,
    storage_options: Mapping[str, str] | None,
    verbose: bool,
    quiet: bool,
    json: bool,
) -> None:
    """Converts and reports."""
    shown = not (quiet or json) and sys.stderr.isatty()
    with bar("converting", shown=shown) as report:
        saved = penstock.convert(
            source,
            location,
            shard_bytes=SHARD_BYTES if shard_bytes is None else shard_bytes,
            manifest=manifest,
            overwrite=overwrite,
            progress=report,
            storage_options=storage_options,
        )
    if json:
        as_json(
            {
                "location": saved.location,
                "files": [file._asdict() for file in saved.files],
                "bytes": saved.nbytes,
                "seconds": round(saved.seconds, 6),
                "notes": saved.notes,
            }
        )
        return
    each = (f"{size(file.nbytes):>8}  {file.path}" for file in saved.files if verbose)
    speed = rate(saved.nbytes, saved.seconds)
    done = f"{plural(len(saved.files), 'file')}, {size(saved.nbytes)} saved in {saved.seconds:.3f} s, {speed}"
    Output().lines(map(printable, [*each, f"{done}: {saved.location}"]))
