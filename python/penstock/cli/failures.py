"""How the command ends: a clear block on stderr, JSON where it was asked for, and an exit code for scripts.

``CODES_HELP`` says what each code means. Codes are part of the interface: they are added to, never renumbered. A reader
of stdout that goes away (``| head``) has seen what it wanted: that is code 0, and silence.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from penstock import errors
from penstock.cli.output import as_json as print_json
from penstock.cli.output import printable

# In this order: Penstock's errors derive from the built-in ones, which follow.
CODES: list[tuple[type[BaseException], int]] = [
    (errors.LocationNotFoundError, 3),
    (errors.TensorNotFoundError, 8),
    (errors.FormatError, 4),
    (errors.LocationAccessError, 5),
    (errors.StorageError, 6),
    (errors.LocationChangedError, 6),
    (errors.DeviceError, 7),
    (errors.InsufficientMemoryError, 7),
    (errors.ConfigError, 8),
    (errors.SelectionError, 8),
    (errors.DestinationError, 8),
    (errors.PenstockError, 1),
    (FileNotFoundError, 3),
    (PermissionError, 5),
    (MemoryError, 7),
    (OSError, 6),
    (KeyboardInterrupt, 130),
]

CODES_HELP = (
    "Exit codes: 0 success, 1 other failure, 2 wrong usage, 3 no such file or object, 4 malformed file, 5 no access, "
    "6 storage failed or file changed, 7 device or memory, 8 impossible setting or selection (no such tensor), "
    "130 interrupted."
)


def code_of(error: BaseException) -> int:
    """The exit code for ``error``."""
    # torch's own too, which need not be imported to be known.
    if type(error).__name__ in {"InsufficientMemoryError", "OutOfMemoryError"}:
        return 7
    return next((code for kind, code in CODES if isinstance(error, kind)), 1)


def describe(error: BaseException) -> dict[str, object]:
    """``error`` for JSON; what is not known is null."""
    message, remedy = _split(error)
    return {
        "type": type(error).__name__,
        "code": getattr(error, "code", None) if isinstance(error, errors.PenstockError) else None,
        "message": message,
        "location": getattr(error, "location", None),
        "tensor": getattr(error, "tensor", None),
        "byte_range": getattr(error, "byte_range", None),
        "cause": getattr(error, "cause", message),
        "remedy": remedy,
        "details": getattr(error, "details", {}),
    }


@contextmanager
def handled(*, as_json: bool, debug: bool) -> Iterator[None]:
    """Ends the process as this module promises, whatever the block raises."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon_stdout()
        sys.exit(0)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - whatever it is, people get a sentence
        if debug:
            traceback.print_exc()
        if as_json:
            try:
                print_json({"error": describe(error)})
            except OSError:
                _abandon_stdout()
        if isinstance(error, OSError) and not isinstance(error, errors.PenstockError):
            _abandon_stdout()  # which may be what could not be written to
        shown = Text(block(error))
        shown.highlight_regex(r"^error:", "bold red")
        shown.highlight_regex(r"(?m)^  (?P<cyan>try:)")
        Console(stderr=True).print(shown, end="", soft_wrap=True)
        sys.exit(code_of(error))


def block(error: BaseException) -> str:
    """``error`` for people: what happened, and what to try."""
    message, remedy = _split(error)
    return f"error: {_lines(message)}\n" + (f"  try: {_lines(remedy)}\n" if remedy else "")


def _split(error: BaseException) -> tuple[str, str | None]:
    """The message without the remedy it ends with, and the remedy."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", None
    if not isinstance(error, errors.PenstockError):
        return f"{type(error).__name__}: {error}", "--debug shows where this comes from"
    message, remedy = error.message, error.remedy
    if not remedy or remedy not in message:
        return message, remedy
    if message.endswith(f" ({remedy})"):
        return message.removesuffix(f" ({remedy})"), remedy
    happened = message[: message.rindex(remedy)]
    if happened.endswith(("(", ": ")):
        # Within a sentence, such as "Install it (pip install x), or ...": what to try is all of it.
        happened = happened.rpartition(". ")[0] or happened
    return happened.rstrip(". "), message[len(happened) :].removeprefix(". ")


def _lines(text: str) -> str:
    return "\n       ".join(printable(line) for line in text.strip().splitlines())


def _abandon_stdout() -> None:
    """Python flushes stdout at exit and would complain once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
