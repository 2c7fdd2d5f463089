"""Slabs of host memory and of a device, and copies between them.

The only module of the pool that speaks to CUDA, through torch. A slab is a one-dimensional tensor of bytes. Host slabs
for a GPU are pinned as a whole, so that a component travels in one copy; where pinning is refused they stay pageable.

Promises that ``to_device`` and ``to_host`` return when the bytes have arrived, and that memory of a device is given to
no one else before work that was queued on it when its lease ended is done.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.utils.dlpack

from penstock._native import HostArray
from penstock.errors import InsufficientMemoryError
from penstock.units import size

logger = logging.getLogger(__name__)

_PIECE = 1 << 30
"""Bytes of pinned memory that are registered as one."""
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
            if refused is not None:
                logger.warning("host memory of the pool is pageable, so copies are slower: %s", refused)
            made: torch.Tensor = torch.utils.dlpack.from_dlpack(pinned)
            return made
        try:
            return torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            cause = f"{size(nbytes)} of host memory could not be had: {str(error).splitlines()[0]}"
            raise InsufficientMemoryError(cause=cause, remedy="Lower host_budget, or unload models") from error

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
            # A copy must not reach from one registered piece of the master into the next.
            for start in range(0, host.numel(), _PIECE):
                slab[start : start + _PIECE].copy_(host[start : start + _PIECE], non_blocking=True)
        self._wait()

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copies tensors or slabs from the device."""
        with self._on_stream():
            host.copy_(device, non_blocking=True)
        self._wait()

    def now(self) -> Any:
        """A point in the calling thread's work on the device, for ``after``."""
        if not self.is_gpu:
            return None
        return torch.cuda.current_stream(self.device).record_event()

    def after(self, points: list[Any]) -> None:
        """Has copies and reused memory wait for these points."""
        for event in points:
            if event is not None:
                self._copies().wait_event(event)

    def _copies(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._stream

    def _on_stream(self) -> Any:
        return torch.cuda.stream(self._copies() if self.is_gpu else None)

    def _wait(self) -> None:
        if self.is_gpu:
            self._copies().synchronize()


def host_available() -> int:
    """Bytes that this process could take: of the machine, and of its control group."""
    with open("/proc/meminfo", encoding="ascii") as meminfo:  # noqa: PTH123
        return next(int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemAvailable:"))
