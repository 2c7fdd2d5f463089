"""How components leave: the device, without a copy back, and host memory, to be fetched again.

Promises that what was written to a component is saved before its memory goes, and that the books are exact after every
failure. All of it is called with the lock held.
"""

from __future__ import annotations

import logging

from penstock.pool.bound import Home
from penstock.pool.changes import keep_changes
from penstock.pool.component import Component
from penstock.pool.members import Members
from penstock.units import size

logger = logging.getLogger(__name__)


class Departures(Members):
    """Components that are evicted."""

    def evict_from_device(self, component: Component, reason: str, keep: int = 0) -> None:
        """Takes a component off the device's books, behind its first ``keep`` bytes or about that. Copies nothing.

        Its memory goes without the lock, after the work that was queued by the end of its last lease: ``vacating``.
        """
        if component.host is None:
            self._keep_changes(component)
            for bound in component.bound:
                bound.to(None)
        self.vacating.leave(component, keep)
        self.device.keep(component, component.arrived)
        self.stats.evicted_from_device += 1
        state = self.states[component]
        state.left_device = reason
        part = f", its first {size(component.arrived)} stayed" if component.arrived else ""
        state.note(f"left {self.memory.device}: {reason}{part}")

    def evict_from_host(self, component: Component, reason: str) -> None:
        """Frees a component's master. It is fetched again when it is wanted."""
        self._keep_changes(component)
        self.host.keep(component)
        home: Home = "device" if component.on_device else None
        for bound in component.bound:
            if bound.home == "host":
                bound.to(home)
        component.drop_host()
        self.stats.evicted_from_host += 1
        state = self.states[component]
        state.left_host = reason
        state.note(f"left host memory: {reason}")

    def _keep_changes(self, component: Component) -> None:
        """Saves what was written outside of leases, before the memory goes that it was written to."""
        for bound in list(component.bound):
            if not bound.leases and bound.home is not None and bound.is_changed():
                keep_changes(self, bound)

    def shrink(self) -> None:
        """Evicts what lowered budgets have no room for, as far as nobody holds it."""
        try:
            while self.device.used + self.vacating.reserved > self.device.budget and self.on_short():
                pass
            for victim, keep in self.device.excess():
                self.evict_from_device(victim, "the budget was lowered", keep)
            for victim, _ in self.host.excess():
                self.evict_from_host(victim, "the budget was lowered")
        except Exception as error:  # noqa: BLE001 - it is tried again with the next request
            said = "what was written to a component that has to go could not be kept"
            self.changed.later(logger.error, said, exc_info=error)
