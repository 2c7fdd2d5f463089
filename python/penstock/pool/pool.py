"""``ModelPool``: models by name, made of components that ``movement`` moves and ``requests`` gives out."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import ConfigError
from penstock.pool.adapters.catalogue import AdapterCatalogue
from penstock.pool.device_slab import PlainSlab
from penstock.pool.figures import Explanation, PoolStats, Residence, Stages
from penstock.pool.late_use import LateUse
from penstock.pool.lease import Lease
from penstock.pool.lock import deferred
from penstock.pool.memory import Memory, Size, host_available, size_of
from penstock.pool.movement import Movement
from penstock.pool.quantised import errors_of, float8_layers
from penstock.pool.requests import Requests
from penstock.pool.turns import Request

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

Observer = Callable[[str, Stages], object]

_pools: weakref.WeakSet[ModelPool] = weakref.WeakSet()
"""Those that are closed before the interpreter ends, if nobody has."""


class ModelPool(AdapterCatalogue):
    """Models that share a device.

    Weights have a *master* in host memory, within ``host_budget``. They are copied to the device when their model is
    used, within ``device_budget``. Eviction from the device copies nothing back.

    ::

        pool = ModelPool(device="cuda:0", host_budget="96GiB")
        pool.register("sd", {"unet": "unet/", "vae": "vae/"}, build={"unet": make_unet, "vae": make_vae})
        with pool.use("sd") as m:
            m["unet"](...)

    Outside of a lease, parameters are views of the master: on the CPU, and to be read only. Several threads may use a
    pool; a forked child makes its own.
    """

    def __init__(
        self,
        device: Any = "cuda",
        *,
        host_budget: Size | Literal["auto"] = "auto",
        device_budget: Size | Literal["auto"] = "auto",
        adapter_budget: Size | Literal["auto"] = "auto",
        reserve: Size = "4GiB",
        observe: Observer | None = None,
        debug: bool = False,
    ) -> None:
        """Makes an empty pool. Nothing is allocated yet.

        Args:
            device: ``"cuda"``, ``"cuda:N"``, or ``"cpu"``, where copies are host memory too.
            host_budget: bytes of masters. By default, half of what the machine, and the process's control groups,
                could spare.
            device_budget: bytes of copies on the device. By default, what is free there now, less ``reserve``.
            adapter_budget: bytes of adapters in host memory, beside the masters. By default, an eighth of
                ``host_budget``.
            reserve: bytes that a default ``device_budget`` leaves to activations and others.
            observe: called after each lease with the model's name and the lease's ``Stages``, in the thread that ended
                it. What it raises is logged.
            debug: finds use of models after their leases, slowly: what left the device holds NaN, and writes there are
                logged and counted (``PoolStats.late_writes``).

        Raises:
            ConfigError: for what is no size.
            DeviceError: for a device that is not there.
            MissingDependencyError: where torch is absent or too old.
        """
        from penstock.frameworks.torch import Torch

        memory = Memory(Torch().device(device), debug=debug)
        left = size_of("reserve", reserve)
        host = host_available() // 2 if host_budget == "auto" else size_of("host_budget", host_budget)
        on_device = memory.available() - left if device_budget == "auto" else size_of("device_budget", device_budget)
        adapters = host // 8 if adapter_budget == "auto" else size_of("adapter_budget", adapter_budget)
        super().__init__(Movement(memory, host, max(on_device, 0)), adapters)
        self._observe = observe
        self._late_use = LateUse(self._movement)
        _pools.add(self)
        # A pool that nobody has any more: its threads end, and modules keep the memory that they have.
        weakref.finalize(self, _stop, self._process, self._movement, self._requests).atexit = False

    # Using it

    def use(self, name: str, *, workspace: Size | Literal["auto"] = 0, key: Hashable = None) -> Lease:
        """A lease of a model. Waits for room on the device; for the weights, the lease's components wait.

        Args:
            name: which model.
            workspace: bytes of the device to keep free beside it, for activations. ``"auto"``: what torch allocated
                beside the weights in the last runs. It resets torch's own peak to measure that, and measures one lease
                at a time.
            key: with ``"auto"``, what the need depends on, such as a resolution and a batch size.

        Raises:
            ConfigError: for a name that is not in the pool.
            InsufficientMemoryError: where the model can never fit in the device's budget.
            PoolError: where threads that hold leases could only wait for each other.
        """
        model = self._model(name)
        self._late_use.check()
        learns = workspace == "auto"
        needs = self._workspaces.expected(name, key) if learns else size_of("workspace", workspace)
        beside = partial(self._choice.bytes_beside, model)
        request = Request(name, model.current, needs, thread=threading.get_ident(), beside=beside)
        try:
            with deferred():
                seconds = self._requests.admit(request)
                self._choice.bring(model, request)
                if needs:
                    self._movement.vacating.make_room()
                self._movement.give_back()
                told = self._measured(name, key, request) if learns else self._told
                lease = Lease(self._requests, model, request, told)
                lease.stages.queue = seconds
            return lease  # noqa: TRY300 - Ctrl-C may come here
        except BaseException:
            self._requests.drop(request)
            raise

    def prefetch(self, name: str, *, to: Literal["host", "device"] = "device", priority: float = 0) -> Future[None]:
        """Has a model's masters fetched, or the model brought to the device, in the background.

        Comes after whatever ``use`` waits for; of several prefetches, those of higher priority come first.

        Returns:
            A future, done when all of it has arrived. While it waits for room, it can be cancelled. Its callbacks are
            not to wait for other prefetches: one thread calls them all.

        Raises:
            ConfigError: for a name that is not in the pool, and another ``to``.
            InsufficientMemoryError: where the model can never fit in the budget.
        """
        if to not in ("host", "device"):
            raise ConfigError(cause=f'to={to!r} is neither "host" nor "device"')
        request = Request(name, self._model(name).current, lends=False, priority=priority, pool=self)
        begin = self._requests.fetch if to == "host" else self._requests.prefetch
        begin(request)
        return request.future

    def switch(self, name: str) -> None:
        """Brings a model to the device, and waits for it. What is in its way is evicted.

        Raises:
            As ``use``, and what loading it failed with.
        """
        request = Request(name, self._model(name).current, thread=threading.get_ident())
        with deferred():
            try:
                self._requests.admit(request)
                self._requests.wait_arrived(request)
            finally:
                self._requests.drop(request)

    wake_up = switch

    def sleep(self, name: str, level: Literal[1, 2] = 1) -> None:
        """Frees a model's memory on the device (level 1), and its masters too (level 2), unless others use them.

        Raises:
            ConfigError: for a model with an open lease, and for level 2 of one that was adopted.
        """
        if level not in (1, 2):
            raise ConfigError(cause=f"level={level!r} is neither 1 nor 2")
        movement, why = self._movement, f"sleep, level {level}"
        with movement.changed:
            model = self._idle(name, "put to sleep")
            lasting = [bound for bound in model.modules if bound.lasting]
            if level > 1 and lasting:
                cause = f"{lasting[0].component.name!r} of {name!r} was adopted: nothing could bring its weights back"
                raise ConfigError(cause=cause, remedy="Use level=1, or register it with its checkpoint")
            slabs = {component.slab for component in model.components if component.slab is not None}
            for component in model.components:
                if component in movement.device and not movement.device.is_held(component):
                    movement.evict_from_device(component, why)
                if level > 1 and component.host is not None and not movement.host.is_held(component):
                    movement.evict_from_host(component, why)
            self._rest_adapters(model, level)
            self._requests.serve()
        # Here and now, after work on them that is queued.
        movement.vacating.make_room(slabs)
        movement.give_back()

    def pin(self, name: str) -> None:
        """Brings a model to the device, waits for it, and keeps it there until ``unpin``.

        Raises:
            As ``switch``.
        """
        request = Request(f"{name} (pinned)", self._model(name).current, thread=threading.get_ident(), lends=False)
        try:
            with deferred():
                self._requests.admit(request)
                self._requests.wait_arrived(request)
        except BaseException:
            self._requests.drop(request)
            raise

    def unpin(self, name: str) -> None:
        """Takes a ``pin`` back.

        Raises:
            ConfigError: for a model that is not pinned.
        """
        self._check_process()
        with self._movement.changed:
            pins = [one for one in self._requests.granted if not one.lends and one.name == f"{name} (pinned)"]
            if not pins:
                raise ConfigError(cause=f"model {name!r} is not pinned")
            self._requests.end(pins[0], [])

    def resize(self, *, host: Size | None = None, device: Size | None = None, adapters: Size | None = None) -> None:
        """Changes budgets. What they have no room for is evicted, as far as no lease holds it.

        Raises:
            ConfigError: for what is no size.
        """
        self._check_process()
        movement = self._movement
        given = (("host", host), ("device", device), ("adapters", adapters))
        sizes = [None if nbytes is None else size_of(of, nbytes) for of, nbytes in given]
        with movement.changed:
            for ledger, nbytes in zip((movement.host, movement.device, self._tier.host), sizes, strict=True):
                ledger.budget = ledger.budget if nbytes is None else nbytes
            self._tier.shrink()
            self._requests.serve()
            self._requests.settle_masters()
        movement.give_back()

    # What is known of it

    @property
    def device(self) -> str:
        """The device that its models share."""
        return str(self._movement.memory.device)

    def stats(self) -> PoolStats:
        """Figures of the pool: bytes, components, seconds."""
        self._check_process()
        movement = self._movement
        with movement.changed:
            return replace(
                movement.stats,
                host_bytes=movement.host.used,
                host_budget=movement.host.budget,
                device_bytes=movement.device.used,
                device_budget=movement.device.budget,
                adapters_bytes=self._tier.host.used,
                adapters_budget=self._tier.host.budget,
                adapters_device_bytes=sum(self._tier.device.values()),
                leases=sum(granted.lends for granted in self._requests.granted),
                waiting=self._requests.waiting,
                stages=replace(movement.stats.stages),
            )

    def explain(self, name: str) -> Explanation:
        """Where a model's components are, and why they came or went last. Its text is for people.

        Raises:
            ConfigError: for a name that is not in the pool.
        """
        model = self._model(name)
        with self._movement.changed:
            found = Explanation(name)
            found.adapters = {adapter.name: weight for adapter, weight in model.adapters.chosen.weights}
            for of, bound in model.bounds.items():
                component = bound.component
                state = self._movement.states.get(component)
                users = tuple(other.name for other in self._models.values() if component in other.components)
                why = () if state is None else tuple(state.reasons)
                here = component.host is not None, component.arrived
                of_float8 = len(float8_layers(bound.module)), errors_of(component.source)
                found.components.append(Residence(of, component.nbytes, *here, users, why, *of_float8))
            return found

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._movement.closed

    def close(self) -> None:
        """Ends the pool's threads and frees its memory: modules have none afterwards. Calling it twice is fine."""
        if os.getpid() != self._process:
            return
        with deferred():
            self._requests.close()
            with self._movement.changed:
                for model in self._models.values():
                    model.gone = True
                    self._forget_adapters(model)
                self._models.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Leases

    def _told(self, lease: Lease) -> None:
        """Counts a lease that has ended."""
        stats = self._movement.stats
        with self._movement.changed:
            stats.ended += 1
            stats.stages.add_all(lease.stages)
        self._late_use.check()
        if self._observe is not None:
            try:
                self._observe(lease.model.name, replace(lease.stages))
            except Exception:
                logger.exception("what observes the pool failed")

    def _measured(self, name: str, key: Hashable, request: Request) -> Callable[[Lease], object]:
        """As ``_told``; and learns what torch has allocated meanwhile, copies that came to its memory aside."""
        memory, workspaces = self._movement.memory, self._workspaces
        with self._movement.changed:
            if workspaces.measuring in self._requests.granted:
                return self._told
            workspaces.measuring = request
            began = memory.begin_peak()
            missing = [component for component in request.held if not component.on_device]

        def ended(lease: Lease) -> None:
            with self._movement.changed:
                came = sum(one.nbytes for one in missing if isinstance(one.slab, PlainSlab) and one.on_device)
                workspaces.learn(name, key, memory.peak() - began - came)
                workspaces.measuring = None
            self._told(lease)

        return ended


def _stop(process: int, movement: Movement, requests: Requests) -> None:
    # A forked child has neither these threads nor whoever held their locks.
    if os.getpid() == process:
        movement.stop()
        requests.stop()


@atexit.register
def _close_all() -> None:
    """Before the interpreter ends: a thread that is copying then would be stopped where it is."""
    for pool in list(_pools):
        pool.close()
