"""``penstock run`` and ``penstock warm``. Importing this imports neither typer nor rich: a start waits for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from penstock.errors import ConfigError
from penstock.start import run as runs
from penstock.start.prefetch import bring


def run(
    command: Sequence[str],
    profile: str | None,
    *,
    with_weights: bool,
    start_cache: str | None,
    start_cache_bytes: int | None,
) -> int:
    """Becomes the command. Returns an exit code only where it cannot be started."""
    try:
        runs.run(
            command,
            profile,
            with_weights=with_weights,
            start_cache=start_cache,
            start_cache_bytes=runs.START_CACHE_BYTES if start_cache_bytes is None else start_cache_bytes,
        )
    except OSError as error:
        from penstock.cli.output import printable

        sys.stderr.write(f"error: {printable(command[0])} cannot be started: {os.strerror(error.errno or 0)}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126  # as a shell has them
    return 0


def warm(command: Sequence[str], profile: str | None, *, with_weights: bool, json: bool) -> None:
    """Brings in what a start reads. What cannot be brought in is said, and is no error: the start will read it.

    Raises:
        ConfigError: where neither a profile nor a command is given.
    """
    if profile is None and not command:
        raise ConfigError(cause="nothing says what is to be brought in", remedy="Give --profile FILE or -- COMMAND")
    wanted, why = runs.wanted_by(command, profile, with_weights=with_weights, with_libraries=True)
    done = bring(wanted, lambda: None)
    if json:
        from penstock.cli.output import as_json

        as_json({"bytes": done.nbytes, **{k: v for k, v in asdict(done).items() if k not in {"nbytes", "why"}},
                 "stopped": done.why, "profile_not_used": why})  # fmt: skip
        return
    if why is not None:
        runs.say(why)
    sys.stdout.write(runs.summary(done) + "\n")
