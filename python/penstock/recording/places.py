"""Places in memory that something is still to be read into, and whether a tensor touches one of them.

Knows tensors by their memory and their view of it, and nothing of what is read.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import itemgetter

import torch

from penstock.destinations import overlaps_itself
from penstock.recording.geometry import View, are_disjoint


class Places:
    """Places in one memory that something is still to be read into, by their first byte."""

    def __init__(self) -> None:
        self._views: list[tuple[int, int, View]] = []
        self._longest = 0

    def add(self, memory: torch.Tensor) -> None:
        """Something is to be read there."""
        begin, size, view = place_of(memory)
        insort(self._views, (begin, size, view))
        self._longest = max(self._longest, view.last() * size - begin + size)

    def are_clear_of(self, tensor: torch.Tensor) -> bool:
        """Whether nothing is to be read to where a tensor lies; False where that is not clear."""
        try:
            begin, size, view = place_of(tensor)
            end = (view.last() + 1) * size
        except (RuntimeError, NotImplementedError):
            return False
        if view.numel() == 0:
            return True
        first = bisect_left(self._views, begin - self._longest, key=itemgetter(0))
        for other, other_size, other_view in self._views[first:]:
            if other >= end:
                break
            if (other_view.last() + 1) * other_size <= begin:
                continue
            if size != other_size or not are_disjoint(view, other_view):
                return False
        return True


def place_of(tensor: torch.Tensor) -> tuple[int, int, View]:
    """Where in its memory a tensor begins, in bytes, the size of its elements, and its view in them."""
    with torch._C.DisableTorchFunctionSubclass():
        size = tensor.element_size()
        view = View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
    return view.offset * size, size, view


def has_no_overlap(tensor: torch.Tensor) -> bool:
    """Whether each element of a tensor has memory of its own. False where that is not clear."""
    return not overlaps_itself(tensor.shape, tensor.stride())


def memory_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 where it has none."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
