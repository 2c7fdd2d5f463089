"""The ``penstock`` command: what a checkpoint holds, how fast it loads here, and bringing it here.

* ``main``: the entry point. Without typer and rich it says, in one sentence, how to get them.
* ``app``: commands and their options. ``inspect``, ``load``, ``pull``: what the commands do.
* ``failures``: errors and exit codes. ``output``: how figures, names and tables are written.

What people read goes to stdout, what goes wrong and the progress bar to stderr; with ``--json``, stdout holds one JSON
document and nothing else. Importing this package imports neither typer nor a framework.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def main() -> None:
    """Runs the command line. Exit codes are those of ``penstock.cli.failures``."""
    try:
        _app()(prog_name="penstock")
    except KeyboardInterrupt:  # before a command began; afterwards it is the command's
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)


def _app() -> typer.Typer:
    try:
        from penstock.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"typer", "rich", "click"}:
            raise
        sys.stderr.write(f"error: the penstock command needs the package {error.name!r}: pip install 'penstock[cli]'\n")
        sys.exit(1)
    return app
