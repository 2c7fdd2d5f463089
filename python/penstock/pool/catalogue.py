"""The models of a pool by name: how they come in, and go.

Promises that a name stands for all of a model or for nothing, and that a model which is used does not go. That a forked
child is told to make a pool of its own, and takes no lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.pool.adopting import adopt
from penstock.pool.bound import Bound, claim
from penstock.pool.lock import deferred, let_in
from penstock.pool.making import adopted, built
from penstock.pool.model import Model, modules_of
from penstock.pool.movement import Movement
from penstock.pool.quantised import check_converted, schemes_of
from penstock.pool.registering import sources_of
from penstock.pool.requests import Requests
from penstock.pool.workspace import Workspaces

if TYPE_CHECKING:
    import torch


class Catalogue:
    """Models by name."""

    def __init__(self, movement: Movement) -> None:
        self._movement = movement
        self._requests = Requests(movement)
        self._models: dict[str, Model] = {}
        self._coming: set[str] = set()
        self._workspaces = Workspaces()
        self._process = os.getpid()

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._models))

    def register(
        self,
        name: str,
        locations: Any,
        *,
        build: Mapping[str, Callable[[], torch.nn.Module]] | None = None,
        dtype: Any = None,
        quantize: Any = None,
        config: Any = None,
        components: Sequence[str] | None = None,
    ) -> None:
        """Adds a model of one or more components. Headers are read now, weights when they are wanted first.

        Components of the same bytes are one, with one master and one copy on the device, whichever models have them:
        those of the same files from now on, others as soon as both masters are in memory and neither is in use.

        Args:
            name: what it is called in the pool.
            locations: for each component what ``penstock.open`` takes, or a ``Checkpoint``. Or one of these alone: a
                file with a whole image model in its authors' layout, which is recognised, and split into components.
            build: for each component a function that builds its module. It is called now, without memory for
                parameters. Buffers that no checkpoint holds keep what it put into them. Not for a single file.
            dtype: what floating-point parameters become; by default they have the checkpoint's dtypes.
            quantize: ``"fp8"``, or how (``penstock.fp8.Fp8``): weights of linear layers become float8 while they are
                loaded. For all components, or a mapping for some. Layers that a checkpoint has as float8 stay so.
            config: for a single file: a directory with a pipeline's settings in diffusers' layout, or the name of a
                repository. By default the repository that diffusers takes for such files.
            components: of a single file, only these.

        Raises:
            ConfigError: for a name that is taken, a component that only one of the mappings has, and a module that a
                pool has already; where there is nothing to quantise; for a single file that is unknown, a part, or
                a mixture.
            DeviceError: where layers are to compute in FP8, and the device cannot.
            TensorNotFoundError, DestinationError: where a module and its checkpoint do not fit.
            PenstockError: what opening a checkpoint raises.
        """
        from penstock.frameworks.torch import Torch

        becomes = None if dtype is None else Torch().floating_dtype(dtype)
        movement = self._movement
        with deferred(), self._name(name):
            made = {}
            with let_in():
                sources = sources_of(name, locations, build, config=config, components=components)
                schemes = schemes_of(quantize, sources.checkpoints)
                for of, checkpoint in sources.checkpoints.items():
                    scheme = schemes.get(of)
                    made[of] = built(name, of, sources.build[of], checkpoint, becomes, scheme, movement.memory)
            check_converted(name, quantize, schemes, made)
            claim(list(made.values()))
            with movement.changed:
                movement.check_open()
                entered = []
                try:
                    for bound in made.values():
                        self._enter(bound)
                        entered.append(bound)
                except BaseException:
                    for bound in entered:
                        movement.leave(bound)
                    for bound in made.values():
                        bound.let_go()
                    raise
                self._models[name] = Model(name, made, sources.whole)

    def adopt(self, name: str, model: Any) -> None:
        """Takes over a model that is built: a ``torch.nn.Module``, or a pipeline of diffusers with its components.

        Its weights move to masters of the pool one by one, so that memory for one more tensor is enough. Components
        whose bytes the pool has already join these. They come from nowhere else, so these masters stay until
        ``unload``.

        Raises:
            ConfigError: for a name that is taken, for what has no modules, and where modules share tensors with each
                other or with those of a pool.
            DestinationError: for tensors without plain memory, such as quantised ones.
            InsufficientMemoryError: where the host budget has no room for it; nothing was moved then.
        """
        with deferred(), self._name(name):
            modules = modules_of(model)
            once = {id(module): (of, module) for of, module in reversed(modules.items())}
            bounds = {key: adopted(name, *each) for key, each in reversed(once.items())}
            unique = list(bounds.values())
            claim(unique)
            try:
                adopt(self._movement, name, unique)
            except BaseException:
                for bound in unique:
                    bound.let_go()
                raise
            with self._movement.changed:
                self._models[name] = Model(name, {of: bounds[id(module)] for of, module in modules.items()}, model)
                self._requests.serve()

    def unload(self, name: str) -> None:
        """Takes a model out of the pool. Its modules have no memory afterwards; components of others stay.

        Requests that wait for room for it get a ``ConfigError``; its prefetches are cancelled.

        Raises:
            ConfigError: for a name that is not in the pool, and for a model with an open lease.
        """
        with self._movement.changed:
            model = self._idle(name, "unloaded")
            self._requests.withdraw(model.modules)
            del self._models[name]
            model.gone = True
            self._workspaces.forget(name)
            for bound in model.modules:
                bound.to(None)
                bound.let_go()
                self._movement.leave(bound)
            gone = self._movement.vacating.gone()
            self._requests.serve()
        # Here and now, after work on them that is queued.
        self._movement.vacating.make_room(gone)
        self._movement.give_back()

    def _enter(self, bound: Bound) -> None:
        """Binds a module of a new model to its component, or to an equal one that is in the pool already."""
        movement = self._movement
        known = next((one for one in movement.states if one.is_equal(bound.component)), None)
        if known is None:
            known = bound.component
            movement.add(known)
        movement.join(bound, known)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ConfigError(cause="the pool belongs to the process that this one was forked from", remedy="Make one")

    def _model(self, name: str) -> Model:
        self._check_process()
        model = self._models.get(name)
        if model is None:
            there = ", ".join(repr(one) for one in list(self._models)) or "nothing"
            raise ConfigError(cause=f"there is no model {name!r} in the pool, which has {there}")
        return model

    @contextmanager
    def _name(self, name: str) -> Iterator[None]:
        """Keeps a name for a model that is on its way into the pool."""
        self._check_process()
        with self._movement.changed:
            self._movement.check_open()
            if name in self._models or name in self._coming:
                raise ConfigError(cause=f"there is a model {name!r} in the pool already", remedy="Unload it first")
            self._coming.add(name)
        try:
            yield
        finally:
            with self._movement.changed:
                self._coming.discard(name)

    def _idle(self, name: str, what: str) -> Model:
        """The model of that name, of which nothing moves and that nobody leases."""
        model = self._model(name)
        self._requests.settle(model.components)
        self._movement.check_open()
        if self._model(name) is not model:
            raise ConfigError(cause=f"model {name!r} was replaced meanwhile")
        if any(one.name == (name if one.lends else f"{name} (pinned)") for one in self._requests.granted):
            cause = f"model {name!r} is in use, so it cannot be {what}"
            raise ConfigError(cause=cause, remedy="End its leases (and unpin it) first")
        return model
