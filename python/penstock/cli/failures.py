"""How the command ends: a clear block on stderr, JSON where it was asked for, and an exit code for scripts.

===== ===========================================================
code  meaning
===== ===========================================================
0     all went well
1     anything not listed here, a missing package among them
2     the command line is wrong
3     a file, a directory or a tensor is not there
4     a file is malformed
5     a file may not be read
6     the storage failed, or a file changed while it was read
7     a device failed or is not there, or memory ran out
8     a setting or a selection is impossible
130   interrupted (Ctrl-C)
===== ===========================================================

Codes are part of the interface: they are added to, never renumbered. A reader of stdout that goes away (``| head``) has
seen what it wanted: that is code 0, and silence.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from penstock import errors
from penstock.cli.output import as_json as print_json
from penstock.cli.output import printable

# In this order: Penstock's errors derive from the built-in ones, which follow.
CODES: list[tuple[type[BaseException], int]] = [
    (errors.ObjectNotFoundError, 3),
    (errors.TensorNotFoundError, 3),
    (errors.FormatError, 4),
    (errors.ObjectAccessError, 5),
    (errors.StorageError, 6),
    (errors.ObjectChangedError, 6),
    (errors.DeviceError, 7),
    (errors.OutOfMemoryError, 7),
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
    "Exit codes: 0 success, 1 other failure, 2 wrong usage, 3 not found, 4 malformed file, 5 no access, "
    "6 storage failed or file changed, 7 device or memory, 8 impossible setting or selection, 130 interrupted."
)


def code_of(error: BaseException) -> int:
    """The exit code for ``error``."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's own, too, which need not be imported to be known
        return 7
    return next((code for kind, code in CODES if isinstance(error, kind)), 1)


def describe(error: BaseException) -> dict[str, object]:
    """``error`` for JSON; what is not known is null."""
    message, remedy = _split(error)
    return {
        "type": type(error).__name__,
        "code": getattr(error, "code", None) if isinstance(error, errors.PenstockError) else None,
        "message": message,
        "object": getattr(error, "object", None),
        "tensor": getattr(error, "tensor", None),
        "byte_range": getattr(error, "byte_range", None),
        "cause": getattr(error, "cause", message),
        "remedy": remedy,
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
            except BrokenPipeError:
                _abandon_stdout()
        sys.stderr.write(block(error))
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
    if remedy and remedy in message:
        begin = message.rindex(remedy)
        message, remedy = message[:begin].rstrip(". "), message[begin:]
    return message, remedy


def _lines(text: str) -> str:
    return "\n       ".join(printable(line) for line in text.strip().splitlines())


def _abandon_stdout() -> None:
    """Python flushes stdout at exit and would complain once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
