"""Threads of a pool that fetch masters and copy them to the device, most urgent first.

A queue each, so that one component is copied while the next one is fetched. Knows nothing of budgets or models: what
is to be done is a function of the pool. Threads start with the first task and end with ``close``.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Any


class Worker:
    """A thread that does tasks by priority; of equal ones, the first that came."""

    def __init__(self, name: str, work: Callable[[Any], None]) -> None:
        self._name, self._work = name, work
        self._tasks: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, task: Any, priority: float = 0) -> None:
        """Has ``task`` done after those of a higher priority. ``work`` must raise nothing."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._tasks, (-priority, next(self._numbers), task))
            if self._thread is None:
                # A daemon: a pool that nobody closed does not keep the interpreter from its end.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Drops the tasks that have not begun, and waits for the one that has."""
        with self._changed:
            self._closed = True
            self._tasks.clear()
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._tasks and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                _, _, task = heapq.heappop(self._tasks)
            self._work(task)
