"""Threads of a pool that fetch masters and copy them to the device, most urgent first.

A queue each, so that one component is copied while the next one is fetched. Knows nothing of budgets or models: what
is to be done is a function of the pool. Threads start with ``begin`` and end with ``stop``.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

from penstock.errors import PoolError
from penstock.pool.lock import deferred

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

    def begin(self) -> None:
        """Starts the thread, if it has not been started: before anything counts on it.

        Raises:
            PoolError: where the system has no more threads, or the interpreter ends.
        """
        with deferred(), self._changed:
            if self._thread is not None or self._stopped:
                return
            # A daemon: a pool that nobody closed does not keep the interpreter from its end.
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                cause = f"a thread of the pool could not be started: {error}"
                raise PoolError(cause=cause, remedy="Raise the limit of threads (ulimit -u, pids.max)") from error
            self._thread = thread

    def submit(self, task: Any, priority: float = 0) -> None:
        """Has ``task`` done after those of a higher priority. A task may come twice; ``work`` must raise nothing."""
        with self._changed:
            if not self._stopped:
                heapq.heappush(self._tasks, (-priority, next(self._numbers), task))
                self._changed.notify()

    def stop(self) -> None:
        """Has the thread end after the task that it is at, without waiting for it. May be called by a finalizer."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def left(self) -> list[Any]:
        """The tasks that were not begun, once the thread has ended. Each is given once."""
        with self._changed:
            tasks, self._tasks = self._tasks, []
        return [task for _, _, task in tasks]

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
