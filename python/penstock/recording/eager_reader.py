"""What loading code needs before the plan is read: a value that decides something, an operation that is not recorded.

Small tensors (scales, decays, norms) are needed by every layer or expert in the same way. A read of each would be slow,
so with the first come those near it and those of its kind, which are kept until they are asked for or there are too
many. Large ones come by themselves, and no more of them than what is wanted.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from penstock.checkpoint import Checkpoint
from penstock.recording.sources import TensorRef

SMALL_BYTES = 256 << 10
"""A tensor of at most this size is read together with those of its kind that follow."""
_TOGETHER_BYTES = 16 << 20
_KEPT_BYTES = 64 << 20
"""When more than this was read of small tensors, they are let go."""

Load = Callable[[Checkpoint, list[str], Any], dict[str, torch.Tensor]]


def is_small(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is read together with others like it."""
    return checkpoint[name].nbytes <= SMALL_BYTES


class EagerReader:
    """Reads tensors that are needed before the plan is.

    Args:
        load: loads tensors of a checkpoint, or slices of them, to where they are needed.

    Attributes:
        large: how many large tensors, or parts of such, were needed so far.
    """

    def __init__(self, load: Load) -> None:
        self.large = 0
        self._load = load
        self._small: dict[tuple[int, str], torch.Tensor] = {}
        self._small_bytes = 0
        self._order: tuple[Checkpoint, list[str], int] | None = None

    def hands_out(self, checkpoint: Checkpoint, order: list[str], index: int) -> None:
        """Learns which tensor loading code is given now, and which come after it."""
        self._order = (checkpoint, order, index)

    def box(self, stored: TensorRef, ranges: list[tuple[int, int]]) -> torch.Tensor:
        """A part of a tensor, packed."""
        checkpoint, name = stored.checkpoint, stored.name
        if not is_small(checkpoint, name):
            self.large += 1
            box = tuple(slice(*item) for item in ranges)
            return self._load(checkpoint, [name], {name: box} if box else None)[name]
        if (id(checkpoint), name) not in self._small:
            if self._small_bytes > _KEPT_BYTES:
                self.clear()
            for loaded, tensor in self._load(checkpoint, [name, *self._like(checkpoint, name)], None).items():
                self._small[id(checkpoint), loaded] = tensor
                self._small_bytes += checkpoint[loaded].nbytes
        whole = self._small[id(checkpoint), name]
        return whole[tuple(slice(*item) for item in ranges)].clone(memory_format=torch.contiguous_format)

    def clear(self) -> None:
        """Lets go of what is kept."""
        self._small.clear()
        self._small_bytes = 0

    def _like(self, checkpoint: Checkpoint, name: str) -> Iterator[str]:
        """Small tensors after this one that will be needed too, it is supposed: near it, and those of its kind.

        Of a kind are those whose names differ in numbers, of layers and experts.
        """
        if self._order is None or self._order[0] is not checkpoint:
            return
        _, order, latest = self._order
        if name not in order:
            return
        at = latest if order[latest] == name else order.index(name)
        near, room, kind = _TOGETHER_BYTES, _TOGETHER_BYTES, _kind(name)
        for other in islice(order, at + 1, None):
            nbytes = checkpoint[other].nbytes
            near -= nbytes
            if nbytes > SMALL_BYTES or checkpoint[other].dtype == "F4" or not (near >= 0 or _kind(other) == kind):
                continue
            room -= nbytes
            if room < 0:
                return
            if (id(checkpoint), other) not in self._small:
                yield other


@functools.cache
def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)
