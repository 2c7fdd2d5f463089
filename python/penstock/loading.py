"""The driver of a load: gives the engine destinations, takes what has landed.

Two kinds of destinations, one loop. *Fresh*: the engine's slab on the host, tensors of the framework's allocator on a
device; attached as the window allows, so that a stream holds no more than its read-ahead, whatever the consumer's pace.
*Existing*: memory of the caller, attached as it is.

Destinations are held here until they have landed or the session has stopped; a load that ends early, by an exception,
a closed generator or Ctrl-C, stops the session first and lets go of them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock._native import Config, LoadStats, Session
from penstock.frameworks.base import Framework
from penstock.progress import Progress

READ_AHEAD_BYTES = 512 << 20
"""How far a stream reads ahead of its consumer, where nothing is said."""
_BATCH_BYTES = 64 << 20
"""Destinations are attached in batches of about this size, so that reading begins while others are being allocated."""
_BATCH_TENSORS = 256


class Planned(NamedTuple):
    """One tensor of a session."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class FreshHost:
    """Fresh host memory: the engine's."""

    def __init__(self, session: Session, framework: Framework) -> None:
        self._session = session
        self._framework = framework

    def attach(self, tensors: Sequence[Planned]) -> None:
        self._session.attach_slab(len(tensors))

    def landed(self, index: int) -> Any:
        return self._framework.adopt(self._session.host(index))


class FreshDevice:
    """Fresh device memory: from the framework's allocator, on the consumer's stream."""

    def __init__(self, session: Session, framework: Framework, device: str) -> None:
        self._session = session
        self._framework = framework
        self._device = device
        self._held: dict[int, Any] = {}
        self._next = 0

    def attach(self, tensors: Sequence[Planned]) -> None:
        addresses = []
        for tensor in tensors:
            made, address = self._framework.empty(tensor.dtype, tensor.shape, self._device)
            self._held[self._next] = made
            self._next += 1
            addresses.append(address)
        # After the allocations: the fence must cover work on memory that the allocator has just reused.
        self._session.attach(addresses, self._framework.consumer_stream(self._device))

    def landed(self, index: int) -> Any:
        return self._held.pop(index)


class Existing:
    """Memory of the caller, by tensor name."""

    def __init__(self, session: Session, tensors: Mapping[str, Any], addresses: Mapping[str, int], stream: int) -> None:
        self._session = session
        self._tensors = tensors
        self._addresses = addresses
        self._stream = stream
        self._names = [planned[0] for planned in session.tensors]

    def attach(self, tensors: Sequence[Planned]) -> None:
        self._session.attach([self._addresses[tensor.name] for tensor in tensors], self._stream)

    def landed(self, index: int) -> Any:
        return self._tensors[self._names[index]]


Destinations = FreshHost | FreshDevice | Existing


class _Window:
    """What is attached: as much as the limit allows, and always enough for something to land."""

    def __init__(self, session: Session, destinations: Destinations, limit: int | None) -> None:
        self.tensors = [Planned(*planned) for planned in session.tensors]
        self._destinations = destinations
        self._limit = limit
        # A tensor whose last block it shares with the next cannot land before that one has a destination.
        self._needed = session.attached_to_land
        self._landed = [False] * len(self.tensors)
        self._oldest = 0
        self._attached = 0
        self._outstanding = 0

    def _may_attach(self) -> bool:
        if self._attached == len(self.tensors):
            return False
        if self._limit is None or self._outstanding < self._limit or self._outstanding == 0:
            return True
        return self._oldest < self._attached < self._needed[self._oldest]

    def fill(self) -> None:
        """Attaches what there is room for."""
        while self._may_attach():
            begin = self._attached
            batch = 0
            while self._may_attach() and self._attached - begin < _BATCH_TENSORS and batch < _BATCH_BYTES:
                batch += self.tensors[self._attached].nbytes
                self._outstanding += self.tensors[self._attached].nbytes
                self._attached += 1
            self._destinations.attach(self.tensors[begin : self._attached])

    def landed(self, indices: Sequence[int]) -> None:
        """These have landed; they count until they are taken."""
        for index in indices:
            self._landed[index] = True
        while self._oldest < len(self.tensors) and self._landed[self._oldest]:
            self._oldest += 1

    def taken(self, index: int) -> None:
        """The consumer has come back for more: its tensor is no longer ours. Attaches in batches, not one for one."""
        self._outstanding -= self.tensors[index].nbytes
        if self._limit is None or self._outstanding <= self._limit - min(self._limit, _BATCH_BYTES) // 2:
            self.fill()


def run(
    session: Session,
    destinations: Destinations,
    limit: int | None,
    progress: Progress,
    done: Callable[[LoadStats], None],
) -> Iterator[tuple[str, Any]]:
    """Yields ``(name, tensor)`` as tensors land.

    Args:
        session: a session with nothing attached.
        destinations: where its tensors go.
        limit: bytes that may be attached and not yet taken by the consumer; None for no bound. One tensor may always
            be in flight, and neighbours that share a block with it.
        progress: told of every tensor.
        done: called with the statistics after the last tensor.
    """
    window = _Window(session, destinations, limit)
    try:
        window.fill()
        while landed := session.wait():
            window.landed(landed)
            for index in landed:
                tensor = window.tensors[index]
                # No name for what is yielded: the consumer alone decides how long it lives.
                yield tensor.name, destinations.landed(index)
                progress.advance(tensor.nbytes)
                window.taken(index)
            window.fill()
        done(session.finish())
    finally:
        session.stop()
        progress.close()


def read_ahead(config: Config) -> int:
    """The window of a stream, in bytes."""
    return READ_AHEAD_BYTES if config.read_ahead_bytes is None else config.read_ahead_bytes
