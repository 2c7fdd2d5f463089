"""Threads of a pool that fetch masters and copy them to the device, most urgent first.

A queue each, so that one component is copied while the next one is fetched. Knows nothing of budgets or models: what
is to be done is a function of the pool. Threads start with the first task and end with ``stop``.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class Worker:
    """A thread that does tasks by priority; of equal ones, the first that came."""

    def __init__(self, name: str, work: Callable[[Any], None]) -> None:
        self._name, self._work = name, work
        self._tasks: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def submit(self, task: Any, priority: float = 0) -> None:
        """Has ``task`` done after those of a higher priority. A task may come twice; ``work`` must raise nothing."""
        with self._changed:
            if self._stopped:
                return
            heapq.heappush(self._tasks, (-priority, next(self._numbers), task))
            if self._thread is None:
                # A daemon: a pool that nobody closed does not keep the interpreter from its end.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop(self) -> None:
        """Has the thread end after the task that it is at, without waiting for it. May be called by a finalizer."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def left(self) -> list[Any]:
        """The tasks that were not begun, once the thread has ended."""
        return [task for _, _, task in self._tasks]

    def join(self) -> None:
        """Waits until the thread has ended, unless it is the calling one."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._tasks and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                _, _, task = heapq.heappop(self._tasks)
            try:
                self._work(task)
            except BaseException:
                # Whoever waits for this task would wait for ever for those behind it as well.
                logger.exception("a task of %s failed", self._name)
            del task
