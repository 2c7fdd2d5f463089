"""Lazy tensors that are there still: which of them loading code has kept when a recording ends.

The storages that lazy tensors are views of are the recorder's own, so it knows which are there still, by weak
references, and a load that keeps nothing costs no search. (Not the tensors themselves: ``torch.utils.swap_tensors``
refuses those that have weak references.) Where some are left, their tensors are searched for among all objects.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from penstock.recording.lazy import LazyStorage


class Kept:
    """What a recorder's lazy tensors are views of."""

    def __init__(self) -> None:
        self._storages: WeakSet[LazyStorage] = WeakSet()

    def add(self, storage: LazyStorage) -> None:
        """One more."""
        self._storages.add(storage)

    def release(self, of: type, found: Callable[[object], object]) -> None:
        """Has every object that may hold a storage looked at, if any is there still.

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
            # Someone has frozen what holds them. As it is found it is left.
            gc.unfreeze()
            self._search(of, found)
            gc.freeze()

    @staticmethod
    def _search(of: type, found: Callable[[object], object]) -> None:
        # Objects refer to their type. A list of all objects would hold those too that other threads are making: a tuple
        # that anyone else refers to cannot be made any longer than it is.
        for kept in gc.get_referrers(of):
            found(kept)
