"""Where components are: fetching masters, copying to the device, evicting, and waiting for room.

One lock guards the books, the components' slabs and their bindings. It is held while modules are rebound, and never
while bytes are read or copied: threads of two workers do that, one for masters and one for the device.

Promises that a component which is held is neither moved nor evicted; that requests are admitted in the order in which
they came, but for those of threads that hold a lease which others wait for; that threads which could only wait for
each other get an error instead; and that the books are exact after every failure. Knows components, but no models.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import InsufficientMemoryError, LoadCancelledError, PoolError
from penstock.pool.component import Component
from penstock.pool.figures import PoolStats
from penstock.pool.ledger import Ledger
from penstock.pool.memory import Memory
from penstock.pool.worker import Worker
from penstock.units import size

logger = logging.getLogger(__name__)

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
    error: BaseException | None = None
    """What bringing it failed with last."""
    reasons: list[str] = field(default_factory=list)
    """Why it came or went, newest first."""

    def note(self, reason: str) -> None:
        """Keeps a reason."""
        self.reasons = [reason, *self.reasons][:_REASONS]


@dataclass(eq=False)
class Request:
    """Components that are wanted on the device together."""

    name: str
    components: Sequence[Component]
    workspace: int = 0
    """Bytes of the device that are to stay free beside them."""
    priority: float = 0
    thread: int | None = None
    """Who waits for it, and so cannot end leases meanwhile; None for a prefetch."""
    future: Future[None] = field(default_factory=Future)
    """Of a prefetch."""

    @property
    def is_prefetch(self) -> bool:
        """Whether nobody waits for room in a call."""
        return self.thread is None

    @property
    def sizes(self) -> list[tuple[Component, int]]:
        """The components with their bytes."""
        return [(component, component.nbytes) for component in self.components]


class Residency:
    """Components in host memory and on one device."""

    def __init__(self, memory: Memory, host_budget: int, device_budget: int) -> None:
        self.memory = memory
        self.changed = threading.Condition(threading.RLock())
        self.host = Ledger("host memory", host_budget, self._seconds_to_fetch)
        self.device = Ledger(str(memory.device), device_budget, self._seconds_to_copy)
        self.states: dict[Component, State] = {}
        self.granted: list[Request] = []
        """Requests whose components are held on the device: leases."""
        self.stats = PoolStats()
        self.closed = False
        self._waiting: list[Request] = []
        self._arriving: list[Request] = []
        """Prefetches that have begun."""
        self._fetcher = Worker("penstock-pool-fetch", self._fetch)
        self._copier = Worker("penstock-pool-copy", self._copy)
        self._futures = Worker("penstock-pool-futures", _finish)

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    # Requests

    def admit(self, request: Request) -> None:
        """Waits until a request's components can be on the device together, and holds them there.

        Raises:
            InsufficientMemoryError: where that can never be.
            PoolError: where threads that hold leases could only wait for each other.
            LoadCancelledError: where the pool was closed meanwhile.
        """
        began = time.monotonic()
        with self.changed:
            self._check_open()
            self.device.check_fits(request.name, _bytes(request.components), request.workspace)
            self._waiting.append(request)
            self.changed.notify_all()
            try:
                while not self._try(request):
                    self._check_not_stuck(request)
                    self.changed.wait()
                    self._check_open()
            finally:
                self._waiting.remove(request)
                self._go_on()
            self.granted.append(request)
            self.stats.queue_seconds += time.monotonic() - began

    def prefetch(self, request: Request) -> None:
        """Brings a request's components to the device as soon as there is room, without holding them afterwards.

        Raises:
            InsufficientMemoryError: where that can never be.
        """
        with self.changed:
            self._check_open()
            self.device.check_fits(request.name, _bytes(request.components), request.workspace)
            self._waiting.append(request)
            self._go_on()

    def fetch(self, request: Request) -> None:
        """Fetches the masters of a request's components, without holding them afterwards.

        Raises:
            InsufficientMemoryError: where the host budget can never have all of them.
        """
        with self.changed:
            self._check_open()
            self.host.check_fits(request.name, _bytes(request.components))
            request.future.set_running_or_notify_cancel()
            for component in request.components:
                self._want_on_host(component, request.priority, f"prefetch of {request.name}")
            self._arriving.append(request)
            self._go_on()

    def end(self, request: Request, points: list[Any]) -> None:
        """Ends a lease. ``points`` are work on the device that may still use its components."""
        with self.changed:
            self.granted.remove(request)
            for component in request.components:
                component.points = points
                self.device.release(component)
                self._drop_if_absent(component)
            self._go_on()

    def wait_for(self, component: Component) -> None:
        """Waits until a component that is held has arrived on the device.

        Raises:
            Exception: what bringing it failed with.
            LoadCancelledError: where the pool was closed meanwhile.
        """
        with self.changed:
            state = self.states[component]
            while component.device is None:
                if state.error is not None and not state.copying:
                    raise state.error
                self._check_open()
                self.changed.wait()

    def settle(self, components: Iterable[Component]) -> None:
        """Waits until none of these is on its way."""
        with self.changed:
            of = list(components)
            while self._is_moving(of) and not self.closed:
                self.changed.wait()

    def _try(self, request: Request) -> bool:
        """Gives a request its room, if it is its turn and there is enough."""
        missing = [component for component in request.components if component not in self.device]
        holders = {granted.thread for granted in self.granted}
        # Whoever holds what others wait for comes first, or nobody would go on.
        if missing and request.thread not in holders and any(not other.is_prefetch for other in self._before(request)):
            return False
        reserved = sum(granted.workspace for granted in self.granted)
        victims = self.device.room_for(request.sizes, request.workspace + reserved)
        if victims is None:
            return False
        self.device.begin_request()
        for victim in victims:
            self.evict_from_device(victim, f"made room for {request.name}")
        for component in request.components:
            if not request.is_prefetch:
                self.device.hold(component, component.nbytes)
            self._want_on_device(component, request)
            self.device.touch(component)
        return True

    def _before(self, request: Request) -> list[Request]:
        return self._waiting[: self._waiting.index(request)]

    def _go_on(self) -> None:
        """Lets those who wait look again, and begins prefetches for which there is room now."""
        self._shrink()
        for request in sorted((one for one in self._waiting if one.is_prefetch), key=lambda one: -one.priority):
            if request.future.cancelled():
                self._waiting.remove(request)
            elif self._try(request):
                self._waiting.remove(request)
                if request.future.set_running_or_notify_cancel():
                    self._arriving.append(request)
        for request in [one for one in self._arriving if not self._is_moving(one.components)]:
            self._arriving.remove(request)
            errors = [state.error for state in map(self.states.get, request.components) if state and state.error]
            # In another thread, and without the lock: a future's callbacks are anyone's.
            self._futures.submit((request.future, errors[0] if errors else None))
        self.changed.notify_all()

    def _is_moving(self, components: Iterable[Component]) -> bool:
        states = [state for state in map(self.states.get, components) if state is not None]
        return any(state.fetching or state.copying for state in states)

    def _check_not_stuck(self, request: Request) -> None:
        """Refuses to wait for leases whose threads all wait too."""
        waiting = {one.thread for one in self._waiting}
        holders = {granted.thread for granted in self.granted}
        moving = any(state.copying for state in self.states.values())
        stuck = [one for one in self._waiting if one.thread in holders]
        if not holders or moving or not holders <= waiting or stuck[-1] is not request:
            return
        held = ", ".join(sorted({granted.name for granted in self.granted}))
        cause = (
            f"there is no room for {request.name} beside {held}, whose leases are held by threads that wait for room"
        )
        remedy = "End a lease before using another model, use both in one lease, or raise device_budget"
        raise PoolError(cause=cause, remedy=remedy)

    # Coming

    def _want_on_device(self, component: Component, request: Request) -> None:
        state = self.states[component]
        if component.device is not None or state.copying:
            return
        state.copying, state.error = True, None
        state.note(f"brought to {self.memory.device} for {request.name}")
        self.device.hold(component, component.nbytes)
        if component.host is None:
            self._want_on_host(component, request.priority, request.name)
        else:
            self.host.hold(component, component.nbytes)
            self._copier.submit(component, request.priority)

    def _want_on_host(self, component: Component, priority: float, reason: str) -> None:
        state = self.states[component]
        if component.host is None and not state.fetching:
            state.fetching, state.error = True, None
            state.note(f"fetched for {reason}")
            self._fetcher.submit(component, priority)

    def _fetch(self, component: Component) -> None:
        """Brings a master from storage; straight to the device where host memory has no room for it."""
        state, began = self.states.get(component), time.monotonic()
        if state is None:
            return
        on_host = self._take_room_on_host(component)
        slab, error = None, None
        try:
            if on_host:
                slab = self.memory.host_slab(component.nbytes)
            elif state.copying:
                slab = self.memory.device_slab(component.nbytes)
            else:
                cause = f"masters that are in use leave no room for {component.name!r}, {size(component.nbytes)}"
                raise InsufficientMemoryError(cause=cause, remedy="Raise host_budget, or end leases")  # noqa: TRY301
            component.fill(slab)
        except BaseException as raised:  # noqa: BLE001 - whatever it is, it belongs to those who wait
            slab, error = None, raised
        with self.changed:
            state.fetching = False
            if slab is None or error is not None:
                self._failed(component, state, error, on_host=on_host)
            else:
                self._fetched(component, state, slab, on_host, time.monotonic() - began)
            self._go_on()

    def _take_room_on_host(self, component: Component) -> bool:
        """Evicts what is in a master's way, and holds its room; or says that there is none."""
        with self.changed:
            room = self.host.room_for([(component, component.nbytes)])
            for victim in room or ():
                self.evict_from_host(victim, f"made room for {component.name}")
            if room is not None:
                self.host.hold(component, component.nbytes)
            return room is not None

    def _fetched(self, component: Component, state: State, slab: Any, on_host: bool, seconds: float) -> None:
        component.read_seconds = seconds
        self.stats.fetched += 1
        self.stats.fetched_bytes += component.nbytes
        self.stats.fetch_seconds += seconds
        if not on_host:
            self._arrived(component, state, slab)
            return
        component.host = slab
        component.rebind()
        if state.copying:
            # Held until it is copied.
            self._copier.submit(component)
        else:
            self.host.release(component)

    def _copy(self, component: Component) -> None:
        """Copies a master to the device."""
        state, began = self.states.get(component), time.monotonic()
        if state is None:
            return
        slab, error = None, None
        try:
            slab = self.memory.device_slab(component.nbytes)
            self.memory.to_device(slab, component.master())
        except BaseException as raised:  # noqa: BLE001 - as above
            slab, error = None, raised
        with self.changed:
            self.host.release(component)
            if error is None:
                seconds = time.monotonic() - began
                self.stats.copied += 1
                self.stats.copied_bytes += component.nbytes
                self.stats.copy_seconds += seconds
                self._arrived(component, state, slab)
            else:
                self._failed(component, state, error, on_host=False)
            self._go_on()

    def _arrived(self, component: Component, state: State, slab: Any) -> None:
        component.device = slab
        component.rebind()
        state.copying = False
        self.device.release(component)

    def _failed(self, component: Component, state: State, error: BaseException | None, *, on_host: bool) -> None:
        state.error = error
        state.note(f"failed: {error}")
        if on_host:
            self.host.release(component)
            self.host.remove(component)
        if state.copying:
            state.copying = False
            self.device.release(component)
            self._drop_if_absent(component)

    def _drop_if_absent(self, component: Component) -> None:
        """Takes what never came, and nobody waits for, out of the device's books."""
        gone = component.device is None and not self.device.is_held(component)
        if gone and component in self.device:
            self.device.remove(component)

    # Going

    def evict_from_device(self, component: Component, reason: str) -> None:
        """Frees a component's memory on the device. Copies nothing."""
        self.device.remove(component)
        # Whoever gets its memory next waits for what still uses it.
        self.memory.after(component.points)
        component.device, component.points = None, []
        component.rebind()
        self.stats.evicted_from_device += 1
        self.states[component].note(f"left {self.memory.device}: {reason}")

    def evict_from_host(self, component: Component, reason: str) -> None:
        """Frees a component's master. It is fetched again when it is wanted."""
        self.host.remove(component)
        component.host = None
        component.rebind()
        self.stats.evicted_from_host += 1
        self.states[component].note(f"left host memory: {reason}")

    def resize(self, host: int | None, device: int | None) -> None:
        """Changes budgets."""
        with self.changed:
            self.host.budget = self.host.budget if host is None else host
            self.device.budget = self.device.budget if device is None else device
            self._go_on()

    def _shrink(self) -> None:
        """Evicts what lowered budgets have no room for, as far as nobody holds it."""
        for ledger, evict in ((self.device, self.evict_from_device), (self.host, self.evict_from_host)):
            for victim in ledger.first_to_go() if ledger.used > ledger.budget else ():
                if ledger.used > ledger.budget:
                    evict(victim, "the budget was lowered")

    def add(self, component: Component) -> None:
        """Enters a component that is nowhere yet."""
        self.states[component] = State()

    def forget(self, component: Component) -> None:
        """Drops a component that nobody holds and nobody waits for."""
        for ledger in (self.device, self.host):
            ledger.forget(component)
        component.host = component.device = None
        del self.states[component]

    def close(self) -> None:
        """Ends the threads and drops all memory. Who waits gets ``LoadCancelledError``."""
        with self.changed:
            self.closed = True
            for request in self._waiting:
                request.future.cancel()
            self.changed.notify_all()
        self._fetcher.close()
        self._copier.close()
        self._futures.close()
        with self.changed:
            for request in self._arriving:
                _finish((request.future, LoadCancelledError(cause="the pool was closed")))
            self._arriving.clear()
            for component in self.states:
                component.host = component.device = None
                component.rebind()
            self.changed.notify_all()

    def _check_open(self) -> None:
        if self.closed:
            raise LoadCancelledError(cause="the pool was closed", remedy="Make another one")

    def _seconds_to_fetch(self, component: Component) -> float:
        return component.nbytes / _STORAGE if component.read_seconds is None else component.read_seconds

    def _seconds_to_copy(self, component: Component) -> float:
        copied = self.stats.copied_bytes / self.stats.copy_seconds if self.stats.copy_seconds else _LINK
        fetching = 0 if component.host is not None else self._seconds_to_fetch(component)
        return fetching + component.nbytes / copied


def _finish(done: tuple[Future[None], BaseException | None]) -> None:
    future, error = done
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _bytes(components: Iterable[Component]) -> int:
    return sum(component.nbytes for component in components)
