"""How the command ends: one clear block on stderr, JSON where asked for, and an exit code that scripts can use.

===== ==========================================================
code  meaning
===== ==========================================================
0     all went well
1     anything not listed here
2     the command line is wrong
3     a file, directory or tensor is not there
4     a file is malformed
5     a file may not be read
6     the storage failed, or a file changed while it was read
7     the device failed or is not there, or memory ran out
8     a setting or a selection is impossible
130   interrupted (Ctrl-C)
===== ==========================================================
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from penstock import errors

CODES: list[tuple[type[errors.PenstockError], int]] = [
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
]


def code_of(error: errors.PenstockError) -> int:
    """The exit code for ``error``."""
    return next((code for kind, code in CODES if isinstance(error, kind)), 1)


def describe(error: errors.PenstockError) -> dict[str, object]:
    """``error`` for JSON."""
    return {
        "type": type(error).__name__,
        "message": error.message,
        "object": error.object,
        "tensor": error.tensor,
        "byte_range": error.byte_range,
        "cause": error.cause,
        "remedy": error.remedy,
    }


@contextmanager
def handled(*, as_json: bool, debug: bool) -> Iterator[None]:
    """Turns errors into messages and exit codes; with ``debug``, lets them through."""
    try:
        yield
        sys.stdout.flush()
    except errors.PenstockError as error:
        if debug:
            raise
        if as_json:
            print(json.dumps({"error": describe(error)}, indent=1))
        remedy = error.remedy or ""
        message = error.message.removesuffix(remedy).rstrip(". ") if remedy else error.message
        sys.stderr.write(f"error: {message}\n" + (f"  try: {remedy}\n" if remedy else ""))
        sys.exit(code_of(error))
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain once more while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
