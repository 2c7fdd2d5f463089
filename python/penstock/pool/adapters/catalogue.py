"""What a pool offers for adapters: they are registered with a model by name, set, and unloaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from penstock._native import shown
from penstock.errors import ConfigError
from penstock.pool.adapters.adapter import Adapter
from penstock.pool.adapters.choice import Choice, Chosen
from penstock.pool.adapters.reading import name_of
from penstock.pool.adapters.tier import Tier
from penstock.pool.catalogue import Catalogue
from penstock.pool.lock import deferred

if TYPE_CHECKING:
    from penstock.arguments import AnyPath
    from penstock.pool.model import Model
    from penstock.pool.movement import Movement


class AdapterCatalogue(Catalogue):
    """Models with adapters."""

    def __init__(self, movement: Movement, adapter_budget: int) -> None:
        super().__init__(movement)
        self._tier = Tier(movement, adapter_budget)
        self._choice = Choice(self._requests, self._tier)

    def load_adapter(
        self,
        model: str,
        location: AnyPath,
        *,
        name: str | None = None,
        weight: float = 1.0,
        component: str | None = None,
        strict: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> str:
        """Registers a LoRA for a model. Nothing is read before ``set_adapters`` asks for it.

        Its file is one of peft (with ``adapter_config.json`` beside it), diffusers or kohya. It can be set from now on;
        what the model has at present does not change.

        Args:
            model: which model.
            location: what ``penstock.open`` takes: a file or a directory, local or remote.
            name: what the adapter is called; by default as its file, or its directory.
            weight: what it is multiplied with where ``set_adapters`` is given no weight.
            component: of the model, which one it is for; by default what the file says, or the only one that has all
                of its layers.
            strict: whether layers that the model lacks are an error. Otherwise they are left out, with a warning.
            storage_options: as for ``penstock.open``.

        Returns:
            The name.

        Raises:
            ConfigError: for a model or component that is not there, a name that is taken, and a weight that is no
                finite number.
        """
        weight = _weight("load_adapter", weight)
        called = name_of(location) if name is None else name
        of = self._model(model)
        if component is not None and component not in of.bounds:
            there = ", ".join(map(repr, of.bounds))
            raise ConfigError(cause=f"model {model!r} has no component {component!r}; it has {there}")
        made = Adapter(
            of, called, location, weight, component=component, strict=strict, storage_options=storage_options
        )
        with self._movement.changed:
            self._movement.check_open()
            known = self._model(model).adapters.by_name
            if called in known:
                cause = f"model {model!r} has an adapter {called!r} already, {shown(known[called].location)}"
                raise ConfigError(
                    location=shown(location), cause=cause, remedy="Give another name=, or unload it first"
                )
            known[called] = made
        return called

    def set_adapters(
        self, model: str, adapters: Mapping[str, float] | Iterable[str] = (), *, merge: bool = False
    ) -> None:
        """Gives a model these adapters instead of those that it has; none by default.

        Unmerged, they are low-rank branches beside the layers. What is on the device already is changed at once: with a
        weight of 0, an adapter is only brought there. Merged, the weights on the device are worked out anew from the
        master, as far as they change; a run costs nothing more then. Weights that several models share are not merged
        into: there the adapters are branches.

        Within a lease of the calling thread, the change is seen by what runs next.

        Args:
            model: which model.
            adapters: weights by name, or names. Several are added in this order.
            merge: whether they become part of the weights.

        Raises:
            ConfigError: for names that are not there, weights that are no finite numbers, and a model that another
                thread leases.
            AdapterError: for an adapter that does not fit the model, or is no LoRA.
            InsufficientMemoryError: where ``adapter_budget`` or the device has no room.
            PenstockError: what reading it fails with. In all cases, the model has the adapters that it had.
        """
        of = self._model(model)
        known = of.adapters.by_name
        with self._movement.changed:
            given = dict(adapters) if isinstance(adapters, Mapping) else dict.fromkeys(_names(adapters))
            lacking = [name for name in given if name not in known]
            if lacking:
                there = ", ".join(map(repr, list(known)[:8])) or "none"
                cause = f"model {model!r} has no adapter {lacking[0]!r}; it has {there}"
                raise ConfigError(cause=cause, remedy="Load it first: load_adapter")
            weights = tuple(
                (known[name], known[name].weight if weight is None else _weight(f"adapter {name!r}", weight))
                for name, weight in given.items()
            )
        self._choice.set(of, Chosen(weights, merge))

    def unload_adapter(self, model: str, name: str) -> None:
        """Takes an adapter out of the pool; if the model has it, the others stay as they are.

        Raises:
            ConfigError: for a name that is not there, and where the model has it and another thread leases it.
            PenstockError: as ``set_adapters``.
        """
        with deferred():
            self._unload_adapter(model, name)

    def adapters(self, model: str) -> list[str]:
        """The names of a model's adapters, in the order in which they were loaded.

        Raises:
            ConfigError: for a name that is not in the pool.
        """
        return list(self._model(model).adapters.by_name)

    def unload(self, name: str) -> None:
        """As of every catalogue. Its adapters go with it."""
        model = self._model(name)
        super().unload(name)
        with self._movement.changed:
            self._forget_adapters(model)
            self._movement.on_moved()

    def _unload_adapter(self, model: str, name: str) -> None:
        of = self._model(model)
        adapter = of.adapters.by_name.get(name)
        if adapter is None:
            raise ConfigError(cause=f"model {model!r} has no adapter {name!r}")
        chosen = of.adapters.chosen
        if any(one is adapter for one, _ in chosen.weights):
            rest = tuple((one, weight) for one, weight in chosen.weights if one is not adapter)
            self._choice.set(of, Chosen(rest, chosen.merge))
        with self._movement.changed:
            if of.adapters.by_name.get(name) is adapter:
                del of.adapters.by_name[name]
            for branches in of.adapters.branches.values():
                branches.forget(adapter)
            self._tier.forget(adapter)
            self._movement.on_moved()

    def _forget_adapters(self, model: Model) -> None:
        """Drops all adapters of a model that is gone, and takes its hooks away. With the lock held."""
        for branches in model.adapters.branches.values():
            branches.remove()
        for adapter in model.adapters.by_name.values():
            self._tier.forget(adapter)
        model.adapters.by_name.clear()
        model.adapters.chosen = Chosen()

    def _rest_adapters(self, model: Model, level: Literal[1, 2]) -> None:
        """Frees what adapters of a model that nobody leases have on the device, and in host memory too. With the lock
        held.
        """
        for adapter in model.adapters.by_name.values():
            self._tier.leave(adapter, host=level > 1)


def _names(given: Iterable[str]) -> list[str]:
    if isinstance(given, str):
        raise ConfigError(cause=f"adapters={given!r} is one name", remedy="Give a list of names, or weights by name")
    return list(given)


def _weight(of: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given):
        raise ConfigError(cause=f"{of}: {given!r} is no finite weight")
    return float(given)
