"""Loads that run side by side, such as those of a pipeline's components: one progress, and one end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING

from penstock.errors import LoadCancelledError
from penstock.frameworks.streams import as_here
from penstock.progress import Progress, ProgressOption, progress_reporter

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint


class Together:
    """Loads that run side by side, and end together if one of them fails."""

    def __init__(self, progress: ProgressOption) -> None:
        self._option = progress
        self._bytes = 0
        self._work: list[tuple[Callable[[], None], Future[None]]] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._pool: ThreadPoolExecutor | None = None

    def expect(self, checkpoint: Checkpoint) -> None:
        """That much will be read."""
        self._bytes += checkpoint.nbytes

    def also(self, work: Callable[[], None]) -> Future[None]:
        """Has something done by ``run``."""
        done: Future[None] = Future()
        self._work.append((work, done))
        return done

    def run(self) -> None:
        """Begins everything. Returns at once."""
        self._progress = progress_reporter(self._option, self._bytes)
        self._pool = ThreadPoolExecutor(max(1, len(self._work)), thread_name_prefix="penstock-component")
        for work, done in self._work:
            self._pool.submit(self._do, as_here(work), done)

    def _do(self, work: Callable[[], None], done: Future[None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by who waits for it
            self._stop.set()
            done.set_exception(error)
        else:
            done.set_result(None)

    def share(self) -> Callable[[int, int], None]:
        """What one load reports of its progress; also where it learns that another has failed."""
        before = 0

        def report(done: int, _: int) -> None:
            nonlocal before
            if self._stop.is_set():
                raise LoadCancelledError("another component of the pipeline could not be loaded")
            with self._lock:
                if self._progress is not None:
                    self._progress.advance(done - before)
            before = done

        return report

    def __enter__(self) -> Together:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stop.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        if self._progress is not None:
            self._progress.close()
        if isinstance(error, LoadCancelledError):
            # What went wrong elsewhere is what the caller should see.
            for _work, done in self._work:
                first = done.exception() if done.done() else None
                if first is not None and not isinstance(first, LoadCancelledError):
                    raise first
