"""Places in memory that something is still to be read into, and whether a tensor touches one of them.

Knows tensors by their memory and their view of it, and nothing of what is read.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import itemgetter

import torch

from penstock.recording.geometry import View
from penstock.strides import Strided, are_disjoint, overlaps_itself


class Places:
    """Places in one memory that something is still to be read into, by their first byte."""

    def __init__(self) -> None:
        self._views: list[Strided] = []
        self._longest = 0

    def add(self, memory: torch.Tensor) -> None:
        """Something is to be read there."""
        strided = _strided(memory)
        begin, end = strided.span()
        insort(self._views, strided)
        self._longest = max(self._longest, end - begin)

    def are_clear_of(self, tensor: torch.Tensor) -> bool:
        """Whether nothing is to be read to where a tensor lies; False where that is not clear."""
        try:
            strided = _strided(tensor)
        except (RuntimeError, NotImplementedError):
            return False
        if 0 in strided.sizes:
            return True
        begin, end = strided.span()
        first = bisect_left(self._views, begin - self._longest, key=itemgetter(0))
        for other in self._views[first:]:
            if other.begin >= end:
                break
            if not are_disjoint(strided, other):
                return False
        return True


def place_of(tensor: torch.Tensor) -> tuple[int, int, View]:
    """Where in its memory a tensor begins, in bytes, the size of its elements, and its view in them."""
    with torch._C.DisableTorchFunctionSubclass():
        size = tensor.element_size()
        view = View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
    return view.offset * size, size, view


def _strided(tensor: torch.Tensor) -> Strided:
    begin, size, view = place_of(tensor)
    return Strided(begin, view.sizes, [stride * size for stride in view.strides], size)


def has_no_overlap(tensor: torch.Tensor) -> bool:
    """Whether each element of a tensor has memory of its own. False where that is not clear."""
    return not overlaps_itself(tensor.shape, tensor.stride())


def storage_address(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 where it has none."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
