"""Reports a load's progress, when asked to: a function of the caller, or tqdm's bar on rank 0."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from penstock.errors import MissingDependencyError

ProgressOption = bool | Callable[[int, int], object] | None
"""``True`` for a bar, a function of (bytes done, bytes in all), or None."""


class Progress(Protocol):
    """Someone who is notified of progress."""

    def advance(self, nbytes: int) -> None:
        """``nbytes`` more have landed and were taken by the consumer. 0 when the load begins."""

    def expect(self, total: int) -> None:
        """``total`` bytes are to come in all: sizes of some objects are known only once they are asked for."""

    def close(self) -> None:
        """The load has ended, in whatever way."""


class _Silent:
    def advance(self, nbytes: int) -> None:
        pass

    def expect(self, total: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Function(_Silent):
    def __init__(self, function: Callable[[int, int], object], total: int) -> None:
        self._function = function
        self._done = 0
        self.expect(total)

    def expect(self, total: int) -> None:
        self._total = total

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if nbytes:
            self._function(self._done, self._total)


class _Bar:
    """A bar that is shown when the load begins: a stream that is never iterated has none to close."""

    def __init__(self, total: int, description: str) -> None:
        try:
            from tqdm.auto import tqdm
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                "progress=True needs the package 'tqdm'. Install it (pip install tqdm), or give a function of (bytes "
                "done, bytes in all)",
                cause=str(error),
                remedy="pip install tqdm",
            ) from error
        self._show = partial(tqdm, total=total, unit="B", unit_scale=True, desc=description)
        self._bar: Any = None

    def advance(self, nbytes: int) -> None:
        if self._bar is None:
            self._bar = self._show()
        self._bar.update(nbytes)

    def expect(self, total: int) -> None:
        if self._bar is not None:
            self._bar.total = total

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class SharedProgress(_Silent):
    """One progress for several loads, in whatever threads: it ends when its owner says so, not with one of them."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._progress.advance(nbytes)


def progress_reporter(option: ProgressOption, total: int, description: str = "Loading weights") -> Progress:
    """Who is notified, for what the caller asked.

    A bar is shown by the first process of a job only (``RANK`` unset or 0), and not where
    ``HF_HUB_DISABLE_PROGRESS_BARS`` is set.

    Raises:
        MissingDependencyError: for ``True`` without tqdm.
    """
    if callable(option):
        return _Function(option, total)
    wanted = bool(option) and os.environ.get("RANK", "0") == "0"
    if wanted and os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() not in {"1", "TRUE", "YES", "ON"}:
        return _Bar(total, description)
    return _Silent()
