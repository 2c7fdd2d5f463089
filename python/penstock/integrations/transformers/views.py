"""Tensors as views of mapped files, each when it is asked for: what a ``Supply`` is, without memory of their own.

For models on the CPU whose parameters may be pages of the file, which is what transformers gives by itself. Bytes are
brought into memory by many threads, a little ahead of whoever asks.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from penstock._native import LoadOptions
from penstock.integrations.safetensors.read_ahead import ReadAhead
from penstock.progress import ProgressOption, progress_reporter

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint
    from penstock.selection import Selection


class Views:
    """Hands out views of the tensors of a checkpoint in local files. See ``Supply`` for its methods."""

    def __init__(
        self, checkpoint: Checkpoint, *, progress: ProgressOption = None, options: LoadOptions | None = None
    ) -> None:
        self.failure: BaseException | None = None
        self.bytes = 0
        self._views = checkpoint.load(mmap=True, options=options)
        self._ahead = ReadAhead(checkpoint, LoadOptions() if options is None else options)
        self._progress = progress_reporter(progress, checkpoint.nbytes)
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Nothing: pages are brought in when a tensor near them is asked for."""

    def take(self, name: str) -> Any:
        """The whole tensor. Asked for again, it is the same memory."""
        view = self._ready(name)
        with self._lock:
            self.bytes += view.nbytes
            self._progress.advance(view.nbytes)
        return view.detach()

    def part(self, name: str, selection: Selection) -> Any:
        """A part of a tensor, as a view of the same memory."""
        return self._ready(name)[selection]

    def close(self) -> None:
        """Ends reading ahead. What was handed out stays."""
        self._ahead.close()
        self._views.clear()
        self._progress.close()

    def _ready(self, name: str) -> Any:
        try:
            self._ahead.want(name)
        except BaseException as error:
            self.failure = self.failure or error
            raise
        return self._views[name]
