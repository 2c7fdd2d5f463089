"""``penstock manifest``: makes one, and says what is in it."""

from __future__ import annotations

import penstock
from penstock.cli.output import Output, as_json, plural, printable
from penstock.units import rate, size


def manifest(directory: str, *, verbose: bool, json: bool) -> None:
    """Makes and reports."""
    made = penstock.manifest(directory)
    if json:
        as_json(
            {
                "path": str(made.path),
                "files": [file._asdict() for file in made.files],
                "bytes": made.nbytes,
                "seconds": round(made.seconds, 6),
            }
        )
        return
    each = (f"{file.blake3}  {size(file.nbytes):>8}  {file.path}" for file in made.files if verbose)
    speed = rate(made.nbytes, made.seconds)
    done = f"{plural(len(made.files), 'file')}, {size(made.nbytes)} hashed in {made.seconds:.3f} s, {speed}"
    Output().lines(map(printable, [*each, f"{done}: {made.path}"]))
