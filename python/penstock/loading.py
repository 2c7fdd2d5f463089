"""The driver of a load: gives the core destinations, takes what has landed.

Two kinds of destinations, one loop. *Fresh*: the core's slab on the host, tensors of the framework's allocator on a
device; attached as the window allows, so that a stream holds no more than its read-ahead, whatever the consumer's pace.
*Existing*: memory of the caller, attached as it is (``penstock.parts``).

Destinations are held here until they have landed or the session has stopped; a load that ends early, by an exception,
a closed generator or Ctrl-C, stops the session first and lets go of them afterwards.

A checkpoint may have 100,000 tensors, and a Python call takes as long as copying a small one. So the work per tensor is
what making a tensor costs; all else is done in batches and columns.
"""

from __future__ import annotations

import gc
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from penstock import watching
from penstock._native import LoadOptions, LoadStats, Session
from penstock.errors import LoadCancelledError
from penstock.frameworks.base import Framework
from penstock.progress import Progress

WINDOW_BYTES = 512 << 20
"""How far a stream reads ahead of its consumer, where nothing is said."""
_BATCH_BYTES = 64 << 20
"""Destinations are attached in batches of about this size, so that reading begins while others are being allocated."""
_BATCH_TENSORS = 512
_LARGE_BYTES = 1 << 20
"""From about this size on, torch asks the driver for each tensor."""
_MAKE_FIRST_SECONDS = 0.02


class SessionTensors(NamedTuple):
    """The tensors of a session, in the order in which destinations are attached: a column for each property."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    nbytes: list[int]


class Destinations(Protocol):
    """Where a session's tensors go."""

    device: str
    """``"cpu"`` or ``"cuda:N"``."""

    def ahead(self) -> int | None:
        """Called once before anything is attached, where all of it will be: how many bytes to attach ahead of what has
        landed, or None for all at once. A chance to make memory beforehand.
        """
        return None

    def attach(self, begin: int, end: int) -> None:
        """Gives these tensors, by their place in the plan, their memory."""

    def release(self) -> None:
        """The session has stopped: nothing is on its way any more."""

    def completed(self, indices: list[int]) -> list[Any]:
        """What the consumer is to have of these tensors."""


class FreshHost(Destinations):
    """Fresh host memory: the core's."""

    device = "cpu"

    def __init__(self, session: Session, framework: Framework) -> None:
        self._session = session
        self._framework = framework

    def attach(self, begin: int, end: int) -> None:
        self._session.attach_slab(end - begin)

    def release(self) -> None:
        pass

    def completed(self, indices: list[int]) -> list[Any]:
        return [self._framework.adopt(array) for array in self._session.host(indices)]


class FreshDevice(Destinations):
    """Fresh device memory: from the framework's allocator, on the consumer's stream."""

    def __init__(self, session: Session, planned: SessionTensors, framework: Framework, device: str) -> None:
        self._session = session
        self._framework = framework
        self.device = device
        self._planned = planned
        self._held: list[Any] = []
        self._addresses: list[int] = []

    def ahead(self) -> int | None:
        """A window where there is a core to make tensors while others land; else makes some first, for at most 20 ms.

        Where memory has to be asked of the driver, that takes 0.04 ms for each tensor, and 0.3 ms while copies are
        under way. With a core to spare nothing waits for it but the first tensors; where readers keep all cores busy,
        they would wait. Small tensors share what was asked for: their price is Python's either way.
        """
        nbytes, total = self._planned.nbytes, sum(self._planned.nbytes)
        if total < _LARGE_BYTES * len(nbytes) or self._framework.has_in_reserve(total, self.device):
            return None
        if self._session.leaves_a_core:
            return WINDOW_BYTES
        end = time.monotonic() + _MAKE_FIRST_SECONDS
        while len(self._held) < len(nbytes) and time.monotonic() < end:
            self._make(min(len(self._held) + 16, len(nbytes)))
        return None

    def attach(self, begin: int, end: int) -> None:
        if end > len(self._held):
            self._make(end)
        # After the allocations: the fence must cover work on memory that the allocator has just reused.
        self._session.attach(self._addresses[begin:end], self._framework.consumer_stream(self.device))

    def _make(self, end: int) -> None:
        begin = len(self._held)
        dtypes, shapes = self._planned.dtypes[begin:end], self._planned.shapes[begin:end]
        made, addresses = self._framework.empties(dtypes, shapes, self.device)
        self._held += made
        self._addresses += addresses

    def release(self) -> None:
        self._held.clear()

    def completed(self, indices: list[int]) -> list[Any]:
        held = self._held
        tensors = [held[index] for index in indices]
        for index in indices:
            held[index] = None
        return tensors


class _Attaching:
    """Attaches destinations in batches."""

    def __init__(self, destinations: Destinations, nbytes: Sequence[int]) -> None:
        self._destinations = destinations
        self.until = [0, *accumulate(nbytes)]
        """Bytes of the tensors before each."""
        self.attached = 0

    def up_to(self, end: int) -> int:
        """Attaches the tensors before ``end`` that are not yet; returns their bytes."""
        first = self.attached
        while self.attached < end:
            full = bisect_left(self.until, self.until[self.attached] + _BATCH_BYTES, lo=self.attached + 1)
            batch = min(end, full, self.attached + _BATCH_TENSORS)
            self._destinations.attach(self.attached, batch)
            self.attached = batch
        return self.until[self.attached] - self.until[first]


class _Window:
    """What of a stream is attached: as much as the limit allows, and always enough for something to land."""

    def __init__(self, attaching: _Attaching, needed: Sequence[int], limit: int) -> None:
        self._attaching = attaching
        self._limit = limit
        self._tensors = len(needed)
        # A tensor whose last block it shares with the next cannot land before that one has a destination.
        self._needed = needed
        self._landed = [False] * self._tensors
        self._oldest = 0
        self._outstanding = 0

    def _reach(self) -> int:
        """Where attaching may go on to."""
        attached, until = self._attaching.attached, self._attaching.until
        reach = attached
        if self._outstanding < self._limit or self._outstanding == 0:
            room = max(self._limit - self._outstanding, 0)
            reach = bisect_left(until, until[attached] + room, lo=attached + 1)
        elif self._oldest < attached:
            reach = self._needed[self._oldest]
        return min(reach, self._tensors)

    def fill(self) -> None:
        """Attaches what there is room for."""
        while (reach := self._reach()) > self._attaching.attached:
            self._outstanding += self._attaching.up_to(reach)

    def completed(self, indices: Sequence[int]) -> None:
        """These have landed; they count until they are taken."""
        for index in indices:
            self._landed[index] = True
        while self._oldest < self._tensors and self._landed[self._oldest]:
            self._oldest += 1

    def taken(self, nbytes: int) -> None:
        """The consumer has come back for more: so much is no longer ours. Attaches in batches."""
        self._outstanding -= nbytes
        if self._outstanding <= self._limit - min(self._limit, _BATCH_BYTES) // 2:
            self.fill()


_is_paused = False
"""Whether collection is off since many tensors are being made."""


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection while many tensors are made: Python would look through all objects of the process again and
    again, which takes as long as making the tensors (0.15 s for 100,000), and find nothing, as all of them are kept.

    Where it is off, by the process or for another thread's tensors, it is left as it is.
    """
    global _is_paused  # noqa: PLW0603 - collection is the whole process's
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _is_paused = True
    try:
        yield
    finally:
        _is_paused = False
        gc.enable()


def _collect_in_child() -> None:
    """The thread that paused collection may not be in a forked child."""
    global _is_paused  # noqa: PLW0603
    if _is_paused:
        _is_paused = False
        gc.enable()


os.register_at_fork(after_in_child=_collect_in_child)


Done = Callable[[LoadStats], None]


class Load:
    """One load, to be driven once: by ``stream`` or by ``collect``.

    Args:
        session: a session with nothing attached.
        planned: its tensors.
        destinations: where its tensors go.
        progress: notified of what has landed and was taken; closed when the load ends, if it was begun.
        done: called with the statistics after the last tensor.
        window_bytes: what each tensor counts for in the window of a stream, in bytes; its size where nothing is said.
    """

    def __init__(
        self,
        session: Session,
        planned: SessionTensors,
        destinations: Destinations,
        progress: Progress,
        done: Done,
        window_bytes: Sequence[int] | None = None,
    ) -> None:
        self._session = session
        self._destinations = destinations
        self._progress = progress
        self._done = done
        self.stats: LoadStats | None = None
        """Figures of this load, once it has ended well."""
        self._planned = planned
        self._window_bytes = planned.nbytes if window_bytes is None else window_bytes
        self._attaching = _Attaching(destinations, self._window_bytes)
        self._outcome: watching.Outcome = "cancelled"
        self._tell_end: Callable[[watching.Outcome, Callable[[], LoadStats]], None] | None = None

    def stream(self, limit: int) -> Iterator[tuple[str, Any]]:
        """Yields ``(name, tensor)`` as tensors land.

        At most ``limit`` bytes are attached and not yet taken by the consumer; but one tensor may always be in flight,
        and neighbours that share a block with it.
        """
        names, nbytes, window_bytes = self._planned.names, self._planned.nbytes, self._window_bytes
        try:
            self._begin()
            window = _Window(self._attaching, self._session.attached_to_land, limit)
            window.fill()
            while indices := self._session.wait():
                window.completed(indices)
                tensors = self._destinations.completed(indices)
                # Taken off the ends, so that nothing here holds what was yielded: the consumer alone decides how long
                # it lives.
                indices.reverse()
                tensors.reverse()
                while tensors:
                    index = indices.pop()
                    yield names[index], tensors.pop()
                    self._progress.advance(nbytes[index])
                    window.taken(window_bytes[index])
                window.fill()
            self._finish()
        except Exception as error:
            self._failed(error)
            raise
        finally:
            self._end()

    def cancel(self) -> None:
        """Ends the load from another thread: whoever waits for it gets ``LoadCancelledError``."""
        self._session.stop()

    def collect(self) -> dict[str, Any]:
        """All tensors by name, when all have landed."""
        names, nbytes = self._planned.names, self._planned.nbytes
        tensors: list[Any] = [None] * len(names)
        try:
            self._begin()
            with collection_paused():
                ahead = self._destinations.ahead()
                window = None if ahead is None else _Window(self._attaching, self._session.attached_to_land, ahead)
                if window is None:
                    self._attaching.up_to(len(names))
                else:
                    window.fill()
            while indices := self._session.wait():
                with collection_paused():
                    landed = self._destinations.completed(indices)
                    if window is not None:
                        window.completed(indices)
                        window.taken(sum(self._window_bytes[index] for index in indices))
                        window.fill()
                for number, index in enumerate(indices):
                    tensors[index] = landed[number]
                landed.clear()
                self._progress.advance(sum(nbytes[index] for index in indices))
            self._finish()
        except BaseException as error:
            self._failed(error)
            # The exception holds this frame: without this, whoever catches it to try again would not have the memory.
            tensors.clear()
            raise
        finally:
            self._end()
        return dict(zip(names, tensors, strict=True))

    def _begin(self) -> None:
        self._tell_end = watching.begin(self._destinations.device)
        self._progress.advance(0)

    def _failed(self, error: BaseException) -> None:
        """It did, unless its consumer closed it, another thread ended it, or Ctrl-C did."""
        if isinstance(error, Exception) and not isinstance(error, LoadCancelledError):
            self._outcome = "failed"

    def _finish(self) -> None:
        self.stats = self._session.finish()
        self._outcome = "complete"
        self._done(self.stats)

    def _end(self) -> None:
        self._session.stop()
        # Not before: until then, something may be on its way there.
        self._destinations.release()
        if self._tell_end is not None:
            self._tell_end(self._outcome, self._session.figures)
        self._progress.close()


def window_of(options: LoadOptions) -> int:
    """The window of a stream, in bytes."""
    return WINDOW_BYTES if options.window_bytes is None else options.window_bytes
