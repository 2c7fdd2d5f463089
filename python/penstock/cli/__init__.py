"""The ``penstock`` command: what a checkpoint holds, how fast it loads here, and bringing it here.

* ``main``: the entry point. ``--version`` and a plain ``run`` (``quick_run``) need neither typer nor rich; all else
  says what is missing.
* ``app``, ``bench_commands``: commands and their options. ``inspect``, ``load``, ``pull``, ``doctor``, ``bench``: what
  they do.
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
    if sys.argv[1:] == ["--version"]:
        from penstock import __version__

        sys.stdout.write(f"penstock {__version__}\n")
        return
    try:
        if sys.argv[1:2] == ["run"]:
            from penstock.cli.quick_run import run

            run(sys.argv[2:])
        app = _app()
        # What stands behind `--` is another program's.
        own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
        if "--json" in own:
            from penstock.cli.failures import usage_as_json

            with usage_as_json():
                app(prog_name="penstock", standalone_mode=False)
        else:
            app(prog_name="penstock")
    except KeyboardInterrupt:  # before a command began; afterwards it is the command's
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)


def _app() -> typer.Typer:
    try:
        from penstock.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in {"typer", "rich", "click"}:
            raise
        sys.stderr.write(f"error: the penstock command needs the package {package!r}: pip install typer rich\n")
        sys.exit(1)
    return app
