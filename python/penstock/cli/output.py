"""How the command writes: sizes, shapes, names, tables, JSON.

Names and metadata come from files that anyone may have made, so nothing of them reaches a terminal that is not
printable: an escape sequence is shown, not obeyed. Where stdout is no terminal, lines are as long as they need to be,
so that ``grep`` finds whole names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

UNBOUNDED = 100_000
"""The width of what is no terminal."""
NARROW = 60
"""The columns of a terminal below which tables show only what matters most."""


class Output(Console):
    """stdout, or another stream.

    Raises:
        BrokenPipeError: when whoever reads has gone away; rich alone would exit with 1.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        loose = not (stream or sys.stdout).isatty() and "COLUMNS" not in os.environ
        width = UNBOUNDED if loose else None
        super().__init__(file=stream, highlight=False, markup=False, emoji=False, width=width)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def lines(self, lines: Iterable[str], style: str = "") -> None:
        """Prints lines as they are: nothing in them is markup."""
        for line in lines:
            self.print(Text(line, style=style))


def as_json(value: Any) -> None:
    """Prints ``value`` on stdout, in ASCII: names that are no valid Unicode stay what they are."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
    sys.stdout.flush()


def printable(text: str) -> str:
    """``text`` with what is not printable, or not in stdout's encoding, written as escapes."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def shortened(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters, without its middle if need be: both ends tell names apart."""
    mark = glyph("…", "~")
    if len(text) <= width:
        return text
    tail = max(width - len(mark), 0) * 2 // 3
    return text[: max(width - len(mark) - tail, 0)] + mark + text[len(text) - tail :]


def glyph(wanted: str, plain: str) -> str:
    """``wanted`` where stdout can show it, else ``plain``."""
    return wanted if printable(wanted) == wanted else plain


def count(number: int) -> str:
    """``number`` in three or more digits: ``8.03 B``."""
    for power, unit in ((12, "T"), (9, "B"), (6, "M")):
        if number >= 10**power:
            return f"{number / 10**power:.2f} {unit}"
    return f"{number:,}"


def plural(number: int, noun: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shape(dimensions: Sequence[int]) -> str:
    """Its dimensions with a sign between them; ``scalar`` for none."""
    return glyph("×", "x").join(map(str, dimensions)) if dimensions else "scalar"


def bare_table() -> Table:
    """A table without frames: what one copies from a terminal is text."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", padding=(0, 1))
