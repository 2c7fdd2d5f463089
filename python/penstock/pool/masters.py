"""How masters come of components that were read straight to the device: they are copied from there, behind the request.

So a model that comes from storage can be used once it is on the device. Allocating and pinning its masters, which takes
longer than copying them, happens while it is used already. The bytes are read from storage once: again only where a
module wrote to them meanwhile.

Promises that a master has the bytes of storage, or those that were kept of writes, and that a component whose master is
being made stays on the device.
"""

from __future__ import annotations

import logging
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

    def keep_master(self, component: Component, state: State) -> None:
        """Has a master made of what is on the device. Host memory has room, which is held. With the lock held."""
        state.keeping = True
        self.device.hold(component, component.nbytes)
        self._keeper.submit(component)

    def watch(self, done: int, total: int) -> None:
        """Ends a load that nobody wants any more."""
        del done, total
        if self.closed:
            raise LoadCancelledError(cause="the pool was closed")

    def set_master(self, component: Component, slab: torch.Tensor) -> None:
        """Makes a slab a component's master. With the lock held.

        Raises:
            Exception: where what was written to it outside of leases could not be kept; then nothing has changed.
        """
        self._keep_changes(component, but_in=slab)
        component.host = slab
        for bound in component.bound:
            if bound.home is None or not bound.leases:
                bound.to("host")

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

    def _keep(self, component: Component) -> None:
        with self.changed:
            state = self.states.get(component)
            if state is None or not state.keeping:
                return
        error, slab = None, None
        try:
            slab = self.memory.host_slab(component.nbytes)
            if not self._copy_unwritten(component, slab):
                component.read(dict(enumerate(component.layout.views(slab))), self.watch)
        except BaseException as raised:  # noqa: BLE001 - the component stays without a master
            error, slab = raised, None
        with self.changed:
            state.keeping = False
            self.device.release(component)
            try:
                if slab is not None:
                    self.set_master(component, slab)
            except BaseException as raised:  # noqa: BLE001 - what was written to it could not be kept
                error = raised
            self.host.release(component)
            if error is not None:
                self.host.keep(component)
                state.note(f"has no master: {error}")
                if not self.closed:
                    logger.warning("%s stays without a copy in host memory: %s", component, error)
            self.settle_books(component)
            self.on_moved()
            is_compared = self.begin_compare(component, slab)
        if slab is not None and is_compared:
            self.compare(component, slab)

    def _copy_unwritten(self, component: Component, slab: torch.Tensor) -> bool:
        """Copies a component from the device, and says whether no module wrote to it before that was done."""
        with self.changed:
            writes = component.writes
            if _is_written(component) or (component.overlay is not None and component.overlay.touches_copy):
                return False
        self.memory.to_host(slab, component.copy())
        with self.changed:
            return component.writes == writes and not _is_written(component)


def _is_written(component: Component) -> bool:
    """Whether there are writes to its copy on the device that nobody has dealt with yet."""
    return any(bound.home == "device" and bound.is_changed() for bound in component.bound)
