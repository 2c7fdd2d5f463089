"""``penstock run`` without typer, whose import would be a fifth of a second of every start.

Takes what is written plainly. Whatever else there is, help and mistakes included, is left to the application, which
has the same options (``starting``); a test compares them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.units import size_meant

_VALUES = {"--profile": "profile", "--start-cache": "start_cache", "--start-cache-bytes": "start_cache_bytes"}


@dataclass
class Plain:
    """What a plainly written ``penstock run`` asks for."""

    command: list[str]
    profile: str | None = None
    with_weights: bool = True
    start_cache: str | None = None
    start_cache_bytes: int | None = None


def plain(arguments: Sequence[str]) -> Plain | None:
    """What the arguments behind ``run`` ask for, or None where the application has to see them."""
    if "--" not in arguments:
        return None
    at = arguments.index("--")
    found = Plain(list(arguments[at + 1 :]))
    words = iter(arguments[:at])
    for word in words:
        name, equals, value = word.partition("=")
        if word == "--no-weights":
            found.with_weights = False
            continue
        given = value if equals else next(words, None)
        if name not in _VALUES or given is None or (not equals and given.startswith("-")):
            return None
        meant = size_meant(given) if name == "--start-cache-bytes" else given
        if meant is None:
            return None
        setattr(found, _VALUES[name], meant)
    return found if found.command else None


def run(arguments: Sequence[str]) -> None:
    """Becomes the command, or ends where it cannot be started; returns where the application has to see to it."""
    asked = plain(arguments)
    if asked is None:
        return
    from penstock.cli.start_run import run as become

    status = become(
        asked.command,
        asked.profile,
        with_weights=asked.with_weights,
        start_cache=asked.start_cache,
        start_cache_bytes=asked.start_cache_bytes,
    )
    sys.exit(status)
