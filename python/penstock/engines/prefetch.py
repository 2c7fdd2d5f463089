"""Prefetching a model's files into the page cache while an engine builds the model.

An engine's loader builds the model before it reads weights: seconds in which the disk is idle. By then the engine's
libraries are mapped, so their page faults do not wait behind weights. Prefetching runs in the process that will load,
begins when its loader does, and ends when weights are read, or with the first error.

Promises: nothing is raised from here, and what is logged at INFO has happened. It knows no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.engines.files import locate

if TYPE_CHECKING:
    from penstock._native import Ahead
    from penstock.checkpoint import Checkpoint


class Prefetch:
    """One prefetch of one model: ``begin`` when the model is being built, ``end`` before its weights are read.

    Args:
        log: is told, once it ended, if bytes were brought in; at DEBUG why there is none.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._ahead: Ahead | None = None
        self._storage = ""

    def begin(self, opened: Callable[[], Checkpoint | str]) -> None:
        """Begins, on a thread of its own.

        Args:
            opened: opens the model's files, or says why they are not to be prefetched.
        """
        self.end()
        try:
            checkpoint = opened()
            if isinstance(checkpoint, str):
                self._log.debug("Penstock: no prefetch: %s", checkpoint)
                return
            self._storage = checkpoint.storage
            self._ahead = checkpoint.read_ahead()
        except Exception as error:  # noqa: BLE001 - the load will say what is wrong
            self._log.debug("Penstock: no prefetch: %s", error)

    def end(self) -> None:
        """Ends it, and waits for at most the requests that are under way. May be called at any time."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        ahead.stop()
        if ahead.bytes:
            gb = ahead.bytes / 1e9
            self._log.info("Penstock: %.2f GB prefetched from %s while the model was being built", gb, self._storage)
        else:
            self._log.debug("Penstock: nothing was prefetched from %s", self._storage)


def local_directory(model: str, revision: str | None, cache_dir: str | None) -> str:
    """The directory of a model that is on this machine already.

    Raises:
        ObjectNotFoundError: it is not.
    """
    return locate(model, revision=revision, cache_dir=cache_dir, local_files_only=True).local
