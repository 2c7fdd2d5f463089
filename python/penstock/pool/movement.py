"""The movement of components: fetching masters, and copying them to the device.

Threads of two workers do that, one for masters and one for the device, without the pool's lock.

Promises that a component which is held is neither moved nor evicted, and that the books are exact after every failure.
Knows components and who is bound to them, but no models, and nothing of who waits for what: it tells ``on_moved``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import InsufficientMemoryError, PenstockError
from penstock.pool.books import State
from penstock.pool.component import Component
from penstock.pool.device_slab import DeviceSlab
from penstock.pool.lock import let_in
from penstock.pool.masters import Masters
from penstock.pool.memory import Memory
from penstock.pool.worker import Worker
from penstock.units import size

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Movement(Masters):
    """Components that come to host memory and to one device."""

    def __init__(self, memory: Memory, host_budget: int, device_budget: int) -> None:
        super().__init__(memory, host_budget, device_budget)
        self._fetcher = Worker("penstock-pool-fetch", self._fetch)
        self._copier = Worker("penstock-pool-copy", self._copy)

    def begin(self) -> None:
        """Has the threads, before anything counts on them.

        Raises:
            LoadCancelledError: once the pool is closed.
            PoolError: where the system has no more threads.
        """
        self.check_open()
        for worker in (self._fetcher, self._copier, self._keeper):
            worker.begin()

    def take_back(self, component: Component) -> None:
        """Lets a component that is wanted, and has room in the books, have its memory that is not unmapped yet."""
        self.vacating.take_back(component)
        if component.on_device:
            self.device.hold(component, component.nbytes)
            self.device.release(component)

    def want_on_device(
        self, component: Component, priority: float, reason: str, beside: Sequence[Component] = ()
    ) -> None:
        """Has a component brought to the device, where it has room. It is held until it has arrived, or failed."""
        state = self.states[component]
        if self.has_arrived(component):
            # If there is an error, it is that of a master that could not be fetched.
            state.error = None
            return
        if not state.copying:
            state.copying, state.error = True, None
            self._explain_copy(component, state, reason)
            self.device.hold(component, component.nbytes)
            if component.host is not None:
                self.host.hold(component, component.nbytes)
        if component.host is None:
            self.want_on_host(component, priority, reason, beside)
        else:
            self._copier.submit(component, priority)

    def want_on_host(
        self, component: Component, priority: float, reason: str, beside: Sequence[Component] = ()
    ) -> None:
        """Has a master fetched, if possible without evicting those that it is wanted with.

        Wanted again at a higher priority, it comes earlier.
        """
        state = self.states[component]
        if component.host is not None or state.keeping:
            return
        if not state.fetching:
            state.fetching, state.error, state.beside = True, None, beside
            again = f" again: it had left host memory: {state.left_host}" if state.left_host else ""
            state.note(f"fetched for {reason}{again}")
            if again:
                what = f"{component.name}, {size(component.nbytes)},"
                self.changed.later(logger.info, "%s is fetched for %s%s", what, reason, again)
        self._fetcher.submit(component, priority)

    def _explain_copy(self, component: Component, state: State, reason: str) -> None:
        missing = component.nbytes - component.arrived
        if component.is_whole:
            state.note(f"adapters changed for {reason}")
            return
        again = f" again: it had left: {state.left_device}" if state.left_device and component.host is not None else ""
        part = f"the last {size(missing)} " if component.arrived else ""
        state.note(f"{part}brought to {self.memory.device} for {reason}{again}")
        if again:
            what = f"{component.name}, {size(missing)},"
            self.changed.later(logger.info, "%s is copied to %s for %s%s", what, self.memory.device, reason, again)

    def _fetch(self, component: Component) -> None:
        """Brings a component from storage: straight to the device where it is wanted there, else its master."""
        with self.changed:
            state = self.states.get(component)
            if state is None or not state.fetching:
                return
        began, slab, on_host, error = time.monotonic(), None, False, None
        try:
            with self.changed:
                on_host, writes = self._take_room_on_host(component, state), component.writes
                if not on_host and not state.copying:
                    # Decided with the lock held: who wants it on the device from now on begins anew.
                    cause = f"masters that are in use leave no room for {component.name!r}, {size(component.nbytes)}"
                    refused = InsufficientMemoryError(cause=cause, remedy="Raise host_budget, or end leases")
                    self._end_fetch(component, state, None, 0, refused, began, on_host=False)
                    return
            if not on_host:
                self._read_to_device(component)
            else:
                slab = self.memory.host_slab(component.nbytes)
                component.read(dict(enumerate(component.layout.views(slab))), self.watch)
        except BaseException as raised:  # noqa: BLE001 - whatever it is, it belongs to those who wait
            error, slab = raised, None
        with self.changed:
            self._end_fetch(component, state, slab, writes, error, began, on_host=on_host)
            is_compared = self.begin_compare(component, slab)
        if slab is not None and is_compared:
            self.compare(component, slab)
        if error is None:
            self.give_back()

    def _end_fetch(
        self,
        component: Component,
        state: State,
        slab: torch.Tensor | None,
        writes: int,
        error: BaseException | None,
        began: float,
        *,
        on_host: bool,
    ) -> None:
        state.fetching = False
        try:
            if error is None:
                self._fetched(component, state, slab, writes, time.monotonic() - began)
        except BaseException as raised:  # noqa: BLE001 - what was written to it could not be kept
            error = raised
        if error is not None:
            self._failed(component, state, error, on_host=on_host)
        self.on_moved()

    def _take_room_on_host(self, component: Component, state: State) -> bool:
        """Holds room for a master; or says that there is none, or that it is read to the device. With the lock held."""
        with self.awaiting_masters():
            # A copy with an overlay is none that a master could be made of: that comes first, where it has room.
            while not state.copying or component.overlay is not None:
                if self.hold_room_on_host(component):
                    return True
                if not (self.comparing or self.is_keeping) or self.closed:
                    break
                # Masters that are held for a comparison, or are being made, may go after it.
                self.changed.wait()
        return False

    def _read_to_device(self, component: Component) -> None:
        slab = self._map(component)
        # The load copies on streams of its own, and torch's allocator knows that of copies only.
        self.memory.finish()
        views, places = component.layout.views(component.copy()), component.layout.places
        start = component.arrived
        missing = [n for n, place in enumerate(places) if place.offset + place.nbytes > start]
        component.read({number: views[number] for number in missing}, self.watch)
        slab.filled = component.nbytes
        self._apply(component, start)

    def _map(self, component: Component) -> DeviceSlab:
        """Gives a component its memory on the device; others leave it if the device has less than the budget says.

        Raises:
            InsufficientMemoryError: where that is not enough.
        """
        if component.slab is None:
            component.slab = self.memory.slab(component.nbytes)
        self.vacating.make_room()
        with self.changed:
            self.vacating.wait_until_idle(component.slab)
        while True:
            try:
                component.slab.map()
                return component.slab  # noqa: TRY300 - there is no else to go on with
            except InsufficientMemoryError:  # noqa: PERF203 - it is tried again with more room
                if self.vacating.make_room(everything=True):
                    continue
                with self.changed:
                    self.check_open()
                    victims = self.device.first_to_go()
                    if not victims and self.on_short():
                        continue
                    if not victims and not self.is_keeping:
                        raise
                    if not victims:
                        # They may go as soon as they have masters.
                        with self.awaiting_masters():
                            self.changed.wait()
                        continue
                    self.evict_from_device(victims[0], f"{self.memory.device} had no memory for {component.name}")
                self.vacating.make_room(everything=True)

    def _apply(self, component: Component, start: int) -> None:
        """Adds to a copy that is the master's from this byte on what its overlay has."""
        overlay = component.overlay
        if overlay is not None:
            overlay.refilled(component, start)
            self.stats.resent_bytes += overlay.apply(component, self.memory)

    def _fetched(
        self, component: Component, state: State, slab: torch.Tensor | None, writes: int, seconds: float
    ) -> None:
        state.fetch_seconds = seconds
        if slab is not None:
            self.set_master(component, slab, writes)
        self.stats.fetched += 1
        self.stats.fetched_bytes += component.nbytes
        self.stats.fetch_seconds += seconds
        if slab is None:
            self.keep_master(component, state)
            self._arrived(component, state)
        elif state.copying:
            # Held until it is copied.
            self._copier.submit(component)
        else:
            self.host.release(component)

    def go_on(self, component: Component, state: State) -> None:
        """As its base says."""
        if component.host is None:
            self.want_on_host(component, math.inf, "those who wait for it", state.beside)
        else:
            self.host.hold(component, component.nbytes)
            self._copier.submit(component, math.inf)

    def _copy(self, component: Component) -> None:
        """Copies a master to the device, from where it ends there."""
        with self.changed:
            state = self.states.get(component)
            if state is None or not state.copying or component.host is None:
                return
            before = component.versions()
        began, copied, error = time.monotonic(), 0, None
        try:
            copied = self._map(component).fill(component.master())
            self._apply(component, component.nbytes - copied)
        except BaseException as raised:  # noqa: BLE001 - as above
            error = raised
        with self.changed:
            if error is None and component.slab is not None and component.versions() != before and not self.closed:
                # The master was written to meanwhile: some may have been copied before that.
                component.slab.filled = 0
                self._copier.submit(component, math.inf)
                return
            self.host.release(component)
            if error is None:
                component.mixed = any(bound.home == "host" and bound.is_changed() for bound in component.bound)
                self.stats.copied += 1
                self.stats.copied_bytes += copied
                self.stats.copy_seconds += time.monotonic() - began
                self._arrived(component, state)
            else:
                self._failed(component, state, error, on_host=False)
            self.on_moved()
        self.give_back()

    def _arrived(self, component: Component, state: State) -> None:
        state.copying = False
        if component.overlay is not None and component.overlay.is_empty:
            component.overlay = None
        self.device.release(component)
        for bound in component.bound:
            if bound.leases:
                bound.to("device")

    def _failed(self, component: Component, state: State, error: BaseException, *, on_host: bool) -> None:
        state.fail(error)
        if on_host:
            self.host.release(component)
            self.host.keep(component)
        if state.copying:
            state.copying = False
            self.device.release(component)
            self.settle_books(component)

    def stop(self) -> None:
        """Has the threads end soon, without waiting for them."""
        self.closed = True
        for worker in (self._fetcher, self._copier, self._keeper):
            worker.stop()
        self.changed.notify_if_free()

    def close(self) -> None:
        """Ends the threads and drops all memory."""
        self.stop()
        with let_in():
            for worker in (self._fetcher, self._copier, self._keeper):
                worker.join()
            self.memory.synchronise()
        with self.changed:
            for component in self.states:
                for bound in component.bound:
                    bound.to(None)
                    bound.let_go()
                self.vacating.leave_for_good(component)
                component.drop_host()
        try:
            self.vacating.make_room(everything=True)
        except (PenstockError, RuntimeError):
            logger.exception("memory of %s could not be given back", self.memory.device)
