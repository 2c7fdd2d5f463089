"""The movement of components: fetching masters, copying them to the device, evicting, and the books of both memories.

One lock (``changed``) guards the books, the components' slabs and their bindings. It is held while modules are rebound,
and not while components are read or copied: threads of two workers do that, one for masters and one for the device.
Only tensors that a module has written to are copied with it held.

Promises that a component which is held is neither moved nor evicted, and that the books are exact after every failure.
Knows components and who is bound to them, but no models, and nothing of who waits for what: it tells ``on_moved``.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.errors import InsufficientMemoryError, LoadCancelledError, PenstockError
from penstock.pool.bound import Bound, Home
from penstock.pool.changes import keep_changes
from penstock.pool.component import Component, Derived
from penstock.pool.device_slab import DeviceSlab
from penstock.pool.figures import PoolStats
from penstock.pool.ledger import Ledger
from penstock.pool.lock import Lock, let_in
from penstock.pool.memory import Memory
from penstock.pool.twins import Twins
from penstock.pool.vacating import Vacating
from penstock.pool.worker import Worker
from penstock.units import size

if TYPE_CHECKING:
    import torch

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


class Movement:
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
        self._twins = Twins(self)
        self._fetcher = Worker("penstock-pool-fetch", self._fetch)
        self._copier = Worker("penstock-pool-copy", self._copy)

    def begin(self) -> None:
        """Has the threads, before anything counts on them.

        Raises:
            LoadCancelledError: once the pool is closed.
            PoolError: where the system has no more threads.
        """
        self.check_open()
        for worker in (self._fetcher, self._copier):
            worker.begin()

    def is_moving(self, components: Iterable[Component]) -> bool:
        """Whether any of these is on its way."""
        states = [state for state in map(self.states.get, components) if state is not None]
        return any(state.fetching or state.copying for state in states)

    # Coming

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
        if component.on_device and not state.copying:
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
        if component.host is not None:
            return
        if not state.fetching:
            state.fetching, state.error, state.beside = True, None, beside
            again = f" again: it had left host memory: {state.left_host}" if state.left_host else ""
            state.note(f"fetched for {reason}{again}")
            if again:
                logger.info("%s, %s, is fetched for %s%s", component.name, size(component.nbytes), reason, again)
        self._fetcher.submit(component, priority)

    def _explain_copy(self, component: Component, state: State, reason: str) -> None:
        missing = component.nbytes - component.arrived
        again = f" again: it had left: {state.left_device}" if state.left_device and component.host is not None else ""
        part = f"the last {size(missing)} " if component.arrived else ""
        state.note(f"{part}brought to {self.memory.device} for {reason}{again}")
        if again:
            what = f"{component.name}, {size(missing)},"
            logger.info("%s is copied to %s for %s%s", what, self.memory.device, reason, again)

    def _fetch(self, component: Component) -> None:
        """Brings a master from storage; straight to the device where host memory has no room for it."""
        with self.changed:
            state = self.states.get(component)
            if state is None or not state.fetching:
                return
        began, slab, on_host, error = time.monotonic(), None, False, None
        try:
            with self.changed:
                on_host = self._take_room_on_host(component)
                if not on_host and not state.copying:
                    # Decided with the lock held: who wants it on the device from now on begins anew.
                    cause = f"masters that are in use leave no room for {component.name!r}, {size(component.nbytes)}"
                    refused = InsufficientMemoryError(cause=cause, remedy="Raise host_budget, or end leases")
                    self._end_fetch(component, state, None, refused, began, on_host=False)
                    return
            if on_host:
                slab = self.memory.host_slab(component.nbytes)
                component.read(dict(enumerate(component.layout.views(slab))), self._watch)
            else:
                self._read_to_device(component)
        except BaseException as raised:  # noqa: BLE001 - whatever it is, it belongs to those who wait
            error, slab = raised, None
        with self.changed:
            self._end_fetch(component, state, slab, error, began, on_host=on_host)
            if component.host is None:
                return
            self.comparing += 1
        twin = None
        try:
            # Nobody waits for this.
            twin = self._twins.find(component, slab) if slab is not None else None
        finally:
            with self.changed:
                self.comparing -= 1
                if twin is not None and component.host is slab:
                    self._twins.note(component, twin)
                self._twins.merge_idle()
                self.on_moved()

    def _end_fetch(
        self,
        component: Component,
        state: State,
        slab: torch.Tensor | None,
        error: BaseException | None,
        began: float,
        *,
        on_host: bool,
    ) -> None:
        state.fetching = False
        try:
            if error is None:
                self._fetched(component, state, slab, time.monotonic() - began)
        except BaseException as raised:  # noqa: BLE001 - what was written to it could not be kept
            error = raised
        if error is not None:
            self._failed(component, state, error, on_host=on_host)
        self.on_moved()

    def _watch(self, done: int, total: int) -> None:
        """Ends a load that nobody wants any more."""
        del done, total
        if self.closed:
            raise LoadCancelledError(cause="the pool was closed")

    def _take_room_on_host(self, component: Component) -> bool:
        """Evicts what is in a master's way, and holds its room; or says that there is none. With the lock held."""
        wanted = [(component, component.nbytes)]
        while True:
            family = [(one, one.nbytes) for one in self.states[component].beside if one in self.host]
            room = self.host.room_for([*family, *wanted])
            room = self.host.room_for(wanted) if room is None else room
            if room is not None or not self.comparing or self.closed:
                break
            # Masters that are held for a comparison may go after it.
            self.changed.wait()
        for victim, _ in room or ():
            self.evict_from_host(victim, f"made room for {component.name}")
        if room is not None:
            self.host.hold(component, component.nbytes)
        return room is not None

    def _read_to_device(self, component: Component) -> None:
        slab = self._map(component)
        # The load copies on streams of its own, and torch's allocator knows that of copies only.
        self.memory.finish()
        views, places = component.layout.views(component.copy()), component.layout.places
        missing = [n for n, place in enumerate(places) if place.offset + place.nbytes > component.arrived]
        component.read({number: views[number] for number in missing}, self._watch)
        slab.filled = component.nbytes

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
                    victims = self.device.first_to_go()
                    if not victims:
                        raise
                    self.evict_from_device(victims[0], f"{self.memory.device} had no memory for {component.name}")
                self.vacating.make_room(everything=True)

    def _fetched(self, component: Component, state: State, slab: Any, seconds: float) -> None:
        state.fetch_seconds = seconds
        if slab is not None:
            self._keep_changes(component, but_in=slab)
        self.stats.fetched += 1
        self.stats.fetched_bytes += component.nbytes
        self.stats.fetch_seconds += seconds
        if slab is None:
            self._arrived(component, state)
            return
        component.host = slab
        for bound in component.bound:
            if bound.home is None or not bound.leases:
                bound.to("host")
        if state.copying:
            # Held until it is copied.
            self._copier.submit(component)
        else:
            self.host.release(component)

    def _copy(self, component: Component) -> None:
        """Copies a master to the device, from where it ends there."""
        with self.changed:
            state = self.states.get(component)
            if state is None or not state.copying or component.host is None:
                return
        began, start, error = time.monotonic(), component.arrived, None
        try:
            self._map(component).fill(component.master())
        except BaseException as raised:  # noqa: BLE001 - as above
            error = raised
        with self.changed:
            self.host.release(component)
            if error is None:
                self.stats.copied += 1
                self.stats.copied_bytes += component.nbytes - start
                self.stats.copy_seconds += time.monotonic() - began
                self._arrived(component, state)
            else:
                self._failed(component, state, error, on_host=False)
            self.on_moved()
        self.give_back()

    def _arrived(self, component: Component, state: State) -> None:
        state.copying = False
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

    def settle_books(self, component: Component) -> None:
        """Takes what never came, and nobody waits for, out of the device's books, and gives its memory back."""
        here = component.on_device or self.device.is_held(component) or component not in self.device
        if not here:
            for bound in component.bound:
                if bound.home == "device":
                    bound.to(None)
            self.vacating.leave(component, component.arrived)
            self.device.keep(component, component.arrived)

    # Going

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

    def _keep_changes(self, component: Component, but_in: torch.Tensor | None = None) -> None:
        """Saves what was written outside of leases, before the memory goes that it was written to."""
        for bound in list(component.bound):
            if not bound.leases and bound.home is not None and bound.is_changed():
                keep_changes(self, bound)
                if but_in is not None and bound.component is component:
                    # It was read from storage before that.
                    for number, value in component.kept.items():
                        component.layout.places[number].of(but_in).copy_(value)

    def give_back(self) -> None:
        """Gives the driver what evictions left, so that torch can have it; not while something is on its way there.

        May wait for work that is queued on the device, so it is not to be called with the lock held.
        """
        with self.changed:
            moving = self.closed or any(state.copying for state in self.states.values())
        if moving:
            # Whoever moves it makes its room.
            return
        self.vacating.make_room()
        if self.memory.kept():
            self.memory.trim()

    def shrink(self) -> None:
        """Evicts what lowered budgets have no room for, as far as nobody holds it."""
        try:
            for victim, keep in self.device.excess():
                self.evict_from_device(victim, "the budget was lowered", keep)
            for victim, _ in self.host.excess():
                self.evict_from_host(victim, "the budget was lowered")
        except Exception:
            # It is tried again with the next request.
            logger.exception("what was written to a component that has to go could not be kept")

    # Components

    def add(self, component: Component) -> None:
        """Enters a component that is nowhere yet."""
        self.states[component] = State()

    def forget(self, component: Component) -> None:
        """Drops a component that nobody holds and nobody waits for."""
        for ledger in (self.device, self.host):
            ledger.forget(component)
        self.vacating.leave_for_good(component)
        component.drop_host()
        self._twins.forget(component)
        del self.states[component]

    def idle(self, component: Component) -> None:
        """A component is in nobody's lease any more: it may become one with its twin."""
        self.settle_books(component)
        self._twins.merge_if_idle(component)

    def find_equal(self, bound: Bound) -> tuple[Component, int] | None:
        """A component with the bytes that a module's tensors have, whose master is held once for the caller, and its
        edits when it was compared.
        """
        return self._twins.find_of(bound)

    def is_as_compared(self, component: Component, edits: int) -> bool:
        """Whether a component has the bytes that it had when it was compared."""
        return self._twins.is_as_compared(component, edits)

    def derived_from(self, component: Component) -> list[Component]:
        """Components that begin as copies of this one."""
        found = self.states if component.derived else ()
        return [one for one in found if isinstance(one.source, Derived) and one.source.of is component]

    def join(self, bound: Bound, component: Component) -> None:
        """Binds a module to a component, which has a master if the module's is to last."""
        bound.component = component
        component.bound.append(bound)
        if bound.lasting:
            self.host.hold(component, component.nbytes)
        bound.to("host" if component.host is not None else "device" if component.on_device else None)

    def leave_for(self, bound: Bound, component: Component) -> None:
        """Takes a module from its component to another one."""
        old, lasting = bound.component, bound.lasting
        old.bound.remove(bound)
        bound.lasting = lasting and component.host is not None
        self.join(bound, component)
        if lasting:
            self.host.release(old)
        self._drop_unused(old)

    def leave(self, bound: Bound) -> None:
        """Takes a module from its component, which is dropped if nobody else has it. The module keeps its tensors."""
        component = bound.component
        component.bound.remove(bound)
        if bound.lasting:
            self.host.release(component)
        self._drop_unused(component)

    def _drop_unused(self, component: Component) -> None:
        if component.bound or component.derived:
            return
        self.forget(component)
        if isinstance(component.source, Derived):
            base = component.source.of
            base.derived -= 1
            self.host.release(base)
            self._drop_unused(base)

    def derive(self, shared: Component) -> Component:
        """A component that begins as a copy of this one, which stays as long as that one needs it; nowhere yet."""
        source = shared.source
        base = source.of if isinstance(source, Derived) else shared if source is None else None
        if base is not None:
            source = Derived(base)
            base.derived += 1
            self.host.hold(base, base.nbytes)
        own = Component(shared.name, shared.layout, source)
        own.kept = dict(shared.kept)
        own.edits = 1
        self.add(own)
        return own

    def stop(self) -> None:
        """Has the threads end soon, without waiting for them."""
        self.closed = True
        for worker in (self._fetcher, self._copier):
            worker.stop()

    def close(self) -> None:
        """Ends the threads and drops all memory."""
        self.stop()
        with let_in():
            for worker in (self._fetcher, self._copier):
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

    def check_open(self) -> None:
        """Raises LoadCancelledError once the pool is closed."""
        if self.closed:
            raise LoadCancelledError(cause="the pool was closed", remedy="Make another one")

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
