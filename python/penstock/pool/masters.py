"""How masters come of components that were read straight to the device: they are copied from there, behind the request.

So a model that comes from storage can be used once it is on the device. Allocating and pinning its masters, which takes
longer than copying them, happens while it is used already, and not while others are read to the device, unless someone
waits for it. The bytes are read from storage once: again only where a module wrote to them meanwhile.

Promises that a master has the bytes of storage, or those that were kept of writes, whenever these came; and that a
component whose master is being made stays on the device. The thread that makes masters waits for reads to the device,
and for comparisons; for nothing as long as a thread waits for masters (``awaiting_masters``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.errors import LoadCancelledError
from penstock.pool.books import State
from penstock.pool.component import Component
from penstock.pool.departures import Departures
from penstock.pool.memory import Memory
from penstock.pool.worker import Worker

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Masters(Departures):
    """Components of which host memory keeps a copy."""

    def __init__(self, memory: Memory, host_budget: int, device_budget: int) -> None:
        super().__init__(memory, host_budget, device_budget)
        self._keeper = Worker("penstock-pool-keep", self._keep)
        self._awaiting = 0
        """Threads that wait for masters to be made."""

    def keep_master(self, component: Component, state: State) -> None:
        """Has a master made of what is on the device, if host memory has room by then. With the lock held."""
        if component.nbytes <= self.host.budget:
            state.keeping = True
            self.device.hold(component, component.nbytes)
            self._keeper.submit(component)

    @contextmanager
    def awaiting_masters(self) -> Iterator[None]:
        """Around a wait that may be one for masters: they are made at once. With the lock held."""
        self._awaiting += 1
        if self.is_keeping:
            self.changed.notify_all()
        try:
            yield
        finally:
            self._awaiting -= 1

    def watch(self, done: int, total: int) -> None:
        """Ends a load that nobody wants any more."""
        del done, total
        if self.closed:
            raise LoadCancelledError(cause="the pool was closed")

    def set_master(self, component: Component, slab: torch.Tensor, writes: int) -> None:
        """Makes a slab a component's master, with what was written since ``component.writes`` were so many. With the
        lock held.

        Raises:
            Exception: where what was written to it outside of leases could not be kept; then nothing has changed.
        """
        self._keep_changes(component)
        if component.writes != writes:
            # The slab was filled before these were dealt with.
            for number, value in component.kept.items():
                component.layout.places[number].of(slab).copy_(value)
        component.host = slab
        for bound in component.bound:
            if bound.home is None or not bound.leases:
                bound.to("host")

    def hold_room_on_host(self, component: Component) -> bool:
        """Evicts what is in a master's way, and holds its room; or says that there is none. With the lock held."""
        wanted = [(component, component.nbytes)]
        family = [(one, one.nbytes) for one in self.states[component].beside if one in self.host]
        room = self.host.room_for([*family, *wanted])
        room = self.host.room_for(wanted) if room is None else room
        for victim, _ in room or ():
            self.evict_from_host(victim, f"made room for {component.name}")
        if room is not None:
            self.host.hold(component, component.nbytes)
        return room is not None

    def begin_compare(self, component: Component, slab: torch.Tensor | None) -> bool:
        """Whether a slab became a master, to be compared. Called with the lock that it came under still held."""
        is_master = slab is not None and component.host is slab
        self.comparing += is_master
        return is_master

    def compare(self, component: Component, slab: torch.Tensor) -> None:
        """Looks for another component of the same bytes, to become one with it, after ``begin_compare``."""
        twin = None
        try:
            twin = self._twins.find(component, slab)
        finally:
            with self.changed:
                self.comparing -= 1
                if twin is not None and component.host is slab:
                    self._twins.note(component, twin)
                self._twins.merge_idle()
                self.on_moved()

    def go_on(self, component: Component, state: State) -> None:
        """Brings to the device what was wanted there while its master was made. With the lock held."""
        raise NotImplementedError

    def _keep(self, component: Component) -> None:
        with self.changed:
            state = self.states.get(component)
            if state is None or not state.keeping:
                return
        error, slab, writes, on_host = None, None, 0, False
        try:
            with self.changed:
                on_host = self._begin_keeping(component)
            if on_host:
                slab, writes = self._filled(component)
        except BaseException as raised:  # noqa: BLE001 - the component stays without a master
            error, slab = raised, None
        with self.changed:
            state.keeping = False
            self.device.release(component)
            try:
                if slab is not None:
                    self.set_master(component, slab, writes)
            except BaseException as raised:  # noqa: BLE001 - what was written to it could not be kept
                error = raised
            self._end_keeping(component, state, error, on_host=on_host)
            is_compared = self.begin_compare(component, slab)
        if slab is not None and is_compared:
            self.compare(component, slab)
        self.give_back()

    def _begin_keeping(self, component: Component) -> bool:
        """Waits for its turn, and says whether host memory has room, which is held then."""
        while any(state.fetching and state.copying for state in self.states.values()) and self._has_time:
            self.changed.wait()
        while not self.hold_room_on_host(component):
            if not self.comparing or not self._has_time:
                return False
            # Masters that are held for a comparison may go after it.
            self.changed.wait()
        return True

    @property
    def _has_time(self) -> bool:
        return not self._awaiting and not self.closed

    def _end_keeping(self, component: Component, state: State, error: BaseException | None, *, on_host: bool) -> None:
        if on_host:
            self.host.release(component)
            if error is not None:
                self.host.keep(component)
        if error is None and not on_host:
            state.note("has no master: host memory had no room")
        if error is not None:
            state.note(f"has no master: {error}")
            if not self.closed:
                said = "%s stays without a copy in host memory: %s"
                self.changed.later(logger.warning, said, component, error)
        if state.copying:
            self.go_on(component, state)
        self.settle_books(component)
        self.on_moved()

    def _filled(self, component: Component) -> tuple[torch.Tensor, int]:
        """Host memory with a component's bytes, and its ``writes`` for which these are right."""
        slab = self.memory.host_slab(component.nbytes)
        with self.changed:
            writes, right = component.writes, _is_right(component)
        if right:
            self.memory.to_host(slab, component.copy())
            with self.changed:
                if component.writes == writes and _is_right(component):
                    return slab, writes
                writes = component.writes
        component.read(dict(enumerate(component.layout.views(slab))), self.watch)
        return slab, writes


def _is_right(component: Component) -> bool:
    """Whether its copy on the device is the master's, without writes that nobody has dealt with yet."""
    has_more = component.overlay is not None and component.overlay.touches_copy
    written = any(bound.home == "device" and bound.is_changed() for bound in component.bound)
    return component.is_whole and not has_more and not written
