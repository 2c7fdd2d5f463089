"""Writes to weights: the model that made them keeps them, as a copy of its own where others have the weights too.

Version counters tell which tensors were written to, and the module which of them it has replaced. What bypasses both
(``tensor.data``, views that were made before, other libraries' kernels) is not seen: within a lease it is lost at the
next eviction; outside of one it changes the master, for all who share it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from penstock.pool.bound import Bound, plain_tensors
from penstock.pool.component import Component

if TYPE_CHECKING:
    from penstock.pool.members import Members

logger = logging.getLogger(__name__)


def keep_changes(movement: Members, bound: Bound) -> bool:
    """Saves what a module's tensors were changed to since they were bound, with the lock held.

    Called before a lease and at its end, and not while others lease the same model, nor while the component moves.

    Returns:
        Whether there were any.

    Raises:
        PenstockError: where storage cannot restore what others share. Nothing has changed then.
    """
    if bound.home is None:
        return False
    changed = bound.changed()
    if not changed:
        return False
    if bound.home == "device" and not bound.leases:
        # Nobody has waited for the work that wrote them.
        movement.memory.wait_for_all()
    with plain_tensors():
        # Read before anything is restored: they may be views of what is.
        values = {number: tensor.detach().to("cpu", copy=True) for number, tensor in changed.items()}
        shared = bound.component
        shared.writes += 1
        if (len(shared.bound) > 1 or shared.derived) and _can_restore(shared, bound):
            # What another module wrote to as well stays, until that is asked for.
            others = {n for one in shared.bound if one is not bound and one.home == bound.home for n in one.changed()}
            _put(shared, _right_values(shared, bound, values.keys() - others))
            own = movement.derive(shared)
            own.kept.update(values)
            said = "%s of %s was written to, and is shared: %s has its own now"
            movement.changed.later(logger.info, said, shared, bound.owner, bound.owner)
            movement.leave_for(bound, own)
        else:
            for one in movement.derived_from(shared):
                # What it takes from there is about to change.
                views = one.views("host") if one.host is not None else []
                one.kept = {n: views[n].clone() for n in values if views} | one.kept
            _write(movement, shared, values, bound)
            movement.settle_books(shared)
            bound.to(bound.home)
        shared.mixed &= any(one.home is not None and one.is_changed() for one in shared.bound)
    return True


def _write(movement: Members, component: Component, values: dict[int, torch.Tensor], by: Bound) -> None:
    """Takes changed values to both slabs, and beside the source, which does not have them."""
    if len(component.bound) > 1:
        said = "%s was written to outside of a lease: the change is that of all who share it"
        movement.changed.later(logger.warning, said, component)
    component.edits += 1
    if component.source is not None:
        component.kept.update(values)
    _put(component, values)
    if component.overlay is not None:
        # What was read from the device had it in it already.
        for number in values if component.is_whole else ():
            component.overlay.overwritten(number, as_it_is=by.home == "device")
        if component.overlay.is_empty:
            component.overlay = None
        if by.home == "device":
            said = "%s was written to with adapters merged into it: they are part of its weights now"
            movement.changed.later(logger.warning, said, component)


def _put(component: Component, values: dict[int, torch.Tensor]) -> None:
    """Takes values to both slabs."""
    for home in ("host", "device"):
        there = component.host is not None if home == "host" else component.is_whole
        views = component.views(home) if there else []
        for number, value in values.items() if there else ():
            views[number].copy_(value)
    if values and component.slab is not None and not component.is_whole:
        # The part that is there has the old values from here on.
        right = min(component.layout.places[number].offset for number in values)
        component.slab.filled = min(component.slab.filled, right)


def _can_restore(shared: Component, bound: Bound) -> bool:
    """Whether what was overwritten is to be had from elsewhere."""
    return _elsewhere(shared, bound) is not None or shared.source is not None


def _elsewhere(shared: Component, bound: Bound) -> list[torch.Tensor] | None:
    """The tensors in the slab that a module did not write to, if there is one that has none of its writes."""
    if shared.mixed or any(one.home not in (None, bound.home) and one.is_changed() for one in shared.bound):
        return None
    if bound.home == "host":
        return shared.views("device") if shared.is_whole and shared.overlay is None else None
    return None if shared.host is None else shared.views("host")


def _right_values(shared: Component, bound: Bound, numbers: Iterable[int]) -> dict[int, torch.Tensor]:
    """What shared weights held where a module has written to them."""
    views = _elsewhere(shared, bound)
    if views is not None:
        return {number: views[number] for number in numbers}
    places = {number: shared.layout.places[number] for number in numbers}
    # Not straight into place: a read that fails leaves anything there.
    read = {
        number: torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="cpu")
        for number, place in places.items()
    }
    if read:
        shared.read(read)
    return read


def lose_changes(bound: Bound) -> None:
    """Forgets what a module has written on the device, and that the copy there is right from the first of it on."""
    written = bound.changed()
    slab = bound.component.slab
    bound.component.writes += bool(written)
    if bound.home == "device" and written and slab is not None:
        slab.filled = min(slab.filled, *(bound.component.layout.places[number].offset for number in written))
    bound.to(None)
