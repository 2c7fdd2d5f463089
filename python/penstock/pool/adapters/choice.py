"""Which adapters a model has, and how: as branches beside its layers, or merged into its weights.

A change is one step, with the pool's lock held, once all bytes that it needs are there. Promises that a change which
fails leaves the model with the adapters that it had, and that nobody else's lease sees one. Weights that another model
has too, or that have several places in a module, are not merged into: their adapters are branches.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, PenstockError
from penstock.pool.adapters.branches import Branches
from penstock.pool.adapters.merging import Merging
from penstock.pool.changes import keep_changes
from penstock.pool.lock import deferred
from penstock.pool.overlay import Overlay

if TYPE_CHECKING:
    from penstock.pool.adapters.adapter import Adapter
    from penstock.pool.adapters.tier import Tier
    from penstock.pool.bound import Bound
    from penstock.pool.component import Component
    from penstock.pool.model import Model
    from penstock.pool.requests import Requests
    from penstock.pool.turns import Request

logger = logging.getLogger(__name__)

_URGENT = float("inf")


@dataclass(frozen=True)
class Chosen:
    """Adapters of a model and their weights, in their order."""

    weights: tuple[tuple[Adapter, float], ...] = ()
    merge: bool = False

    @property
    def added(self) -> tuple[tuple[Adapter, float], ...]:
        """Those that change anything."""
        return tuple((adapter, weight) for adapter, weight in self.weights if weight)


@dataclass(eq=False)
class OfModel:
    """What a model has of adapters."""

    by_name: dict[str, Adapter] = field(default_factory=dict)
    chosen: Chosen = field(default_factory=Chosen)
    branches: dict[Bound, Branches] = field(default_factory=dict)

    @property
    def active(self) -> list[Adapter]:
        """Those that leases need on the device: branches that add something."""
        return list(dict.fromkeys(adapter for branches in self.branches.values() for adapter, _ in branches.active))


class Choice:
    """Changes the adapters of models."""

    def __init__(self, requests: Requests, tier: Tier) -> None:
        self._requests, self._movement, self._tier = requests, requests.movement, tier

    def set(self, model: Model, chosen: Chosen) -> None:
        """Gives a model other adapters.

        Raises:
            ConfigError: where another thread leases it.
            PenstockError: what reading, copying or merging them fails with. The model has those that it had.
        """
        with deferred():
            for adapter, _ in chosen.weights:
                if not adapter.is_known:
                    with self._tier.in_host(adapter):
                        pass
            before = self._swap(model, chosen)
            try:
                self._bring_up(model)
            except BaseException:
                self._put_back(model, before)
                raise

    def _put_back(self, model: Model, before: Chosen) -> None:
        try:
            self._swap(model, before)
            self._bring_up(model)
        except PenstockError as error:
            # It is unloaded, or the pool closed; or whoever uses it next is told.
            logger.warning("%s cannot have the adapters again that it had: %s", model.name, error)

    def bytes_beside(self, model: Model) -> tuple[int, int]:
        """Of the branches of a model on the device: in all, and of those that are not there. With the lock held."""
        branches = model.adapters.active
        return sum(one.nbytes for one in branches), sum(one.nbytes for one in branches if not one.there)

    def bring(self, model: Model, request: Request) -> None:
        """Has the branches of a model on the device, for a lease that has taken room for them.

        Raises:
            PenstockError: as ``set``.
        """
        of = model.adapters
        with self._movement.changed:
            missing = [adapter for adapter in of.active if not adapter.there]
            ready = (
                [] if of.chosen.merge else [one for one, weight in of.chosen.weights if not weight and not one.there]
            )
        if missing:
            with self._tier.on_device(missing, None, request):
                pass
        if ready:
            with self._tier.on_device(ready, None):
                pass
        with self._movement.changed:
            self._movement.vacating.reserved -= request.adapters
            request.adapters = 0

    def _swap(self, model: Model, chosen: Chosen) -> Chosen:
        """Changes what is wanted. Returns what was."""
        while True:
            with self._movement.changed:
                leases = self._leases(model)
                points = self._points(leases) if leases else None
                wanted = self._as_branches(model, chosen)
            with self._tier.on_device(wanted, points), self._movement.changed:
                changing = self._changing(model, chosen)
                if changing:
                    self._requests.settle(changing)
                leases = self._leases(model)
                self._keep_writes(model, chosen, leases)
                if not set(self._as_branches(model, chosen)) <= set(wanted) or self._is_moving(model, chosen):
                    # Something was changed meanwhile: what can be merged, or who uses it.
                    continue
                before, model.adapters.chosen = model.adapters.chosen, chosen
                for bound in model.modules:
                    self._swap_of(model, bound, chosen, leases)
                return before

    def _swap_of(self, model: Model, bound: Bound, chosen: Chosen, leases: Sequence[Request]) -> None:
        branches, component = model.adapters.branches.get(bound), bound.component
        points = self._points(leases) if leases else []
        merged = _merged(bound, chosen)
        beside = () if merged else tuple((one, weight) for one, weight in chosen.added if bound in one.touches)
        if beside and branches is None:
            branches = model.adapters.branches[bound] = Branches(bound)
        if branches is not None:
            # What has been queued may use those that it had.
            bound.points = [*self._movement.memory.not_past(bound.points or ()), *points]
            for adapter, _ in beside:
                branches.hook(adapter)
            branches.active = beside
        if component.overlay is None:
            if not merged:
                return
            component.overlay = Overlay(Merging(self._tier, bound))
        component.overlay.want(merged)
        if component.overlay.is_empty:
            component.overlay = None
        elif component.overlay.is_stale:
            component.writes += 1
            if leases:
                component.points = [*self._movement.memory.not_past(component.points), *points]
            elif component.host is None and bound.home == "device":
                bound.to(None)

    def _bring_up(self, model: Model) -> None:
        """Brings weights that are on the device up to date, and waits for it."""
        movement = self._movement
        with movement.changed:
            due = [one for one in model.components if one.overlay is not None and one.overlay.is_stale and one.is_whole]
            if due:
                movement.begin()
            for component in due:
                movement.want_on_device(component, _URGENT, f"adapters of {model.name}")
            while any(state.copying for state in map(movement.states.get, due) if state is not None):
                movement.check_open()
                movement.changed.wait()
            for state in map(movement.states.get, due):
                if state is not None:
                    state.check()

    # With the lock held

    def _leases(self, model: Model) -> list[Request]:
        """The leases of a model, which must be this thread's."""
        self._movement.check_open()
        if model.gone:
            raise ConfigError(cause=f"model {model.name!r} was unloaded meanwhile")
        lent = {id(bound) for bound in model.modules}
        leases = [one for one in self._requests.granted if one.lends and any(id(of) in lent for of in one.lent)]
        if any(one.thread != threading.get_ident() for one in leases):
            cause = f"model {model.name!r} is leased by another thread, whose adapters would change"
            raise ConfigError(cause=cause, remedy="Set them within that lease, or after it")
        return leases

    def _points(self, leases: Sequence[Request]) -> list[Any]:
        memory = self._movement.memory
        streams = [stream for lease in leases for stream in lease.streams]
        return [memory.now(), *(memory.now(stream) for stream in streams)]

    def _as_branches(self, model: Model, chosen: Chosen) -> list[Adapter]:
        """Adapters that have to be on the device: those that are not merged into all of their weights."""
        if not chosen.merge:
            return [adapter for adapter, _ in chosen.weights]
        apart = [bound for bound in model.modules if not _merged(bound, chosen)]
        return [adapter for adapter, _ in chosen.added if any(bound in adapter.touches for bound in apart)]

    def _changing(self, model: Model, chosen: Chosen) -> list[Component]:
        """Components whose copies change."""
        return [
            bound.component
            for bound in model.modules
            if _merged(bound, chosen) != (bound.component.overlay.wanted if bound.component.overlay is not None else {})
        ]

    def _is_moving(self, model: Model, chosen: Chosen) -> bool:
        return self._movement.is_moving(self._changing(model, chosen))

    def _keep_writes(self, model: Model, chosen: Chosen, leases: Sequence[Request]) -> None:
        """Saves what was written to weights that are about to change: it is what adapters are merged into."""
        changing = self._changing(model, chosen)
        for bound in model.modules:
            if bound.component in changing and bound.home is not None and bound.is_changed():
                if leases:
                    self._movement.memory.wait_for(self._points(leases))
                keep_changes(self._movement, bound)


def _merged(bound: Bound, chosen: Chosen) -> Mapping[int, Hashable]:
    """What is to be merged into a module's weights, by number; nothing where they are not the module's alone."""
    touching = [(adapter, weight) for adapter, weight in chosen.added if bound in adapter.touches]
    component = bound.component
    if not chosen.merge or not touching or len(component.bound) > 1 or component.derived:
        return {}
    aliased = bound.aliased()
    found: dict[int, tuple[tuple[Adapter, float], ...]] = {}
    for adapter, weight in touching:
        for number in adapter.touches[bound].values():
            if number in aliased:
                return {}
            found[number] = (*found.get(number, ()), (adapter, weight))
    return found
