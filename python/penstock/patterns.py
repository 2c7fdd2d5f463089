"""Names of tensors and files: shell patterns, and the order in which people count. It knows nothing else."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of the shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_wanted(name: str, include: Collection[str] | None, exclude: Iterable[str]) -> bool:
    """Whether a name matches one of ``include``, all do where that is None, and none of ``exclude``."""
    return (include is None or matches_any(name, include)) and not matches_any(name, exclude)


def natural_sort_key(name: str) -> list[tuple[int, int, str]]:
    """A key that puts layer 2 before layer 10: the order of layers, in which libraries ask for tensors."""
    parts = re.split(r"(\d+)", name)
    # Numbers compare by their length, then digit by digit: there is no limit of digits.
    numbers = ((part, part.lstrip("0")) for part in parts if part)
    return [(0, len(number), number) if part.isdecimal() else (1, 0, part) for part, number in numbers]
