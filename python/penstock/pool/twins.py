"""Components of equal bytes become one, wherever they came from.

Never on a guess: masters are compared byte by byte when they come into memory, and nothing is remembered of their
content. A hash would have to be computed of every master; a comparison ends at the first tensor that differs, so only
what is equal is read to its end, at the speed of memory. Components whose slabs are laid out differently are not equal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.pool.bound import Bound
from penstock.pool.component import Component, equal_bytes, same_bits
from penstock.pool.layout import Layout, elements_of
from penstock.pool.lock import let_in
from penstock.units import size

if TYPE_CHECKING:
    import torch

    from penstock.pool.members import Members

logger = logging.getLogger(__name__)


class Twins:
    """What is known of components that hold the same bytes, and are to become one once nobody uses the later one."""

    def __init__(self, movement: Members) -> None:
        self._movement = movement
        self._found: dict[Component, tuple[Component, int]] = {}

    def find(self, component: Component, slab: torch.Tensor) -> tuple[Component, int] | None:
        """A component whose master is equal to this new one, and its edits when it was compared. Takes the lock."""
        layout = component.layout

        def is_equal(master: torch.Tensor) -> bool:
            ends = ((place.offset, place.offset + place.nbytes) for place in layout.places)
            return all(equal_bytes(slab[start:end], master[start:end]) for start, end in ends if start < end)

        found = self._first(layout, is_equal, component)
        if found is not None:
            with self._movement.changed:
                self._movement.host.release(found[0])
        return found

    def find_of(self, bound: Bound) -> tuple[Component, int] | None:
        """A component whose master is equal to a module's tensors, held once for the caller, and its edits when it was
        compared. Takes the lock.
        """
        layout = bound.component.layout

        def is_equal(master: torch.Tensor) -> bool:
            pairs = zip(bound.tensors, layout.places, strict=True)
            return all(same_bits(elements_of(one), place.elements(master)) for one, place in pairs if place.nbytes)

        return self._first(layout, is_equal, bound.component)

    def _first(
        self, layout: Layout, is_equal: Callable[[torch.Tensor], bool], but: Component
    ) -> tuple[Component, int] | None:
        movement, tried = self._movement, {but}
        while layout.nbytes:
            with movement.changed:
                one = next((one for one in movement.states if one not in tried and _comparable(one, layout)), None)
                if one is None:
                    return None
                movement.host.hold(one, one.nbytes)
                edits, master = one.edits, one.master()
            tried.add(one)
            equal = False
            try:
                with let_in():
                    equal = is_equal(master)
            finally:
                with movement.changed:
                    equal = equal and one.edits == edits
                    if not equal:
                        movement.host.release(one)
            if equal:
                return one, edits
        return None

    def note(self, component: Component, twin: tuple[Component, int]) -> None:
        """Keeps what was found of a component that has a master now."""
        self._found[component] = twin

    def forget(self, component: Component) -> None:
        """Drops what is known of a component that is gone."""
        self._found.pop(component, None)

    def is_as_compared(self, component: Component, edits: int) -> bool:
        """Whether a component that is held since it was compared still has the bytes that it had then."""
        return component.edits == edits and not _is_changed(component)

    def merge_idle(self) -> None:
        """As ``merge_if_idle``, of all: after a comparison, which held components and kept them apart."""
        for component in list(self._found):
            self.merge_if_idle(component)

    def merge_if_idle(self, component: Component) -> None:
        """Lets whoever has a component have its twin, unless one of them is in use or was changed meanwhile."""
        other, edits = self._found.get(component, (None, 0))
        if other is None:
            return
        movement = self._movement
        if (
            other not in movement.states
            or other.edits != edits
            or component.edits
            or component.derived
            or _is_changed(other)
        ):
            del self._found[component]
            return
        if component.overlay is not None or other.overlay is not None:
            return
        lasting = sum(bound.lasting for bound in component.bound)
        busy = movement.device.is_held(component) or movement.host.holds(component) > lasting
        if busy or _is_changed(component) or movement.is_moving([component]) or other.host is None:
            return
        del self._found[component]
        said = "%s has the bytes of %s: they are one, %s less"
        movement.changed.later(logger.info, said, component, other, size(component.nbytes))
        if other.source is None and component.source is not None:
            # With what the source does not hold: the bytes are equal, so the values are.
            other.source, other.kept = component.source, dict(component.kept)
        for bound in list(component.bound):
            movement.leave_for(bound, other)


def _is_changed(component: Component) -> bool:
    """Whether there is what was written outside of leases, and not saved yet."""
    return any(not bound.leases and bound.home is not None and bound.is_changed() for bound in component.bound)


def _comparable(one: Component, layout: Layout) -> bool:
    return one.host is not None and one.overlay is None and one.layout == layout and not _is_changed(one)
