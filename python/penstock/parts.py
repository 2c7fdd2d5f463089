"""One load of many parts of tensors, each to a place of its own: the executed form of a destination plan.

A part names a tensor of a checkpoint, a box of it, and where the box's bytes go. Most go straight into existing memory.
What cannot (another dtype, memory that is not contiguous) arrives as a fresh tensor that is handed to a function, and
is dropped after it; of those, no more are in flight than a stream's window allows, so that a load of any size needs
little memory besides its destinations. Both kinds are one plan: bytes that several parts want are read once, and the
storage is kept busy whatever becomes of what has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock._native import LoadOptions, LoadStats, Session
from penstock.errors import DestinationError
from penstock.frameworks.base import Destination, WritableFramework, writable_framework
from penstock.loading import Destinations, Load, SessionTensors, window_of
from penstock.progress import Progress

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint


class Part(NamedTuple):
    """A box of a tensor, and where it goes: ``out`` existing memory, or by ``on_ready`` as a tensor of its own."""

    name: str
    ranges: Sequence[tuple[int, int]]
    """``(start, end)`` for each of the first dimensions; the others are taken whole."""
    out: Any = None
    """A contiguous tensor of the box's shape and dtype, or None."""
    on_ready: Callable[[Any], object] | None = None
    """Called with the box as a fresh tensor, as soon as that is complete, where ``out`` is None."""
    destination: Destination | None = None
    """What the framework says of ``out``, where that was asked already."""


class PartDestinations(Destinations):
    """The destinations of a session of parts. See ``penstock.loading.Destinations``."""

    def __init__(
        self, session: Session, planned: SessionTensors, parts: Sequence[Part], library: WritableFramework, device: str
    ) -> None:
        self._session = session
        self._planned = planned
        self._parts = parts
        self._library = library
        self.device = device
        self._fresh: dict[int, Any] = {}
        # All are checked before the first is written to.
        self._addresses = [0 if part.out is None else self._address(index) for index, part in enumerate(parts)]

    def attach(self, begin: int, end: int) -> None:
        planned = self._planned
        fresh = [index for index in range(begin, end) if self._parts[index].out is None]
        made, addresses = self._library.empties(
            [planned.dtypes[index] for index in fresh], [planned.shapes[index] for index in fresh], self.device
        )
        self._fresh.update(zip(fresh, made, strict=True))
        at = dict(zip(fresh, addresses, strict=True))
        places = [at[index] if index in at else self._still(index) for index in range(begin, end)]
        self._session.attach(places, self._library.consumer_stream(self.device))

    def _address(self, index: int) -> int:
        part = self._parts[index]
        place = part.destination or self._library.destination(part.name, part.out)
        if place.nbytes != self._planned.nbytes[index] or place.device != self.device or place.strides is not None:
            cause = (
                f"{self._planned.nbytes[index]} bytes of it are for a destination of {place.nbytes} on {place.device}"
            )
            raise DestinationError(tensor=part.name, cause=cause)
        return place.address

    def _still(self, index: int) -> int:
        """The address of a destination, if it is still there."""
        part, address = self._parts[index], self._addresses[index]
        if not self._library.holds(part.out, address):
            cause = "its destination was resized or moved while the load was running"
            remedy = "Leave destinations alone until load_into returns"
            raise DestinationError(tensor=part.name, cause=cause, remedy=remedy)
        return address

    def release(self) -> None:
        self._fresh.clear()

    def completed(self, indices: list[int]) -> list[Any]:
        for index in indices:
            on_ready = self._parts[index].on_ready
            tensor = self._fresh.pop(index, None)
            if tensor is not None and on_ready is not None:
                on_ready(tensor)
        return [None] * len(indices)


def load_parts(
    checkpoint: Checkpoint,
    parts: Sequence[Part],
    device: str,
    progress: Progress,
    options: LoadOptions | None = None,
    begun: Callable[[Load], object] | None = None,
    library: WritableFramework | None = None,
) -> LoadStats:
    """Loads ``parts`` to one device, and returns when all are where they belong.

    Destinations must not overlap: nothing is said of the order in which they are written.

    Args:
        checkpoint: where from.
        parts: of its tensors; of one tensor as many as there are uses for it.
        device: ``"cpu"`` or ``"cuda:N"``, where all of ``out`` are and the tensors for ``on_ready`` come to be.
        progress: notified of the bytes of parts.
        options: settings of this load.
        begun: given the load before anything is read, so that another thread can cancel it.
        library: of which framework the tensors are; torch by default.

    Raises:
        DestinationError: for a destination of another size or device than its part; it has not been written to.
        SelectionError, TensorNotFoundError, StorageError, LocationChangedError, InsufficientMemoryError: see ``load``.
    """
    options = checkpoint.options if options is None else options
    wanted = [(part.name, list(part.ranges)) for part in parts]
    target = "host" if device == "cpu" else device
    session = checkpoint.core.session_of_parts(wanted, target, options)
    planned = SessionTensors(*session.tensors)
    ordered = [parts[item] for item in session.items]
    places = PartDestinations(
        session, planned, ordered, writable_framework("pt") if library is None else library, device
    )
    # What goes into existing memory needs no room: only the rest counts towards the window.
    counted = [0 if part.out is not None else size for part, size in zip(ordered, planned.nbytes, strict=True)]
    load = Load(session, planned, places, progress, _nobody, counted)
    if begun is not None:
        begun(load)
    if any(counted):
        for _ in load.stream(window_of(options)):
            pass
    else:
        load.collect()
    assert load.stats is not None  # noqa: S101 - a load that ended without an exception has them
    return load.stats


def _nobody(stats: LoadStats) -> None:
    """Nobody is notified: the caller gets the figures."""
