"""The place of one component on a device: memory that comes and goes, at addresses that stay where that can be.

``StableSlab`` has the same addresses for as long as it exists, by CUDA's virtual memory management: CUDA graphs and
compiled code that know them go on after an eviction and a return. Part of it can be evicted, from its end; a return
copies only what is missing. ``PagedSlab`` does the same for the device ``cpu``, with the kernel's pages. ``PlainSlab``
takes memory of torch's allocator anew each time.

Promises that the first ``filled`` bytes are the component's, and that memory goes to no one else before the points that
``evict`` is given. One thread at a time may map, fill or evict a slab; ``filled`` may be lowered by another one. Knows
neither budgets nor who uses it.
"""

from __future__ import annotations

import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack

from penstock.errors import InsufficientMemoryError
from penstock.pool.lock import deferred
from penstock.units import size

if TYPE_CHECKING:
    from penstock._native import DeviceMemory
    from penstock.pool.memory import Memory


_SCRATCH = 0xFF
"""NaN in every floating-point format of 16 bits and more: what a scratch page holds."""


class DeviceSlab(ABC):
    """The place of a component on a device."""

    is_stable = False
    """Whether its addresses stay."""
    granularity: int
    """Bytes that its memory goes in multiples of."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.nbytes = nbytes
        self.filled = 0
        """Bytes from the beginning that are there and right. Whoever fills it otherwise than by ``fill`` sets it."""
        self._memory = memory

    @property
    @abstractmethod
    def tensor(self) -> torch.Tensor | None:
        """Its bytes, of which some may have no memory; None where it has no addresses at present."""

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Bytes of the device that it has now."""

    @abstractmethod
    def map(self) -> torch.Tensor:
        """Has memory for all of it. What was there stays; the content of the rest is undefined.

        Raises:
            InsufficientMemoryError: where it cannot be had; then nothing has changed.
        """

    @abstractmethod
    def evict(self, points: Iterable[Any], keep: int = 0) -> int:
        """Gives memory up, but for at least the first ``keep`` bytes if that can be. Copies nothing.

        A stable slab waits for the points, so this is not to be called with a lock held.

        Args:
            points: work that may still use it, from ``Memory.now``.
            keep: bytes that may stay, a multiple of ``granularity``. A plain slab goes as a whole.

        Returns:
            The bytes of the device that are free now, or as soon as the points have passed.
        """

    def fill(self, master: torch.Tensor) -> int:
        """Has memory for all of it and copies what is missing from its master. Returns when it has arrived.

        Returns:
            The bytes copied.

        Raises:
            InsufficientMemoryError: as ``map``.
        """
        tensor, start = self.map(), self.filled
        self._memory.to_device(tensor, master, start)
        self.filled = self.nbytes
        return self.nbytes - start

    def close(self, points: Iterable[Any] = ()) -> None:
        """Gives everything up for good. Addresses stay reserved as long as a tensor of them exists."""
        self.evict(points)


class PlainSlab(DeviceSlab):
    """Memory of torch's allocator, another each time."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        super().__init__(memory, nbytes)
        self.granularity = max(nbytes, 1)
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor | None:
        """As of every slab."""
        return self._tensor

    @property
    def device_bytes(self) -> int:
        """As of every slab."""
        return 0 if self._tensor is None else self.nbytes

    def map(self) -> torch.Tensor:
        """As of every slab."""
        if self._tensor is None:
            self._tensor = self._memory.device_slab(self.nbytes)
        return self._tensor

    def evict(self, points: Iterable[Any], keep: int = 0) -> int:
        """As of every slab. Waits for nothing: whoever gets the memory next does."""
        freed = self.device_bytes
        if freed and keep < self.nbytes:
            self._memory.after(points)
            self._tensor, self.filled = None, 0
            return freed
        return 0


class PagedSlab(DeviceSlab):
    """Anonymous host memory, for the device ``cpu``: pages go back to the kernel from its end.

    With ``debug`` they stay instead, filled with what a scratch page of a GPU holds.
    """

    is_stable = True
    granularity = mmap.PAGESIZE

    def __init__(self, memory: Memory, nbytes: int, *, debug: bool = False) -> None:
        super().__init__(memory, nbytes)
        self._debug, self._looking = debug, threading.Lock()
        self._ever, self._late = 0, False
        """Bytes that have ever been mapped; whether some of these were written to while they were not."""
        try:
            self._pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            cause = f"{size(nbytes)} of host memory could not be had: {error}"
            raise InsufficientMemoryError(cause=cause, remedy="Lower device_budget, or unload models") from error
        self._tensor = torch.frombuffer(self._pages, dtype=torch.uint8)[:nbytes]
        self._mapped = 0

    @property
    def tensor(self) -> torch.Tensor:
        """As of every slab; always the same."""
        return self._tensor

    @property
    def device_bytes(self) -> int:
        """As of every slab."""
        return self._mapped

    def map(self) -> torch.Tensor:
        """As of every slab. Pages come with their first byte."""
        with deferred(), self._looking:
            self._look()
            self._mapped = self._ever = self.nbytes
        return self._tensor

    def evict(self, points: Iterable[Any], keep: int = 0) -> int:
        """As of every slab. There are no points to wait for."""
        del points
        freed = max(self._mapped - keep, 0)
        if freed:
            with deferred(), self._looking:
                if self._debug:
                    self._tensor[keep:].fill_(_SCRATCH)
                else:
                    self._pages.madvise(mmap.MADV_DONTNEED, keep, len(self._pages) - keep)
                self._mapped = keep
            if self.filled > keep:  # noqa: PLR1730 - as of a stable slab
                self.filled = keep
        return freed

    def was_written_late(self) -> bool:
        """Whether memory that was given up was written to since the last call. Always False without ``debug``."""
        with deferred(), self._looking:
            self._look()
            late, self._late = self._late, False
            return late

    def _look(self) -> None:
        given_up = self._tensor[self._mapped : self._ever]
        if self._debug and not bool((given_up == _SCRATCH).all()):
            given_up.fill_(_SCRATCH)
            self._late = True


class StableSlab(DeviceSlab):
    """Addresses for good, with memory while it is wanted."""

    is_stable = True

    def __init__(self, memory: Memory, virtual: DeviceMemory, nbytes: int) -> None:
        super().__init__(memory, nbytes)
        self.granularity = virtual.chunk_bytes
        self._range = virtual.reserve(nbytes)
        # Once: views of it share its storage, which keeps the addresses reserved.
        self._tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(self._range.dlpack())

    @property
    def tensor(self) -> torch.Tensor:
        """As of every slab; always the same."""
        return self._tensor

    @property
    def device_bytes(self) -> int:
        """As of every slab."""
        return self._range.mapped_bytes

    def map(self) -> torch.Tensor:
        """As of every slab."""
        try:
            self._range.map(self.nbytes)
        except InsufficientMemoryError:
            # What torch keeps unused would be given to a plain slab too.
            if not self._memory.empty_torch_cache():
                raise
            self._range.map(self.nbytes)
        return self._tensor

    def evict(self, points: Iterable[Any], keep: int = 0) -> int:
        """As of every slab. Another component can have the memory at once; torch, after ``Memory.trim``."""
        # Memory is unmapped without regard to what is queued on the device.
        self._memory.wait_for(points)
        try:
            return self._range.unmap(keep)
        finally:
            # Written only if it has to be: whoever has the pool's lock may lower it meanwhile.
            if self.filled > self._range.mapped_bytes:  # noqa: PLR1730
                self.filled = self._range.mapped_bytes

    def close(self, points: Iterable[Any] = ()) -> None:
        """As of every slab."""
        self.evict(points)
        self._range.close()
