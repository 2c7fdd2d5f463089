"""Files of ``/proc`` and ``/sys`` below a root that the caller gives: the machine's own, or a recorded tree.

What is missing or forbidden is None or empty: containers hide much. Nothing here raises, and nothing is written.
"""

from __future__ import annotations

import os
from pathlib import Path


class Tree:
    """A root and what is read below it."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def text(self, path: str) -> str | None:
        """The stripped text of a file."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    def lines(self, path: str) -> list[str]:
        """The lines of a file."""
        return (self.text(path) or "").splitlines()

    def number(self, path: str) -> int | None:
        """A file that holds one whole number."""
        return whole(self.text(path))

    def names(self, path: str) -> list[str]:
        """The sorted names in a directory."""
        try:
            return sorted(os.listdir(self.root / path))  # noqa: PTH208 - names only
        except OSError:
            return []

    def fields(self, path: str) -> dict[str, str]:
        """A file of lines such as ``Name: value``."""
        parted = (line.partition(":") for line in self.lines(path))
        return {name.strip(): value.strip() for name, colon, value in parted if colon}

    def kib(self, path: str, field: str) -> int | None:
        """A field in kB, in bytes."""
        number = whole(self.fields(path).get(field, "").removesuffix("kB").strip())
        return None if number is None else number * 1024


def whole(text: str | None) -> int | None:
    """A whole number, or None for what is none."""
    try:
        return int(text or "")
    except ValueError:
        return None


def of_list(text: str) -> frozenset[int]:
    """The numbers of a list as the kernel writes it: ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        start, end = whole(first), whole(last or first)
        if start is not None and end is not None:
            found.update(range(start, end + 1))
    return frozenset(found)
