"""Slabs of host memory and of a device, and copies between them.

The only module of the pool that speaks to CUDA, through torch. A slab is a one-dimensional tensor of bytes. Host slabs
for a GPU are pinned as a whole, so that a component travels in one copy; where pinning is refused they stay pageable.

Promises that ``to_device`` and ``to_host`` return when the bytes have arrived, and that memory of a device is given to
no one else before work that was queued on it when its lease ended is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack

from penstock._native import HostArray, spare_memory
from penstock.errors import InsufficientMemoryError
from penstock.units import size

logger = logging.getLogger(__name__)

PIECE = 1 << 30
"""Bytes of pinned memory that are registered as one: no copy may reach from one piece into the next."""
_OUT_OF_MEMORY: type[BaseException] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)


class Memory:
    """Host memory and one device: ``cpu``, or ``cuda:N``."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._stream: Any = None

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def available(self) -> int:
        """Bytes that the device could give now.

        On the CPU, half of what the machine could spare: the device's memory is host memory as well.
        """
        if self.is_gpu:
            free, _ = torch.cuda.mem_get_info(self.device)
            reserved = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            return int(free) + int(reserved)
        return host_available() // 2

    def host_slab(self, nbytes: int) -> torch.Tensor:
        """Uninitialised host memory.

        Raises:
            InsufficientMemoryError: where it cannot be had.
        """
        if self.is_gpu:
            pinned, refused = HostArray.pinned(nbytes, self.device.index)
            _warn_if(refused)
            made: torch.Tensor = torch.utils.dlpack.from_dlpack(pinned)
            return made
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            cause = f"{size(nbytes)} of host memory could not be had: {str(error).splitlines()[0]}"
            raise InsufficientMemoryError(cause=cause, remedy="Lower host_budget, or unload models") from error

    def growing_host_slab(self, nbytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """Host memory that gets pages as it is written to, and a function that pins it once it is filled: for what
        moves there tensor by tensor, while the memory that it came from is freed.

        Raises:
            InsufficientMemoryError: where it cannot be had.
        """
        if not self.is_gpu:
            return self.host_slab(nbytes), lambda: None
        array = HostArray.to_be_pinned(nbytes, self.device.index)
        made: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
        return made, lambda: _warn_if(array.pin())

    def device_slab(self, nbytes: int) -> torch.Tensor:
        """Uninitialised memory of the device.

        Raises:
            InsufficientMemoryError: where it cannot be had.
        """
        try:
            with self._on_stream():
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except (_OUT_OF_MEMORY, RuntimeError) as error:
            cause = f"{size(nbytes)} of {self.device} could not be had: {str(error).splitlines()[0]}"
            remedy = "Lower device_budget, or raise reserve: memory outside of the pool is in use"
            raise InsufficientMemoryError(cause=cause, remedy=remedy) from error

    def to_device(self, slab: torch.Tensor, host: torch.Tensor) -> None:
        """Fills a slab of the device from host memory."""
        with self._on_stream():
            for start in range(0, host.numel(), PIECE):
                slab[start : start + PIECE].copy_(host[start : start + PIECE], non_blocking=True)
        self._wait()

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copies tensors or slabs from the device."""
        with self._on_stream():
            host.copy_(device, non_blocking=True)
        self._wait()

    def now(self, stream: Any = None) -> Any:
        """A point in the work on the device, for ``after``: of that stream, or of the calling thread's current one."""
        if not self.is_gpu:
            return None
        return (torch.cuda.current_stream(self.device) if stream is None else stream).record_event()

    def after(self, points: list[Any]) -> None:
        """Has copies and reused memory wait for these points."""
        for event in points:
            if event is not None:
                self._copies().wait_event(event)

    def synchronise(self) -> None:
        """Waits for all work on the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def begin_peak(self) -> int:
        """Begins to measure the most memory that torch has allocated; bytes that it has now. Its own peak is reset."""
        if not self.is_gpu:
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """The most bytes that torch had allocated since ``begin_peak``."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_gpu else 0

    def _copies(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._stream

    def _on_stream(self) -> Any:
        return torch.cuda.stream(self._copies() if self.is_gpu else None)

    def _wait(self) -> None:
        if self.is_gpu:
            self._copies().synchronize()


def _warn_if(refused: str | None) -> None:
    if refused is not None:
        logger.warning("host memory of the pool is pageable, so copies are slower: %s", refused)


def host_available() -> int:
    """Bytes that this process could take: of the machine, and of its control groups."""
    return spare_memory() or 0
