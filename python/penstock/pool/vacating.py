"""Memory on the device that components have left in the books, and that is still to be unmapped.

A component leaves the books at once, with the pool's lock held. Its memory goes later and without the lock, since
unmapping waits for work that is queued on the device: in the thread that needs the room, before it maps any
(``make_room``). Wanted again before that, a component has its bytes still (``take_back``).

Promises that after ``make_room`` the books, workspaces and what has not been unmapped are within the budget, as far as
the books are; that a slab is unmapped by one thread, while nobody maps it; and that memory which could not be unmapped
stays known. Knows no budgets but the device's, and nothing of who wants what.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from penstock.pool.component import Component
from penstock.pool.device_slab import DeviceSlab
from penstock.pool.ledger import Ledger
from penstock.pool.lock import Lock, deferred, let_in


@dataclass(eq=False)
class Leaving:
    """A slab whose memory behind ``keep`` is to go."""

    component: Component
    slab: DeviceSlab
    points: list[Any]
    """Work on the device that may still use it."""
    filled: int
    """Bytes that were there and right, and are so until it is unmapped."""
    edits: int
    """Of its component: the number for which they are right."""
    keep: int
    closes: bool = False
    """Whether all of it goes, for good."""
    running: bool = False
    """Whether a thread is unmapping it."""
    wanted: bool = False
    """Whether the component came back while that thread was at it."""

    @property
    def nbytes(self) -> int:
        """That are to go, and have not gone yet."""
        return max(self.slab.device_bytes - self.keep, 0)


class Vacating:
    """Slabs that have memory to give up, oldest first."""

    def __init__(self, changed: Lock, device: Ledger) -> None:
        self._changed, self._device = changed, device
        self._leaving: dict[DeviceSlab, Leaving] = {}
        self.reserved = 0
        """Bytes of the device that leases want to stay free beside the books."""

    @property
    def nbytes(self) -> int:
        """Of the device, out of the books and still there."""
        return sum(one.nbytes for one in self._leaving.values())

    def bytes_of(self, slab: DeviceSlab | None) -> int:
        """As ``nbytes``, of one slab."""
        one = None if slab is None else self._leaving.get(slab)
        return 0 if one is None else one.nbytes

    # With the lock held

    def leave(self, component: Component, keep: int = 0) -> None:
        """Has a component's memory go, behind about the first ``keep`` bytes. Modules must not be bound to it."""
        slab = component.slab
        if slab is None:
            return
        if not slab.is_stable:
            # This waits for nothing.
            component.drop_device(keep)
            return
        keep -= keep % slab.granularity
        one = self._leaving.get(slab) or self._enter(component, slab, keep)
        one.keep, one.wanted = min(one.keep, keep), False
        slab.filled = min(slab.filled, one.keep)
        if not one.nbytes and not one.running:
            del self._leaving[slab]

    def leave_for_good(self, component: Component) -> None:
        """Has all of a component's memory go, and its addresses."""
        slab = component.slab
        if slab is not None and slab.is_stable:
            one = self._leaving.get(slab) or self._enter(component, slab, 0)
            one.keep, one.closes, one.wanted = 0, True, False
            slab.filled = 0
            component.slab, component.points = None, []
        component.give_up_device()

    def take_back(self, component: Component) -> None:
        """Lets a component have what has not been unmapped yet: it is wanted again, and has room in the books."""
        one = None if component.slab is None else self._leaving.get(component.slab)
        if one is None:
            return
        if one.running:
            one.wanted = True
            return
        del self._leaving[one.slab]
        if one.edits == component.edits:
            one.slab.filled = max(one.slab.filled, one.filled)

    def wait_until_idle(self, slab: DeviceSlab) -> None:
        """Waits until no thread unmaps a slab."""
        while slab in self._leaving and self._leaving[slab].running:
            self._changed.wait()

    def _enter(self, component: Component, slab: DeviceSlab, keep: int) -> Leaving:
        made = Leaving(component, slab, list(component.points), slab.filled, component.edits, keep)
        self._leaving[slab] = made
        return made

    def gone(self) -> set[DeviceSlab]:
        """What goes for good, and nobody unmaps yet: it comes back never, so it may go whenever there is time."""
        return {one.slab for one in self._leaving.values() if one.closes and not one.running}

    # Without it

    def make_room(self, named: Container[DeviceSlab] = (), *, everything: bool = False) -> int:
        """Unmaps what has left until the rest fits beside the books, and besides what is named, or everything.

        Returns:
            The bytes that are free now.

        Raises:
            PenstockError, RuntimeError: where the device refuses. What was not unmapped is tried again the next time.
        """
        freed = 0
        with deferred():
            while True:
                with self._changed:
                    one = self._next(named, everything=everything)
                    if one is None:
                        return freed
                    one.running, before, keep = True, one.slab.device_bytes, one.keep
                try:
                    with let_in():
                        if one.closes:
                            one.slab.close(one.points)
                        else:
                            one.slab.evict(one.points, keep)
                finally:
                    with self._changed:
                        freed += max(before - one.slab.device_bytes, 0)
                        self._end(one)
                        self._changed.notify_all()

    def _next(self, named: Container[DeviceSlab], *, everything: bool) -> Leaving | None:
        """The next one that has to go; waits for those that other threads are at."""
        while True:
            over = everything or self._device.used + self.reserved + self.nbytes > self._device.budget
            due = [one for one in self._leaving.values() if over or one.slab in named]
            idle = next((one for one in due if not one.running), None)
            if idle is not None or not due:
                return idle
            self._changed.wait()

    def _end(self, one: Leaving) -> None:
        one.running = False
        one.filled = min(one.filled, one.slab.device_bytes)
        if one.nbytes and not one.wanted:
            # It was not unmapped, or more of it has left meanwhile.
            return
        del self._leaving[one.slab]
        component = one.component
        if component.slab is one.slab and not one.slab.device_bytes:
            component.points = [point for point in component.points if point not in one.points]
