"""Loads that run beside the thread that works on what others of them have read, and end when that does.

It knows no ranks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from penstock.errors import LoadCancelledError
from penstock.frameworks.streams import as_here
from penstock.loading import Load
from penstock.recording.lazy import unwatched

T = TypeVar("T")


class BackgroundLoads:
    """Loads in threads of their own, as the thread that asks would do them, all of which can be stopped."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="penstock-sharing")
        self._lock = threading.Lock()
        # Those that have ended need not be kept for this.
        self._loads: weakref.WeakSet[Load] = weakref.WeakSet()
        self._stopped = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        def unseen() -> T:
            # Not watched: whoever asked may hold the recorder's lock, and waits for this.
            with unwatched():
                return work()

        return self._pool.submit(as_here(unseen))

    def begun(self, load: Load) -> None:
        """A load has been made, and has not begun."""
        with self._lock:
            if self._stopped:
                raise LoadCancelledError("the load was stopped")
            self._loads.add(load)

    def __enter__(self) -> BackgroundLoads:  # noqa: PYI034 - Self is newer than Python 3.10
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            with self._lock:
                self._stopped = True
            for load in list(self._loads):
                load.cancel()
        self._pool.shutdown(wait=True)
