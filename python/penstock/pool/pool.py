"""``ModelPool``: models by name, made of components that ``residency`` moves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import ConfigError, InsufficientMemoryError
from penstock.pool.changes import keep_changes
from penstock.pool.component import Bound, Component, adopted, built, take_over
from penstock.pool.figures import Explanation, PoolStats, Residence
from penstock.pool.lease import Lease
from penstock.pool.memory import Memory, host_available
from penstock.pool.residency import Request, Residency
from penstock.units import size_meant

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

Size = int | str
"""Bytes, as a number or with a unit: ``"96GiB"``."""


@dataclass(eq=False)
class Part:
    """A component of a model, and the module that is bound to it."""

    component: Component
    bound: Bound


@dataclass(eq=False)
class Model:
    """What a name in the pool stands for."""

    name: str
    parts: dict[str, Part]
    whole: Any = None
    """The pipeline or module that was adopted."""

    @property
    def components(self) -> list[Component]:
        """Each once, in the order of the parts."""
        return list(dict.fromkeys(part.component for part in self.parts.values()))


class ModelPool:
    """Models that share a device.

    Weights have a *master* in host memory, within ``host_budget``. They are copied to the device when their model is
    used, within ``device_budget``. Eviction from the device copies nothing back.

    ::

        pool = ModelPool(device="cuda:0", host_budget="96GiB")
        pool.register("sd", {"unet": "unet/", "vae": "vae/"}, build={"unet": make_unet, "vae": make_vae})
        with pool.use("sd") as m:
            m["unet"](...)

    Outside of a lease, parameters are views of the master: on the CPU, and to be read only. Several threads may use a
    pool. A forked child has to make its own.
    """

    def __init__(
        self,
        device: Any = "cuda",
        *,
        host_budget: Size | Literal["auto"] = "auto",
        device_budget: Size | Literal["auto"] = "auto",
        reserve: Size = "4GiB",
    ) -> None:
        """Makes an empty pool. Nothing is allocated yet.

        Args:
            device: ``"cuda"``, ``"cuda:N"``, or ``"cpu"``, where copies are host memory too.
            host_budget: bytes of masters. By default, half of what the machine could spare.
            device_budget: bytes of copies on the device. By default, what is free there now, less ``reserve``.
            reserve: bytes that a default ``device_budget`` leaves to activations and others.

        Raises:
            ConfigError: for what is no size.
            DeviceError: for a device that is not there.
            MissingDependencyError: where torch is absent or too old.
        """
        from penstock.frameworks.torch import Torch

        memory = Memory(Torch().device(device))
        left = _size("reserve", reserve)
        host = host_available() // 2 if host_budget == "auto" else _size("host_budget", host_budget)
        on_device = memory.available() - left if device_budget == "auto" else _size("device_budget", device_budget)
        self._residency = Residency(memory, host, max(on_device, 0))
        self._models: dict[str, Model] = {}
        self._process = os.getpid()

    # What is in the pool

    def register(
        self,
        name: str,
        locations: Mapping[str, Any],
        *,
        build: Mapping[str, Callable[[], torch.nn.Module]],
        dtype: Any = None,
    ) -> None:
        """Adds a model of one or more components. Headers are read now, weights when they are wanted first.

        Components of the same files that become the same tensors are one component, with one master and one copy on
        the device, whichever models have them.

        Args:
            name: what it is called in the pool.
            locations: for each component what ``penstock.open`` takes, or a ``Checkpoint``.
            build: for each component a function that builds its module. It is called now, without memory for
                parameters. Buffers that no checkpoint holds keep what it put into them.
            dtype: what floating-point parameters become; by default they have the checkpoint's dtypes.

        Raises:
            ConfigError: for a name that is taken, or a component that only one of the mappings has.
            TensorNotFoundError, DestinationError: where a module and its checkpoint do not fit.
            PenstockError: what opening a checkpoint raises.
        """
        from penstock.checkpoint import Checkpoint, open
        from penstock.frameworks.torch import Torch

        self._check_new(name)
        for of in [*locations, *build]:
            if of not in locations or of not in build:
                lacks = "build" if of in locations else "locations"
                raise ConfigError(cause=f"component {of!r} of {name!r} is not in {lacks}", remedy="Name it in both")
        becomes = None if dtype is None else Torch().floating_dtype(dtype)
        made = {}
        for of, location in locations.items():
            checkpoint = location if isinstance(location, Checkpoint) else open(location)
            made[of] = built(of, build[of], checkpoint, becomes)
        with self._residency.changed:
            self._check_new(name)
            self._models[name] = Model(name, {of: self._enter(*each) for of, each in made.items()})

    def adopt(self, name: str, model: Any) -> None:
        """Takes over a model that is built: a ``torch.nn.Module``, or a pipeline of diffusers with its components.

        Its weights move to masters of the pool one by one, so that memory for one more tensor is enough. They come from
        nowhere else, so these masters stay until ``unload``.

        Raises:
            ConfigError: for a name that is taken, and for what has no modules.
            DestinationError: for tensors without plain memory, such as quantised ones.
            InsufficientMemoryError: where the host budget has no room for it.
        """
        self._check_new(name)
        made = {of: adopted(of, module) for of, module in _modules_of(model).items()}
        residency = self._residency
        with residency.changed:
            self._check_new(name)
            wanted = [(component, component.nbytes) for component, _ in made.values()]
            room = residency.host.room_for(wanted)
            if room is None:
                residency.host.check_fits(f"model {name!r}", sum(nbytes for _, nbytes in wanted))
                cause = f"masters that are in use leave no room for model {name!r}"
                raise InsufficientMemoryError(cause=cause, remedy="Raise host_budget, or unload models")
            for victim in room:
                residency.evict_from_host(victim, f"made room for {name}")
            for component, bound in made.values():
                residency.add(component)
                residency.host.hold(component, component.nbytes)
                take_over(component, bound, residency.memory.host_slab(component.nbytes))
            self._models[name] = Model(name, {of: Part(*each) for of, each in made.items()}, model)

    def unload(self, name: str) -> None:
        """Takes a model out of the pool. Its modules have no memory afterwards; components of others stay.

        Raises:
            ConfigError: for a name that is not in the pool, and for a model with an open lease.
        """
        residency = self._residency
        with residency.changed:
            model = self._model(name)
            residency.settle(model.components)
            self._check_idle(model, "unloaded")
            del self._models[name]
            for part in model.parts.values():
                part.component.bound.remove(part.bound)
                part.bound.to(part.component.layout, None)
            for component in model.components:
                if not component.bound:
                    if component.source is None:
                        residency.host.release(component)
                    residency.forget(component)

    # Using it

    def use(self, name: str, *, workspace: Size = 0) -> Lease:
        """A lease of a model. Waits for room on the device; for the weights, the lease's components wait.

        Args:
            name: which model.
            workspace: bytes of the device to keep free beside it, for activations.

        Raises:
            ConfigError: for a name that is not in the pool.
            InsufficientMemoryError: where the model can never fit in the device's budget.
            PoolError: where threads that hold leases could only wait for each other.
        """
        model = self._model(name)
        here = threading.get_ident()
        request = Request(name, model.components, _size("workspace", workspace), thread=here)
        self._residency.admit(request)
        return Lease(self, model, request)

    def prefetch(self, name: str, *, to: Literal["host", "device"] = "device", priority: float = 0) -> Future[None]:
        """Has a model's masters fetched, or the model brought to the device, in the background.

        Returns:
            A future, done when all of it has arrived. While it waits for room, it can be cancelled.

        Raises:
            ConfigError: for a name that is not in the pool, and another ``to``.
            InsufficientMemoryError: where the model can never fit in the budget.
        """
        if to not in ("host", "device"):
            raise ConfigError(cause=f'to={to!r} is neither "host" nor "device"')
        future: Future[None] = Future()
        request = Request(name, self._model(name).components, priority=priority, future=future)
        begin = self._residency.fetch if to == "host" else self._residency.prefetch
        begin(request)
        return future

    def switch(self, name: str) -> None:
        """Brings a model to the device, and waits for it. What is in its way is evicted."""
        self.prefetch(name).result()

    wake_up = switch

    def sleep(self, name: str, level: Literal[1, 2] = 1) -> None:
        """Frees a model's memory on the device (level 1), and its masters too (level 2), unless others use them.

        Raises:
            ConfigError: for a model with an open lease, and for level 2 of one that was adopted.
        """
        if level not in (1, 2):
            raise ConfigError(cause=f"level={level!r} is neither 1 nor 2")
        residency, why = self._residency, f"sleep, level {level}"
        with residency.changed:
            model = self._model(name)
            lasting = [component for component in model.components if component.source is None]
            if level > 1 and lasting:
                cause = f"{lasting[0].name!r} of {name!r} was adopted: nothing could bring its weights back"
                raise ConfigError(cause=cause, remedy="Use level=1, or register it with its checkpoint")
            residency.settle(model.components)
            self._check_idle(model, "put to sleep")
            for component in model.components:
                if component.device is not None and not residency.device.is_held(component):
                    residency.evict_from_device(component, why)
                if level > 1 and component.host is not None and not residency.host.is_held(component):
                    residency.evict_from_host(component, why)

    def pin(self, name: str) -> None:
        """Brings a model to the device and keeps it there until ``unpin``.

        Raises:
            As ``use``.
        """
        model = self._model(name)
        request = Request(f"{name} (pinned)", model.components, thread=0)
        self._residency.admit(request)

    def unpin(self, name: str) -> None:
        """Takes a ``pin`` back.

        Raises:
            ConfigError: for a model that is not pinned.
        """
        with self._residency.changed:
            of = next((one for one in self._residency.granted if one.name == f"{name} (pinned)"), None)
            if of is None:
                raise ConfigError(cause=f"model {name!r} is not pinned")
            self._residency.end(of, [])

    def resize(self, *, host: Size | None = None, device: Size | None = None) -> None:
        """Changes budgets. What they have no room for is evicted, as far as no lease holds it."""
        sizes = [None if given is None else _size(of, given) for of, given in (("host", host), ("device", device))]
        self._residency.resize(*sizes)

    # What is known of it

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def stats(self) -> PoolStats:
        """Figures of the pool: bytes, components, seconds."""
        residency = self._residency
        with residency.changed:
            return replace(
                residency.stats,
                host_bytes=residency.host.used,
                host_budget=residency.host.budget,
                device_bytes=residency.device.used,
                device_budget=residency.device.budget,
                leases=len(residency.granted),
                waiting=residency.waiting,
            )

    def explain(self, name: str) -> Explanation:
        """Where a model's components are, and why they came or went last. Its text is for people.

        Raises:
            ConfigError: for a name that is not in the pool.
        """
        with self._residency.changed:
            found = Explanation(name)
            for of, part in self._model(name).parts.items():
                component = part.component
                users = tuple(other.name for other in self._models.values() if component in other.components)
                here = component.host is not None, component.device is not None
                why = tuple(self._residency.states[component].reasons)
                found.components.append(Residence(of, component.nbytes, *here, users, why))
            return found

    def close(self) -> None:
        """Ends the pool's threads and frees its memory: modules have none afterwards. Calling it twice is fine."""
        if os.getpid() == self._process and not self._residency.closed:
            self._residency.close()
            self._models.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # For leases

    def wait_for(self, lease: Lease, component: str) -> torch.nn.Module:
        """The module of a component whose weights have arrived. For ``Lease``."""
        part = lease.model.parts[component]
        self._residency.wait_for(part.component)
        return part.bound.module

    def end(self, lease: Lease) -> None:
        """Ends a lease. For ``Lease``."""
        residency = self._residency
        with residency.changed:
            if residency.closed:
                return
            for part in lease.model.parts.values():
                keep_changes(residency, part)
            residency.end(lease.request, [residency.memory.now()])

    # Checks

    def _enter(self, component: Component, bound: Bound) -> Part:
        """A part of a new model, of a component that is in the pool already where there is an equal one."""
        known = next((one for one in self._residency.states if one.is_equal(component)), None)
        if known is None:
            self._residency.add(component)
            known = component
        known.bound.append(bound)
        known.rebind_one(bound)
        return Part(known, bound)

    def _model(self, name: str) -> Model:
        if os.getpid() != self._process:
            raise ConfigError(cause="the pool belongs to the process that this one was forked from", remedy="Make one")
        model = self._models.get(name)
        if model is None:
            there = ", ".join(repr(one) for one in self._models) or "nothing"
            raise ConfigError(cause=f"there is no model {name!r} in the pool, which has {there}")
        return model

    def _check_new(self, name: str) -> None:
        if name in self._models:
            raise ConfigError(cause=f"there is a model {name!r} in the pool already", remedy="Unload it first")

    def _check_idle(self, model: Model, what: str) -> None:
        held = {component for granted in self._residency.granted for component in granted.components}
        users = [one.name for one in self._residency.granted if one.name.removesuffix(" (pinned)") == model.name]
        if users and not held.isdisjoint(model.components):
            cause = f"model {model.name!r} is in use, so it cannot be {what}"
            raise ConfigError(cause=cause, remedy="End its leases (and unpin it) first")


def _modules_of(model: Any) -> dict[str, torch.nn.Module]:
    import torch

    if isinstance(model, torch.nn.Module):
        return {"model": model}
    components = getattr(model, "components", None)
    if isinstance(components, Mapping):
        found = {name: part for name, part in components.items() if isinstance(part, torch.nn.Module)}
        if found:
            return found
    cause = f"a {type(model).__name__} is neither a torch.nn.Module nor a pipeline with components that are"
    raise ConfigError(cause=cause, remedy="Adopt its modules one by one")


def _size(argument: str, given: Size) -> int:
    nbytes = size_meant(given) if isinstance(given, str) else given
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0:
        raise ConfigError(cause=f"{argument}={given!r} is no size", remedy='Give bytes, or text such as "96GiB"')
    return nbytes
