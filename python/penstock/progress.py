"""Telling of a load's progress, when asked to: a function of the caller, or tqdm's bar on rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from penstock.errors import MissingDependencyError

ProgressOption = bool | Callable[[int, int], object] | None
"""``True`` for a bar, a function of (bytes done, bytes in all), or None."""


class Progress(Protocol):
    """Someone who is told of progress."""

    def advance(self, nbytes: int) -> None:
        """``nbytes`` more have landed and were taken by the consumer."""

    def close(self) -> None:
        """The load has ended, in whatever way."""


class _Silent:
    def advance(self, nbytes: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Function:
    def __init__(self, function: Callable[[int, int], object], total: int) -> None:
        self._function = function
        self._total = total
        self._done = 0

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        self._function(self._done, self._total)

    def close(self) -> None:
        pass


class _Bar:
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
        self._bar: Any = tqdm(total=total, unit="B", unit_scale=True, desc=description)

    def advance(self, nbytes: int) -> None:
        self._bar.update(nbytes)

    def close(self) -> None:
        self._bar.close()


def teller(option: ProgressOption, total: int, description: str = "Loading weights") -> Progress:
    """Who to tell, for what the caller asked.

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
