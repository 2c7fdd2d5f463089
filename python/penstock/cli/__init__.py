"""The ``penstock`` command.

* ``main``: the entry point, which says in one sentence what is missing where typer or rich are not installed.
* ``app``: options and commands. ``inspect``, ``load``: what the commands do. ``failures``: errors and exit codes.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command; the exit codes are those of ``penstock.cli.failures``."""
    try:
        from penstock.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich", "click"}:
            raise
        sys.stderr.write(f"error: the command needs the package {error.name!r}: pip install 'penstock[cli]'\n")
        sys.exit(1)
    run()
