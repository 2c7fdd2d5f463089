"""Tensors as views of mapped local files. Their pages are read into memory by many threads, ahead of the consumer.

Promises: views are a private mapping, so writes stay in this process; they keep the mapping alive; each ``take`` gives
a tensor object of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock.errors import MissingDependencyError, SelectionError
from penstock.progress import ProgressOption, progress_reporter
from penstock.supply.read_ahead import ReadAhead

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint
    from penstock.selection import Selection


class MappedSource:
    """Hands out views of the tensors of a checkpoint in local files.

    Args:
        checkpoint: whose tensors.
        framework: as for ``Checkpoint.load``.
        progress: as for ``Checkpoint.load``.

    Attributes:
        failure: the first exception that reading raised. Libraries may wrap it or lose it.
        bytes: bytes of the tensors handed out.
    """

    def __init__(self, checkpoint: Checkpoint, framework: str = "pt", *, progress: ProgressOption = None) -> None:
        self.failure: BaseException | None = None
        self.bytes = 0
        self._checkpoint = checkpoint
        self._framework = framework
        self._views: dict[str, Any] = {}
        # Where the framework lacks the dtype of one, each is mapped by itself.
        with suppress(SelectionError, MissingDependencyError):
            self._views = checkpoint.load(mmap=True, framework=framework)
        self._ahead = ReadAhead(checkpoint)
        self._progress = progress_reporter(progress, checkpoint.nbytes)
        self._lock = threading.Lock()

    def take(self, name: str) -> Any:
        """The whole tensor. Asked for again, it is the same memory."""
        view = self._ready(name)
        with self._lock:
            self.bytes += view.nbytes
            self._progress.advance(view.nbytes)
        return _alias(view)

    def part(self, name: str, selection: Selection) -> Any:
        """A part of a tensor: a view of the same memory where that is contiguous."""
        whole = self._ready(name)
        if not hasattr(whole, "__getitem__"):  # an array for DLPack's consumers
            return self._checkpoint.get_tensor(name, selection, framework=self._framework)
        part = whole[selection]
        return part.contiguous() if hasattr(part, "contiguous") else part

    def take_all(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Several tensors at once, or all."""
        if names is not None:
            return {name: self.take(name) for name in names}
        self._ahead.everything()
        return (
            {name: self.take(name) for name in self._checkpoint}
            if not self._views
            else {name: _alias(view) for name, view in self._views.items()}
        )

    def close(self) -> None:
        """Ends reading ahead. What was handed out stays, and what is asked for later is mapped again."""
        self._ahead.close()
        self._views = {}
        self._progress.close()

    def _ready(self, name: str) -> Any:
        view = self._views.get(name)
        if view is None:
            return self._checkpoint.load([name], mmap=True, framework=self._framework)[name]
        try:
            self._ahead.want(name)
        except BaseException as error:
            self.failure = self.failure or error
            raise
        return view


def _alias(view: Any) -> Any:
    """The same memory as a tensor of its own: attributes that are set on one do not show on the other."""
    if hasattr(view, "detach"):
        return view.detach()
    return view[...] if hasattr(view, "__getitem__") else view
