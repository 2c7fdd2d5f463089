"""Requests for components, and their order.

Whoever asks waits; whoever changes anything grants what can be granted then, in order (``serve``). So nobody is passed
over because another thread took the lock first.

Promises that requests are granted in the order in which they came, with two exceptions: a thread that holds a lease
comes first, since others may wait for that lease; and what needs nothing moved may overtake those that wait for room,
at most ``OVERTAKING`` times each. That threads which could only wait for each other get an error instead. And that
prefetches go behind requests that someone waits for. Knows no models. All of it is called with the lock held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import InsufficientMemoryError, LoadCancelledError, PoolError
from penstock.pool.bound import Bound
from penstock.pool.changes import keep_changes
from penstock.pool.component import Component
from penstock.pool.movement import Movement
from penstock.pool.worker import Worker
from penstock.units import size

OVERTAKING = 8
"""How often a request that waits for room is overtaken by those that need none."""
CANCELLED = LoadCancelledError(cause="the prefetch was cancelled")
"""What is handed to a future that is to be cancelled."""
_URGENT = float("inf")
"""The priority of what someone waits for."""


@dataclass(eq=False)
class Request:
    """Components that are wanted on the device together."""

    name: str
    bounds: Callable[[], Sequence[Bound]]
    """The modules that are to be used, as they are bound when it is granted. Raises where there is nothing any more."""
    workspace: int = 0
    """Bytes of the device that are to stay free beside them."""
    thread: int | None = None
    """Who waits for it, and so cannot end leases meanwhile; None for a prefetch."""
    lends: bool = True
    """Whether modules get the copies on the device, as in a lease; a pin and a prefetch only bring these."""
    priority: float = _URGENT
    future: Future[None] = field(default_factory=Future)
    """Of a prefetch."""
    held: list[Component] = field(default_factory=list)
    """Its components, once it is granted."""
    lent: list[Bound] = field(default_factory=list)
    beside: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Bytes of the device that are needed beside components and workspace, for adapters: in all, and what of that is
    not there."""
    adapters: int = 0
    """What of these is kept free for it, once it is granted."""
    streams: list[Any] = field(default_factory=list)
    """That its components are used on beside the current one."""
    error: BaseException | None = None
    """Why it never will be granted."""
    granted: bool = False
    overtaken: int = 0
    pool: Any = None
    """What a prefetch keeps until it is done, though its caller may have dropped it."""

    @property
    def is_prefetch(self) -> bool:
        """Whether nobody waits for room in a call."""
        return self.thread is None


class Turns:
    """Those that wait, and those that were granted: leases and pins."""

    def __init__(self, movement: Movement) -> None:
        self.movement = movement
        self.changed = movement.changed
        self.granted: list[Request] = []
        self._waiting: list[Request] = []
        self._arriving: list[Request] = []
        """Prefetches that have begun."""
        self._futures = Worker("penstock-pool-futures", finish)
        movement.on_moved = self.serve

    def serve(self) -> None:
        """Grants what can be granted, begins prefetches for which there is room, and wakes those who wait."""
        if self.movement.closed:
            self.changed.notify_all()
            return
        self.movement.shrink()
        for request in [one for one in self._waiting if not one.is_prefetch]:
            self._consider(request)
        for request in sorted((one for one in self._waiting if one.is_prefetch), key=lambda one: -one.priority):
            if request.future.cancelled():
                self._waiting.remove(request)
            elif not any(not one.is_prefetch for one in self._waiting):
                self._consider(request)
        for request in [one for one in self._arriving if not self.movement.is_moving(one.held)]:
            self._arriving.remove(request)
            errors = [state.error for state in map(self.movement.states.get, request.held) if state and state.error]
            # In another thread, and without the lock: a future's callbacks are anyone's.
            self._futures.submit((request, errors[0] if errors else None))
        self._refuse_stuck()
        self.changed.notify_all()

    def _consider(self, request: Request) -> None:
        """Grants a request if it is its turn and there is enough room; or notes why it is refused."""
        try:
            self._grant_if_possible(request)
        except Exception as error:  # noqa: BLE001 - it is that of this request: others have their turn
            if request in self._waiting:
                self._waiting.remove(request)
            request.error = error
            if request.is_prefetch and (request.future.running() or request.future.set_running_or_notify_cancel()):
                self._futures.submit((request, error))

    def _grant_if_possible(self, request: Request) -> None:
        bounds = request.bounds()
        components = components_of(bounds)
        self._check_fits(request, components)
        before = [one for one in self._waiting[: self._waiting.index(request)] if not one.is_prefetch]
        if not self._has_its_turn(request, before, components) or not self._keep_changes(bounds):
            return
        # What was written to may be a component of its own now, beside the one that a pin keeps.
        components = components_of(bounds)
        self._check_fits(request, components)
        sizes = [(component, component.nbytes) for component in components]
        movement = self.movement
        while True:
            _, request.adapters = request.beside()
            beside = request.workspace + request.adapters + movement.vacating.reserved
            victims = movement.device.room_for(sizes, beside)
            if victims is not None or not movement.on_short():
                break
        if victims is not None:
            for one in before:
                one.overtaken += 1
            self._waiting.remove(request)
            self._grant(request, bounds, components, victims)

    def _has_its_turn(self, request: Request, before: list[Request], components: list[Component]) -> bool:
        if not before or request.thread in {granted.thread for granted in self.granted if granted.lends}:
            return True
        needs_room = request.workspace or request.beside()[1] or not all(map(self.movement.has_arrived, components))
        return not needs_room and all(one.overtaken < OVERTAKING for one in before)

    def _keep_changes(self, bounds: Sequence[Bound]) -> bool:
        """Saves what was written outside of leases. Says no while it is being copied: the change comes after that."""
        all_bound = [bound for component in components_of(bounds) for bound in component.bound]
        changed = [bound for bound in all_bound if not bound.leases and bound.home is not None and bound.is_changed()]
        if changed and self.movement.is_moving([bound.component for bound in changed]):
            return False
        for bound in changed:
            keep_changes(self.movement, bound)
        return True

    def _grant(
        self,
        request: Request,
        bounds: Sequence[Bound],
        components: list[Component],
        victims: Sequence[tuple[Component, int]],
    ) -> None:
        if request.is_prefetch and not request.future.set_running_or_notify_cancel():
            return
        movement = self.movement
        # Only this may fail, and it holds nothing.
        for victim, keep in victims:
            movement.evict_from_device(victim, f"made room for {request.name}", keep)
        movement.device.begin_request()
        movement.host.begin_request()
        request.held = components
        for component in components:
            movement.take_back(component)
            if not request.is_prefetch:
                movement.device.hold(component, component.nbytes)
            movement.device.touch(component)
            movement.host.touch(component)
        if request.is_prefetch:
            self._arriving.append(request)
        else:
            request.granted = True
            self.granted.append(request)
            movement.vacating.reserved += request.workspace + request.adapters
        if request.lends:
            request.lent = list(dict.fromkeys(bounds))
        for bound in request.lent:
            bound.leases += 1
            if movement.has_arrived(bound.component) and bound.home != "device":
                bound.to("device")
        for component in components:
            movement.want_on_device(component, request.priority, request.name, components)

    def _check_fits(self, request: Request, components: list[Component]) -> None:
        """Refuses what could not be held even with no other lease."""
        device = self.movement.device
        beside, _ = request.beside()
        what = f"{request.name} with adapters" if beside else request.name
        device.check_fits(what, bytes_of(components) + beside, request.workspace)
        pins = [one for one in self.granted if not one.lends]
        pinned = {component for one in pins for component in one.held} - set(components)
        if bytes_of(components) + beside + request.workspace + bytes_of(pinned) > device.budget:
            names = ", ".join(sorted({one.name for one in pins}))
            cause = f"{request.name} has no room beside {names}: {size(bytes_of(pinned))} stay on {device.memory}"
            raise InsufficientMemoryError(cause=cause, remedy="Unpin one, or raise device_budget")

    def _refuse_stuck(self) -> None:
        """Refuses the newest request where all leases are of threads that wait, and nothing moves."""
        leases = [granted for granted in self.granted if granted.lends]
        holders = {granted.thread for granted in leases}
        waiting = [one for one in self._waiting if not one.is_prefetch]
        stuck = [one for one in waiting if one.thread in holders]
        if not stuck or not holders <= {one.thread for one in waiting}:
            return
        if self.movement.is_moving(self.movement.states):
            return
        held = ", ".join(sorted({granted.name for granted in leases}))
        cause = f"there is no room for {stuck[-1].name} beside {held}, leased by threads that wait for room themselves"
        remedy = "End a lease before using another model, use both in one lease, or raise device_budget"
        stuck[-1].error = PoolError(cause=cause, remedy=remedy)
        self._waiting.remove(stuck[-1])


def components_of(bounds: Iterable[Bound]) -> list[Component]:
    """Those that modules are bound to, each once."""
    return list(dict.fromkeys(bound.component for bound in bounds))


def bytes_of(components: Iterable[Component]) -> int:
    """Of all of these."""
    return sum(component.nbytes for component in components)


def finish(done: tuple[Request, BaseException | None]) -> None:
    """Gives a future its result, an error, or that it is cancelled. Its callbacks are called here."""
    # The request keeps its pool, and so this thread, until the future is done.
    future, error = done[0].future, done[1]
    if error is CANCELLED:
        future.cancel()
    elif error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
