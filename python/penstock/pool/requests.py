"""What a pool is asked for: leases and pins, which wait for their turn, and prefetches. How these end.

The order is that of ``turns``. Promises that who waits is told of every end there can be, be it the pool's, an error or
Ctrl-C, and that futures' callbacks are called without the lock. Knows no models.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.errors import ConfigError, LoadCancelledError
from penstock.pool.bound import Bound
from penstock.pool.changes import keep_changes, lose_changes
from penstock.pool.component import Component
from penstock.pool.figures import Stages
from penstock.pool.lock import deferred, let_in
from penstock.pool.turns import CANCELLED, Request, Turns, bytes_of, components_of, finish

logger = logging.getLogger(__name__)


class Requests(Turns):
    """Requests of threads, and of prefetches."""

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
                with self.movement.awaiting_masters():
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
            self._check_fits(request, components_of(request.bounds()))
            self._waiting.append(request)
            # One that is cancelled is not to wait here, and keep its pool, until something happens. Nor does a future
            # that the program keeps keep a pool.
            request.future.add_done_callback(_Dropping(self, request))
            self.serve()

    def fetch(self, request: Request) -> None:
        """Fetches the masters of a request's components, without holding them afterwards.

        Raises:
            InsufficientMemoryError: where the host budget can never have all of them.
        """
        movement = self.movement
        with self.changed:
            self._begin()
            components = components_of(request.bounds())
            movement.host.check_fits(request.name, bytes_of(components))
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
            self.movement.vacating.reserved -= request.workspace + request.adapters
            lost = []
            for bound in request.lent:
                if bound.leases == 1:
                    try:
                        keep_changes(self.movement, bound)
                    except Exception as error:  # noqa: BLE001 - the lease ends all the same
                        said = "what was written to %s could not be kept"
                        self.changed.later(logger.error, said, bound.component, exc_info=error)
                        lose_changes(bound)
                        lost.append(bound.component)
                if bound.points is not None:
                    bound.points = [*self.movement.memory.not_past(bound.points), *points]
                bound.leases -= 1
                if not bound.leases and bound.component.host is not None and bound.home != "host":
                    bound.to("host")
            for component in request.held:
                component.points = [*self.movement.memory.not_past(component.points), *points]
                self.movement.device.release(component)
                self.movement.idle(component)
            for component in lost:
                if any(component in one.held for one in self.granted):
                    self.movement.want_on_device(component, math.inf, "leases beside one whose writes were undone")
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
            while bound.home != "device" or not self.movement.has_arrived(component):
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
            while not all(map(self.movement.has_arrived, request.held)):
                self.movement.check_open()
                for component in request.held:
                    self.movement.states[component].check()
                self.changed.wait()

    def settle(self, components: Iterable[Component]) -> None:
        """Waits until none of these is on its way, or compared with others."""
        with self.changed:
            of = list(components)
            with self.movement.awaiting_masters():
                while (self.movement.is_moving(of) or self.movement.comparing) and not self.movement.closed:
                    self.changed.wait()

    def settle_masters(self) -> None:
        """Waits until none is being made of what is on the device: both may go then."""
        with self.changed, self.movement.awaiting_masters():
            while self.movement.is_keeping and not self.movement.closed:
                self.changed.wait()

    def withdraw(self, bounds: Sequence[Bound]) -> None:
        """Cancels prefetches that wait for room for these."""
        with self.changed:
            for request in [one for one in self._waiting if one.is_prefetch]:
                if set(request.bounds()) & set(bounds):
                    self._waiting.remove(request)
                    self._futures.submit((request, CANCELLED))

    def _begin(self) -> None:
        self.movement.begin()
        self._futures.begin()

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
            for done in self._futures.left():
                finish(done)
            for request in [*waiting, *arriving]:
                if request.is_prefetch and not request.future.cancel() and not request.future.done():
                    request.future.set_exception(closed)


class _Dropping:
    """Drops a request, unless it or its pool is gone."""

    def __init__(self, requests: Requests, request: Request) -> None:
        self._requests, self._request = weakref.ref(requests), weakref.ref(request)

    def __call__(self, _: object) -> None:
        requests, request = self._requests(), self._request()
        if requests is not None and request is not None:
            requests.drop(request)
