"""Which tensors a command is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase


def matching(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name matches one of the shell patterns; every name does where there is none."""
    return lambda name: not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
