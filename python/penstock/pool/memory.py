"""Host memory and one device: slabs, copies between them, how much there is.

With ``device_slab``, the only module of the pool that speaks to CUDA, through torch. A slab is a one-dimensional tensor
of bytes. Host slabs for a GPU are pinned as a whole, so that a component travels in a few copies; where pinning is
refused they stay pageable. Slabs of a GPU have addresses that stay, where its driver has virtual memory management.

Promises that ``to_device`` and ``to_host`` return when the bytes have arrived; that memory of a device is given to no
one else before work that was queued on it when its lease ended is done; and that nothing here disturbs a thread that
captures a CUDA graph meanwhile.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.dlpack

from penstock._native import DeviceMemory, HostArray, spare_memory
from penstock.errors import ConfigError, DeviceError, InsufficientMemoryError
from penstock.pool.device_slab import DeviceSlab, PagedSlab, PlainSlab, StableSlab
from penstock.units import size, size_meant

logger = logging.getLogger(__name__)

Size = int | str
"""Bytes, as a number or with a unit: ``"96GiB"``."""
_RELAXED = 2
"""The capture mode of a thread whose calls heed no capture: ``cudaStreamCaptureModeRelaxed``."""
_OUT_OF_MEMORY: type[BaseException] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)


class Memory:
    """Host memory and one device: ``cpu``, or ``cuda:N``."""

    def __init__(self, device: str, *, debug: bool = False) -> None:
        """With ``debug``, what components left holds NaN; see ``was_written_late``.

        On a GPU these addresses lead to one scratch page; on the CPU memory is filled, and not given back.
        """
        self.device = torch.device(device)
        self.debug = debug
        self._paged: weakref.WeakSet[PagedSlab] = weakref.WeakSet()
        """Slabs that are looked at in the debug mode."""
        self.virtual: DeviceMemory | None = None
        """Where the addresses of slabs stay; None where that is not to be had."""
        self._stream: Any = None
        """That of copies to the device."""
        self._back: Any = None
        """That of copies from it, which others do not wait for."""
        if self.is_gpu:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._back = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            try:
                self.virtual = DeviceMemory(self.device.index, debug=debug)
            except DeviceError as error:
                logger.warning("addresses on %s change whenever a component returns: %s", self.device, error)
                if debug:
                    logger.warning("debug=True finds nothing without addresses that stay")

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
            return int(free) + int(reserved) + self.kept()
        return host_available() // 2

    def kept(self) -> int:
        """Bytes of the device that evicted components left for the next ones."""
        return 0 if self.virtual is None else self.virtual.usage()[2]

    def trim(self, keep: int = 0) -> int:
        """Gives kept memory to the driver, so that torch can have it. Keeps at least ``keep`` bytes, if there are.

        Returns:
            The bytes given back.
        """
        return 0 if self.virtual is None else self.virtual.trim(keep)

    def was_written_late(self) -> bool:
        """Waits for the device, and says whether an evicted component was written to since the last call.

        Always False without ``debug``.
        """
        if not self.debug:
            return False
        if self.virtual is None:
            # All of them: each is made right again.
            return sum(slab.was_written_late() for slab in list(self._paged)) > 0
        self.synchronise()
        return not self.virtual.scratch_is_clean()

    def slab(self, nbytes: int) -> DeviceSlab:
        """The place of one component on the device, without memory yet."""
        if not self.is_gpu:
            paged = PagedSlab(self, nbytes, debug=self.debug)
            if self.debug:
                self._paged.add(paged)
            return paged
        return PlainSlab(self, nbytes) if self.virtual is None else StableSlab(self, self.virtual, nbytes)

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
        """Uninitialised memory of the device, from torch's allocator.

        Raises:
            InsufficientMemoryError: where it cannot be had.
        """
        try:
            with self._on(self._stream):
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except (_OUT_OF_MEMORY, RuntimeError) as error:
            cause = f"{size(nbytes)} of {self.device} could not be had: {str(error).splitlines()[0]}"
            remedy = "Lower device_budget, or raise reserve: memory outside of the pool is in use"
            raise InsufficientMemoryError(cause=cause, remedy=remedy) from error

    def to_device(self, slab: torch.Tensor, host: torch.Tensor, start: int = 0) -> None:
        """Fills a slab of the device from host memory, from byte ``start`` on."""
        with self._on(self._stream):
            slab[start:].copy_(host[start:], non_blocking=True)
            self._wait(self._stream)

    @contextmanager
    def working(self, points: Iterable[Any] = ()) -> Iterator[None]:
        """The stream of copies is the thread's current one, behind these points; its work is done at the end.

        Raises:
            InsufficientMemoryError: where torch's allocator has no memory for it.
        """
        try:
            with self._on(self._stream):
                self.after(points)
                yield
                self._wait(self._stream)
        except _OUT_OF_MEMORY as error:
            cause = f"{self.device} has no memory to work out weights in: {str(error).splitlines()[0]}"
            remedy = "Raise the pool's reserve, or lower device_budget"
            raise InsufficientMemoryError(cause=cause, remedy=remedy) from error

    def finish(self) -> None:
        """Waits for the copies, and for what memory of torch's allocator waits for before it may be written to."""
        with self._beside_captures():
            self._wait(self._stream)

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copies tensors or slabs from the device."""
        with self._on(self._back):
            host.copy_(device, non_blocking=True)
            self._wait(self._back)

    def now(self, stream: Any = None) -> Any:
        """A point in the work on a stream, by default the thread's current one, for ``after`` and ``wait_for``."""
        if not self.is_gpu:
            return None
        with self._beside_captures():
            return (stream or torch.cuda.current_stream(self.device)).record_event()

    def after(self, points: Iterable[Any]) -> None:
        """Has copies, and memory of torch's allocator that is reused for them, wait for these points."""
        for event in points:
            if event is not None:
                self._stream.wait_event(event)

    def wait_for(self, points: Iterable[Any]) -> None:
        """Waits for these points."""
        with self._beside_captures():
            for event in points:
                if event is not None:
                    event.synchronize()

    def not_past(self, points: Iterable[Any]) -> list[Any]:
        """Those of these points that work has not passed yet. If work has failed, there is none left to wait for."""
        try:
            with self._beside_captures():
                return [event for event in points if event is not None and not event.query()]
        except RuntimeError:
            return []

    def wait_for_all(self) -> None:
        """Waits for all work on the device.

        Raises:
            RuntimeError: where that has failed.
        """
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def synchronise(self) -> None:
        """As ``wait_for_all``. If work has failed, there is none left to wait for."""
        try:
            self.wait_for_all()
        except RuntimeError:
            logger.exception("work on %s has failed", self.device)

    def begin_peak(self) -> int:
        """Begins to measure the most memory that torch has allocated; bytes that it has now. Its own peak is reset."""
        if not self.is_gpu:
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """The most bytes that torch had allocated since ``begin_peak``."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_gpu else 0

    def empty_torch_cache(self) -> bool:
        """Has torch give memory back that its allocator keeps unused. Says whether there was any."""
        if torch.cuda.memory_reserved(self.device) == torch.cuda.memory_allocated(self.device):
            return False
        with self._beside_captures():
            torch.cuda.empty_cache()
        return True

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        with self._beside_captures(), torch.cuda.stream(stream):
            yield

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Leaves alone what other threads capture: by default some calls of any thread would end a capture."""
        if self.virtual is None:
            yield
            return
        before = self.virtual.exchange_capture_mode(_RELAXED)
        try:
            yield
        finally:
            self.virtual.exchange_capture_mode(before)

    def _wait(self, stream: Any) -> None:
        if self.is_gpu:
            stream.synchronize()


def _warn_if(refused: str | None) -> None:
    if refused is not None:
        logger.warning("host memory of the pool is pageable, so copies are slower: %s", refused)


def host_available() -> int:
    """Bytes that this process could take: of the machine, and of its control groups.

    Raises:
        ConfigError: where the system does not say.
    """
    available = spare_memory()
    if available is None:
        cause = "the system does not say how much memory it has"
        raise ConfigError(cause=cause, remedy="Give the pool's budgets in bytes")
    return available


def size_of(argument: str, given: Size) -> int:
    """The bytes that a budget, or another argument of that name, is given as.

    Raises:
        ConfigError: for what is no size.
    """
    nbytes = size_meant(given) if isinstance(given, str) else given
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0:
        raise ConfigError(cause=f"{argument}={given!r} is no size", remedy='Give bytes, or text such as "96GiB"')
    return nbytes
