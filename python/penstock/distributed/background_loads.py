"""Loads that run beside the thread that works on what others of them have read, and end when that does.

It knows torch, for the stream and the mode of the thread that asked hold for the others too, and no ranks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch

from penstock.errors import LoadCancelledError
from penstock.loading import Load
from penstock.recording.lazy import unwatched

T = TypeVar("T")


class BackgroundLoads:
    """Loads in threads of their own, on the stream of the thread that asked, all of which can be stopped."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._inference = torch.is_inference_mode_enabled()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="penstock-sharing")
        self._lock = threading.Lock()
        # Those that have ended need not be kept for this.
        self._loads: weakref.WeakSet[Load] = weakref.WeakSet()
        self._stopped = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        def here() -> T:
            on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
            # Not watched: whoever asked may hold the recorder's lock, and waits for this.
            with torch.inference_mode(self._inference), on_stream, unwatched():
                return work()

        return self._pool.submit(here)

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
