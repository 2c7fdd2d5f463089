"""Memory of the device for one component: mapped when it comes, unmapped from its end as room is wanted.

``DeviceSlab`` is what the rest of the pool knows. Bytes that stay mapped keep their content, so that a return copies
only what is missing. Knows no budget and no component.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from penstock.errors import InsufficientMemoryError
from penstock.pool.memory import PIECE, Memory
from penstock.units import size


class DeviceSlab(Protocol):
    """Bytes of a device at one address."""

    tensor: torch.Tensor | None
    """All of its bytes, ``uint8``; to be touched up to ``mapped_bytes``. None where nothing is mapped and the address
    was given up."""
    mapped_bytes: int
    """From its start."""

    def map(self) -> None:
        """Maps all of it. What was mapped keeps its content.

        Raises:
            InsufficientMemoryError: where the memory cannot be had; what was mapped is still there.
        """

    def unmap(self, keep: int, after: Sequence[Any]) -> None:
        """Gives back what lies behind the first ``keep`` bytes, or a little less. Copies nothing.

        ``after`` are points of work on the device (``Memory.now``) that may still use the bytes: nobody else gets them
        before these are done.
        """


def device_slab(memory: Memory, nbytes: int) -> DeviceSlab:
    """A slab of ``nbytes`` bytes with nothing mapped."""
    return AllocatedSlab(memory, nbytes) if memory.is_gpu else MappedSlab(nbytes)


def fill(memory: Memory, slab: torch.Tensor, master: torch.Tensor, start: int) -> None:
    """Copies a master to the device from this byte on, and returns when the bytes have arrived."""
    # The pieces of the master are registered from its beginning; a copy must not reach from one into the next.
    aligned = min(-(-start // PIECE) * PIECE, master.numel())
    for begin, end in ((start, aligned), (aligned, master.numel())):
        if begin < end:
            memory.to_device(slab[begin:end], master[begin:end])


class AllocatedSlab:
    """A slab of torch's allocator, which is there as a whole or not at all."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self._memory, self._nbytes = memory, nbytes
        self.tensor: torch.Tensor | None = None
        self.mapped_bytes = 0

    def map(self) -> None:
        """See ``DeviceSlab``."""
        if self.tensor is None:
            self.tensor = self._memory.device_slab(self._nbytes)
            self.mapped_bytes = self._nbytes

    def unmap(self, keep: int, after: Sequence[Any]) -> None:
        """See ``DeviceSlab``."""
        if keep < self.mapped_bytes:
            self._memory.after(list(after))
            self.tensor, self.mapped_bytes = None, 0


class MappedSlab:
    """A slab of anonymous host memory, for the device ``cpu``: pages are given back to the kernel from its end."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        try:
            self._pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            cause = f"{size(nbytes)} of host memory could not be had: {error}"
            raise InsufficientMemoryError(cause=cause, remedy="Lower device_budget, or unload models") from error
        self.tensor: torch.Tensor | None = torch.frombuffer(self._pages, dtype=torch.uint8)[:nbytes]
        self.mapped_bytes = 0

    def map(self) -> None:
        """See ``DeviceSlab``. Pages come with their first byte."""
        self.mapped_bytes = self._nbytes

    def unmap(self, keep: int, after: Sequence[Any]) -> None:
        """See ``DeviceSlab``."""
        del after
        stays = keep // mmap.PAGESIZE * mmap.PAGESIZE
        if stays < self.mapped_bytes:
            self._pages.madvise(mmap.MADV_DONTNEED, stays, len(self._pages) - stays)
            self.mapped_bytes = stays
