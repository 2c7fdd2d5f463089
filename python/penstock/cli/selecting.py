"""Which tensors a command is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.errors import SelectionError
from penstock.patterns import matches_any


def matching(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name matches one of the shell patterns; every name does where there is none."""
    return lambda name: not patterns or matches_any(name, patterns)


def no_match(patterns: Sequence[str], of: str) -> SelectionError:
    """No tensor of those that ``of`` speaks of matches one of the patterns."""
    cause = f"no tensor matches {' or '.join(map(repr, patterns))} ({of})"
    remedy = "penstock inspect shows the names; quote patterns, so that the shell leaves them alone"
    return SelectionError(cause=cause, remedy=remedy)
