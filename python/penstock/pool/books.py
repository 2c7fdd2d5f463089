"""What a pool has: components, what is known of each, and the books of both memories, under one lock.

The lock (``changed``) guards the books, the components' slabs and their bindings. It is held while modules are rebound,
and not while components are read or copied. Only tensors that a module has written to are copied with it held.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from penstock.errors import LoadCancelledError
from penstock.pool.component import Component
from penstock.pool.figures import PoolStats
from penstock.pool.ledger import Ledger
from penstock.pool.lock import Lock
from penstock.pool.memory import Memory
from penstock.pool.vacating import Vacating

_LINK = 20e9
"""Bytes a second to the device, before any copy was timed."""
_STORAGE = 2e9
"""Bytes a second from storage, before a component was fetched."""
_REASONS = 4
"""That are kept of a component."""


@dataclass(eq=False)
class State:
    """What is known of a component beside its slabs and the books."""

    fetching: bool = False
    copying: bool = False
    """On its way to the device, or about to be: it has been given room there."""
    keeping: bool = False
    """Its master is being copied from the device, or is about to be."""
    error: BaseException | None = None
    """What bringing it failed with last."""
    trace: TracebackType | None = None
    """Where that was."""
    beside: Sequence[Component] = ()
    """What it is fetched with."""
    fetch_seconds: float | None = None
    """What fetching it took last."""
    reasons: list[str] = field(default_factory=list)
    """Why it came or went, newest first."""
    left_host: str = ""
    """Why it left host memory last."""
    left_device: str = ""

    def note(self, reason: str) -> None:
        """Keeps a reason."""
        self.reasons = [reason, *self.reasons][:_REASONS]

    def fail(self, error: BaseException) -> None:
        """Keeps an error, without what its frames have: slabs, among others."""
        self.error, self.trace = error, error.__traceback__
        _clear(error)
        self.note(f"failed: {error}")

    def check(self) -> None:
        """Raises what bringing it failed with, if it is not on its way again."""
        if self.error is not None and not self.copying:
            # From where it was: the frames of those who were told before are theirs.
            raise self.error.with_traceback(self.trace)


class Books:
    """Components in host memory and on one device."""

    def __init__(self, memory: Memory, host_budget: int, device_budget: int) -> None:
        self.memory = memory
        self.changed = Lock()
        self.host = Ledger("host memory", host_budget, self._seconds_to_fetch)
        self.device = Ledger(str(memory.device), device_budget, self._seconds_to_copy)
        self.vacating = Vacating(self.changed, self.device)
        self.states: dict[Component, State] = {}
        self.stats = PoolStats()
        self.closed = False
        self.comparing = 0
        """How many compare masters, which must not go meanwhile."""
        self.on_moved: Callable[[], None] = self.changed.notify_all
        """Called with the lock held when something has arrived, or failed, or there may be room."""
        self.on_short: Callable[[], bool] = lambda: False
        """Called with the lock held where the device has no room: gives up some of what is reserved there for later,
        and says whether there was any.
        """

    def is_moving(self, components: Iterable[Component]) -> bool:
        """Whether any of these is on its way."""
        states = [state for state in map(self.states.get, components) if state is not None]
        return any(state.fetching or state.copying or state.keeping for state in states)

    def has_arrived(self, component: Component) -> bool:
        """Whether a component may be used on the device. Its bytes are there a moment before that is in the books."""
        return component.on_device and not self.states[component].copying

    @property
    def is_keeping(self) -> bool:
        """Whether a master is being copied from the device, so that neither may go."""
        return any(state.keeping for state in self.states.values())

    def check_open(self) -> None:
        """Raises LoadCancelledError once the pool is closed."""
        if self.closed:
            raise LoadCancelledError(cause="the pool was closed", remedy="Make another one")

    def give_back(self) -> None:
        """Gives the driver what evictions left, so that torch can have it; not while something is on its way there.

        May wait for work that is queued on the device, so it is not to be called with the lock held.
        """
        with self.changed:
            moving = self.closed or any(state.copying for state in self.states.values())
            gone = self.vacating.gone()
        if moving:
            # Whoever moves it makes its room.
            return
        self.vacating.make_room(gone)
        if self.memory.kept():
            self.memory.trim()

    def _seconds_to_fetch(self, component: Component) -> float:
        seconds = self.states[component].fetch_seconds
        return component.nbytes / _STORAGE if seconds is None else seconds

    def _seconds_to_copy(self, component: Component) -> float:
        copied = (self.stats.copied_bytes or _LINK) / (self.stats.copy_seconds if self.stats.copied_bytes else 1)
        fetching = 0 if component.host is not None else self._seconds_to_fetch(component)
        return fetching + component.nbytes / copied


def _clear(error: BaseException | None) -> None:
    """Drops the local variables of frames that an error and its causes came through."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
