"""Memory of the device for one component: mapped when it comes, unmapped from its end as room is wanted.

``DeviceSlab`` is what the rest of the pool knows. Bytes that stay mapped keep their content, so that a return copies
only what is missing. Knows no budget and no component.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from penstock.errors import InsufficientMemoryError
from penstock.pool.memory import PIECE, Memory
from penstock.units import size


class DeviceSlab(Protocol):
    """The place of a component on a device."""

    filled: int
    """Bytes from the beginning that are there and right. Whoever fills it otherwise than by ``fill`` sets it."""
    granularity: int
    """Bytes that memory goes in multiples of."""

    @property
    def tensor(self) -> torch.Tensor | None:
        """Its bytes, of which some may have no memory; None where it has no address at present."""

    @property
    def device_bytes(self) -> int:
        """Bytes of the device that it has now."""

    def map(self) -> torch.Tensor:
        """Has memory for all of it. What was there stays; the content of the rest is undefined.

        Raises:
            InsufficientMemoryError: where it cannot be had; then nothing has changed.
        """

    def evict(self, points: Iterable[Any], keep: int = 0) -> int:
        """Gives memory up, but for the first ``keep`` bytes, a multiple of ``granularity``. Copies nothing.

        ``points`` are work that may still use it (``Memory.now``): nobody else gets the memory before that is done.

        Returns:
            The bytes of the device that are free now, or as soon as the points have passed.
        """


def device_slab(memory: Memory, nbytes: int) -> DeviceSlab:
    """A slab of ``nbytes`` bytes without memory."""
    return PlainSlab(memory, nbytes) if memory.is_gpu else PagedSlab(nbytes)


def fill(memory: Memory, slab: DeviceSlab, master: torch.Tensor) -> int:
    """Copies what is missing of a master, and returns how many bytes when they have arrived.

    Raises:
        InsufficientMemoryError: as ``DeviceSlab.map``.
    """
    tensor, start = slab.map(), slab.filled
    # The pieces of the master are registered from its beginning; a copy must not reach from one into the next.
    aligned = min(-(-start // PIECE) * PIECE, master.numel())
    for begin, end in ((start, aligned), (aligned, master.numel())):
        if begin < end:
            memory.to_device(tensor[begin:end], master[begin:end])
    slab.filled = master.numel()
    return master.numel() - start


class PlainSlab:
    """Memory of torch's allocator, which is there as a whole or not at all."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.filled, self.granularity = 0, max(nbytes, 1)
        self._memory, self._nbytes = memory, nbytes
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor | None:
        """See ``DeviceSlab``."""
        return self._tensor

    @property
    def device_bytes(self) -> int:
        """See ``DeviceSlab``."""
        return 0 if self._tensor is None else self._nbytes

    def map(self) -> torch.Tensor:
        """See ``DeviceSlab``."""
        if self._tensor is None:
            self._tensor = self._memory.device_slab(self._nbytes)
        return self._tensor

    def evict(self, points: Iterable[Any], keep: int = 0) -> int:
        """See ``DeviceSlab``."""
        freed = self.device_bytes
        if keep >= freed > 0:
            return 0
        self._memory.after(list(points))
        self._tensor, self.filled = None, 0
        return freed


class PagedSlab:
    """Anonymous host memory, for the device ``cpu``: pages go back to the kernel, and the address stays."""

    granularity = mmap.PAGESIZE

    def __init__(self, nbytes: int) -> None:
        self.filled, self.device_bytes, self._nbytes = 0, 0, nbytes
        try:
            self._pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            cause = f"{size(nbytes)} of host memory could not be had: {error}"
            raise InsufficientMemoryError(cause=cause, remedy="Lower device_budget, or unload models") from error
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)[:nbytes]

    def map(self) -> torch.Tensor:
        """See ``DeviceSlab``. Pages come with their first byte."""
        self.device_bytes = self._nbytes
        return self.tensor

    def evict(self, points: Iterable[Any], keep: int = 0) -> int:
        """See ``DeviceSlab``."""
        del points
        freed = max(self.device_bytes - keep, 0)
        if freed:
            self._pages.madvise(mmap.MADV_DONTNEED, keep, len(self._pages) - keep)
            self.device_bytes = keep
            self.filled = min(self.filled, keep)
        return freed
