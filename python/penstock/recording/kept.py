"""Lazy tensors that are there still: which of them loading code has kept when a recording ends.

The storages that lazy tensors are views of are the recorder's own, so it knows which are there still, by weak
references, and a load that keeps nothing costs no search. (Not the tensors themselves: ``torch.utils.swap_tensors``
refuses those that have weak references.) Where some are left, their tensors are searched for among the objects that
are new since the recording began, and where that does not find all, since loading code called ``gc.freeze``, among all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from penstock.recording.lazy import LazyStorage


_FEW = 10_000
"""Fewer frozen objects are Python's own, which 3.12 freezes as it starts, or do not matter."""


class Kept:
    """What a recorder's lazy tensors are views of.

    As a context: collections look at objects that are made in it only, since what was there before keeps no weight of
    a load to come. Not where a program has frozen its objects, which nobody could tell from what this freezes.
    """

    freezes = 0
    """How often ``gc.freeze`` was called while a recorder was active: counting what is frozen takes 20 ms and more."""

    def __init__(self) -> None:
        self._storages: WeakSet[LazyStorage] = WeakSet()
        self._froze = False
        self._freezes = 0

    def add(self, storage: LazyStorage) -> None:
        """One more."""
        self._storages.add(storage)

    def release(self, of: type, found: Callable[[object], object]) -> None:
        """Has every object that may hold a storage looked at until none is there any more.

        Args:
            of: the type of those objects.
            found: is called with objects, of other types too, and makes those of the type let go of their storages.
        """
        if not self._storages:
            return
        # Some are in cycles, such as functions of loading code that call themselves.
        gc.collect()
        if not self._storages:
            return
        self._search(of, found)
        if self._storages:
            # Loading code has frozen what it made. As it is found it is left.
            gc.unfreeze()
            self._search(of, found)
            gc.freeze()
            self._froze = False

    @staticmethod
    def _search(of: type, found: Callable[[object], object]) -> None:
        # Objects refer to their type. A list of all objects would hold those too that other threads are making: a tuple
        # that anyone else refers to cannot be made any longer than it is.
        for kept in gc.get_referrers(of):
            found(kept)

    def __enter__(self) -> None:
        self._froze = gc.get_freeze_count() < _FEW
        if self._froze:
            gc.freeze()
            self._freezes = Kept.freezes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Where loading code has called ``gc.freeze`` too, that stays so.
        if self._froze and self._freezes == Kept.freezes:
            gc.unfreeze()
