"""Requests for components, and their order.

Whoever asks waits; whoever changes anything grants what can be granted then, in order (``serve``). So nobody is passed
over because another thread took the lock first.

Promises that requests are granted in the order in which they came, with two exceptions: a thread that holds a lease
comes first, since others may wait for that lease; and what needs nothing moved may overtake those that wait for room,
at most ``OVERTAKING`` times each. That threads which could only wait for each other get an error instead. And that
prefetches go behind requests that someone waits for. Knows no models.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError, InsufficientMemoryError, LoadCancelledError, PoolError
from penstock.pool.bound import Bound
from penstock.pool.changes import keep_changes, lose_changes
from penstock.pool.component import Component
from penstock.pool.figures import Stages
from penstock.pool.lock import deferred, let_in
from penstock.pool.movement import Movement
from penstock.pool.worker import Worker
from penstock.units import size

logger = logging.getLogger(__name__)

OVERTAKING = 8
"""How often a request that waits for room is overtaken by those that need none."""
_CANCELLED = LoadCancelledError(cause="the prefetch was cancelled")
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


class Requests:
    """Those that wait, and those that were granted: leases and pins."""

    def __init__(self, movement: Movement) -> None:
        self.movement = movement
        self.changed = movement.changed
        self.granted: list[Request] = []
        self._waiting: list[Request] = []
        self._arriving: list[Request] = []
        """Prefetches that have begun."""
        self._futures = Worker("penstock-pool-futures", _finish)
        movement.on_moved = self.serve

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return sum(not request.future.cancelled() for request in self._waiting)

    def admit(self, request: Request) -> float:
        """Waits until a request's components can be on the device together, and holds them there. Returns seconds.

        Raises:
            InsufficientMemoryError: where that can never be.
            PoolError: where threads that hold leases could only wait for each other.
            LoadCancelledError: where the pool was closed meanwhile.
        """
        began = time.monotonic()
        with self.changed:
            self._begin()
            self._waiting.append(request)
            try:
                self.serve()
                while not request.granted and request.error is None:
                    self.movement.check_open()
                    self.changed.wait()
                if request.error is not None:
                    raise request.error  # noqa: TRY301 - it ends like any other
            except BaseException:
                # Ctrl-C comes while it waits.
                self.drop(request)
                raise
            finally:
                if request in self._waiting:
                    self._waiting.remove(request)
                    self.serve()
            seconds = time.monotonic() - began
            self.movement.stats.queue_seconds += seconds
            return seconds

    def prefetch(self, request: Request) -> None:
        """Brings a request's components to the device as soon as there is room, without holding them afterwards.

        Raises:
            InsufficientMemoryError: where that can never be.
        """
        with self.changed:
            self._begin()
            self._check_fits(request, _components(request.bounds()))
            self._waiting.append(request)
            # One that is cancelled is not to wait here, and keep its pool, until something happens.
            request.future.add_done_callback(lambda _: self.drop(request))
            self.serve()

    def fetch(self, request: Request) -> None:
        """Fetches the masters of a request's components, without holding them afterwards.

        Raises:
            InsufficientMemoryError: where the host budget can never have all of them.
        """
        movement = self.movement
        with self.changed:
            self._begin()
            components = _components(request.bounds())
            movement.host.check_fits(request.name, _bytes(components))
            request.future.set_running_or_notify_cancel()
            request.held = components
            movement.host.begin_request()
            for component in components:
                movement.host.touch(component)
                movement.want_on_host(component, request.priority, f"a prefetch of {request.name}", components)
            self._arriving.append(request)
            self.serve()

    def drop(self, request: Request) -> None:
        """Ends a request wherever it is: one that waits does not any more, and one that was granted holds nothing."""
        with self.changed:
            if request in self._waiting:
                self._waiting.remove(request)
                self.serve()
            if request in self.granted:
                self.end(request, [])

    def end(self, request: Request, points: list[Any]) -> None:
        """Ends a lease or a pin. ``points`` are work on the device that may still use its components."""
        with self.changed:
            if self.movement.closed:
                return
            self.granted.remove(request)
            self.movement.vacating.reserved -= request.workspace
            for bound in request.lent:
                if bound.leases == 1:
                    try:
                        keep_changes(self.movement, bound)
                    except Exception:
                        # The lease ends all the same: what was written is lost, and says so.
                        logger.exception("what was written to %s could not be kept", bound.component)
                        lose_changes(bound)
                bound.leases -= 1
                if not bound.leases and bound.component.host is not None and bound.home != "host":
                    bound.to("host")
            for component in request.held:
                component.points = [*(point for point in component.points if not _is_past(point)), *points]
                self.movement.device.release(component)
                self.movement.idle(component)
            self.serve()

    def wait_for(self, bound: Bound, request: Request, stages: Stages) -> None:
        """Waits until a module that is lent has arrived on the device, and counts what it waited for.

        Raises:
            Exception: what bringing it failed with.
            ConfigError: where another thread has ended the lease meanwhile.
            LoadCancelledError: where the pool was closed meanwhile.
        """
        with self.changed:
            component = bound.component
            while bound.home != "device" or not component.on_device:
                self.movement.check_open()
                if request not in self.granted:
                    cause = f"the lease of {request.name!r} was ended by another thread"
                    raise ConfigError(cause=cause, remedy="Use its modules within the with-statement")
                state = self.movement.states[component]
                state.check()
                began = time.monotonic()
                source = component.source
                stage = "switch" if not state.fetching else "read" if not source or not source.is_remote else "download"
                self.changed.wait()
                stages.add(stage, time.monotonic() - began)

    def wait_arrived(self, request: Request) -> None:
        """Waits until what a request holds has arrived.

        Raises:
            Exception: as ``wait_for``.
        """
        with self.changed:
            while not all(component.on_device for component in request.held):
                self.movement.check_open()
                for component in request.held:
                    self.movement.states[component].check()
                self.changed.wait()

    def settle(self, components: Iterable[Component]) -> None:
        """Waits until none of these is on its way, or compared with others."""
        with self.changed:
            of = list(components)
            while (self.movement.is_moving(of) or self.movement.comparing) and not self.movement.closed:
                self.changed.wait()

    def withdraw(self, bounds: Sequence[Bound]) -> None:
        """Cancels prefetches that wait for room for these."""
        with self.changed:
            for request in [one for one in self._waiting if one.is_prefetch]:
                if set(request.bounds()) & set(bounds):
                    self._waiting.remove(request)
                    self._futures.submit((request.future, _CANCELLED))

    def _begin(self) -> None:
        self.movement.begin()
        self._futures.begin()

    # Order

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
            self._futures.submit((request.future, errors[0] if errors else None))
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
                self._futures.submit((request.future, error))

    def _grant_if_possible(self, request: Request) -> None:
        bounds = request.bounds()
        components = _components(bounds)
        self._check_fits(request, components)
        before = [one for one in self._waiting[: self._waiting.index(request)] if not one.is_prefetch]
        if not self._has_its_turn(request, before, components) or not self._keep_changes(bounds):
            return
        components = _components(bounds)
        sizes = [(component, component.nbytes) for component in components]
        victims = self.movement.device.room_for(sizes, request.workspace + self.movement.vacating.reserved)
        if victims is not None:
            for one in before:
                one.overtaken += 1
            self._waiting.remove(request)
            self._grant(request, bounds, components, victims)

    def _has_its_turn(self, request: Request, before: list[Request], components: list[Component]) -> bool:
        if not before or request.thread in {granted.thread for granted in self.granted if granted.lends}:
            return True
        needs_room = request.workspace or not all(component.on_device for component in components)
        return not needs_room and all(one.overtaken < OVERTAKING for one in before)

    def _keep_changes(self, bounds: Sequence[Bound]) -> bool:
        """Saves what was written outside of leases. Says no while it is being copied: the change comes after that."""
        all_bound = [bound for component in _components(bounds) for bound in component.bound]
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
            movement.vacating.reserved += request.workspace
        if request.lends:
            request.lent = list(dict.fromkeys(bounds))
        for bound in request.lent:
            bound.leases += 1
            if bound.component.on_device and bound.home != "device":
                bound.to("device")
        for component in components:
            movement.want_on_device(component, request.priority, request.name, components)

    def _check_fits(self, request: Request, components: list[Component]) -> None:
        """Refuses what could not be held even with no other lease."""
        device = self.movement.device
        device.check_fits(request.name, _bytes(components), request.workspace)
        pins = [one for one in self.granted if not one.lends]
        pinned = {component for one in pins for component in one.held} - set(components)
        if _bytes(components) + request.workspace + _bytes(pinned) > device.budget:
            names = ", ".join(sorted({one.name for one in pins}))
            cause = f"{request.name} has no room beside {names}: {size(_bytes(pinned))} stay on {device.memory}"
            raise InsufficientMemoryError(cause=cause, remedy="Unpin one, or raise device_budget")

    def _refuse_stuck(self) -> None:
        """Refuses the newest request where all leases are of threads that wait, and nothing moves."""
        leases = [granted for granted in self.granted if granted.lends]
        holders = {granted.thread for granted in leases}
        waiting = [one for one in self._waiting if not one.is_prefetch]
        stuck = [one for one in waiting if one.thread in holders]
        if not stuck or not holders <= {one.thread for one in waiting}:
            return
        if any(state.copying or state.fetching for state in self.movement.states.values()):
            return
        held = ", ".join(sorted({granted.name for granted in leases}))
        cause = f"there is no room for {stuck[-1].name} beside {held}, leased by threads that wait for room themselves"
        remedy = "End a lease before using another model, use both in one lease, or raise device_budget"
        stuck[-1].error = PoolError(cause=cause, remedy=remedy)
        self._waiting.remove(stuck[-1])

    # The end

    def stop(self) -> None:
        """Has the thread end soon, without waiting for it."""
        self._futures.stop()

    def close(self) -> None:
        """Has those who wait get ``LoadCancelledError``, and futures be cancelled or fail so.

        What was interrupted goes on with the next call.
        """
        with deferred():
            with self.changed:
                self.movement.closed = True
                self.changed.notify_all()
            self.movement.close()
            self._futures.stop()
            with let_in():
                self._futures.join()
            with self.changed:
                waiting, self._waiting = self._waiting, []
                arriving, self._arriving = self._arriving, []
            closed = LoadCancelledError(cause="the pool was closed")
            for future, error in self._futures.left():
                _finish((future, error))
            for request in [*waiting, *arriving]:
                if request.is_prefetch and not request.future.cancel() and not request.future.done():
                    request.future.set_exception(closed)


def _is_past(point: Any) -> bool:
    return point is None or point.query()


def _components(bounds: Iterable[Bound]) -> list[Component]:
    return list(dict.fromkeys(bound.component for bound in bounds))


def _bytes(components: Iterable[Component]) -> int:
    return sum(component.nbytes for component in components)


def _finish(done: tuple[Future[None], BaseException | None]) -> None:
    future, error = done
    if error is _CANCELLED:
        future.cancel()
    elif error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
