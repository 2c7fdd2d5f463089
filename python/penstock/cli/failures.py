"""How the command ends: a clear block on stderr, JSON where it was asked for, and an exit code for scripts.

``CODES_HELP`` says what each code means. Codes are part of the interface: they are added to, never renumbered. A reader
of stdout that goes away (``| head``) has seen what it wanted: that is code 0, and silence.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from penstock import errors
from penstock.cli.output import as_json as print_json
from penstock.cli.output import printable

# In this order: Penstock's errors derive from the built-in ones, which follow.
CODES: list[tuple[type[BaseException], int]] = [
    (errors.LocationNotFoundError, 3),
    (errors.TensorNotFoundError, 8),
    (errors.FormatError, 4),
    (errors.SignatureError, 10),
    (errors.IntegrityError, 9),
    (errors.LocationAccessError, 5),
    (errors.LocationExistsError, 11),
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

_OUTPUT_FAILURES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""What writing to stdout fails with. Writing elsewhere is the core's, whose errors are of another type."""

CODES_HELP = (
    "Exit codes: 0 success, 1 other failure, 2 wrong usage, 3 no such file or object, 4 malformed file, 5 no access, "
    "6 storage failed or file changed, 7 device or memory, 8 impossible setting or selection (no such tensor), "
    "9 bytes that are not what their manifest says, 10 no signature that is trusted, or files that are not signed, "
    "11 something is there already or is being saved, "
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
        if _is_outputs(error):
            _abandon_stdout()
        sys.stderr.write(block(error, color=_is_colored()))
        sys.exit(code_of(error))


@contextmanager
def usage_as_json() -> Iterator[None]:
    """Reports a wrong command line as ``handled`` reports other failures, for someone who reads JSON."""
    try:
        yield
    except Exception as error:
        # The parser's errors, whose module is typer's business: they know their exit code and their message.
        if not hasattr(error, "exit_code") or not hasattr(error, "format_message"):
            raise
        message = error.format_message()
        failure = {"type": "UsageError", "message": message, "location": None, "tensor": None, "byte_range": None}
        print_json({"error": failure | {"cause": message, "remedy": "penstock --help shows what can be written"}})
        sys.stderr.write(f"{_word('error:', '1;31', color=_is_colored())} {_lines(message)}\n")
        sys.exit(error.exit_code)


@contextmanager
def interrupt_ends_process(*, as_json: bool) -> Iterator[None]:
    """In the block, Ctrl-C ends the process at once, reported as ever, instead of raising KeyboardInterrupt.

    For imports of libraries that lose the exception: torch's initialisation drops one that is raised in a callback.
    Does nothing off the main thread, and where the process does not take SIGINT.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        interrupted = KeyboardInterrupt()
        if as_json:
            print_json({"error": describe(interrupted)})
        sys.stderr.write(block(interrupted, color=_is_colored()))
        sys.stderr.flush()
        os._exit(130)

    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def block(error: BaseException, *, color: bool = False) -> str:
    """``error`` for people: what happened, and what to try."""
    message, remedy = _split(error)
    happened = f"{_word('error:', '1;31', color=color)} {_lines(message)}\n"
    return happened + (f"  {_word('try:', '36', color=color)} {_lines(remedy)}\n" if remedy else "")


def _word(word: str, style: str, *, color: bool) -> str:
    return f"\x1b[{style}m{word}\x1b[0m" if color else word


def _is_colored() -> bool:
    """Whether stderr shows colors: https://no-color.org and FORCE_COLOR, as rich has them for stdout."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}


def _split(error: BaseException) -> tuple[str, str | None]:
    """The message without the remedy it ends with, and the remedy."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", None
    if _is_outputs(error):
        return (
            f"the output could not be written: {getattr(error, 'strerror', error)}",
            "Free space where it is redirected to",
        )
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


def _is_outputs(error: BaseException) -> bool:
    """Whether it was writing to stdout that failed, for want of space."""
    ours = isinstance(error, errors.PenstockError)
    return isinstance(error, OSError) and not ours and error.errno in _OUTPUT_FAILURES


def _lines(text: str) -> str:
    return "\n       ".join(printable(line) for line in text.strip().splitlines())


def _abandon_stdout() -> None:
    """Python flushes stdout at exit and would complain once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
