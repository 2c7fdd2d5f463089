"""Adopting modules that are built: their weights become masters of a pool, tensor by tensor, or join equal ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import InsufficientMemoryError
from penstock.pool.bound import Bound
from penstock.pool.making import take_over

if TYPE_CHECKING:
    from penstock.pool.component import Component
    from penstock.pool.movement import Movement


def adopt(movement: Movement, name: str, bounds: Sequence[Bound]) -> None:
    """Gives modules, each bound to a component of its own that is in no book yet, masters that last.

    Memory for one more tensor is enough: the old memory of each is free once it was moved.

    Raises:
        InsufficientMemoryError: where the host budget has no room; nothing has been moved then.
        Exception: where moving fails. Modules that were moved have plain host memory; the pool has none of them.
    """
    with movement.changed:
        movement.comparing += 1
    try:
        done, apart = _join_equal(movement, name, bounds)
    finally:
        with movement.changed:
            movement.comparing -= 1
            movement.changed.notify_all()
    _move(movement, done, apart)


def _join_equal(movement: Movement, name: str, bounds: Sequence[Bound]) -> tuple[list[Bound], list[Bound]]:
    """Lets modules join components of equal bytes, and takes room for the others. Returns both."""
    equal = {bound: movement.find_equal(bound) for bound in bounds}
    joined = {bound: one for bound, one in equal.items() if one is not None}
    apart = [bound for bound in bounds if bound not in joined]
    with movement.changed:
        try:
            _take_room(movement, name, [bound.component for bound in apart])
        except BaseException:
            for one in joined.values():
                movement.host.release(one)
            raise
        for bound, one in joined.items():
            bound.lasting = True
            bound.component = one
            movement.join(bound, one)
            movement.host.release(one)
    return list(joined), apart


def _move(movement: Movement, done: list[Bound], apart: list[Bound]) -> None:
    """Moves modules to masters of their own; if that fails, ``done`` and these have none in the pool."""
    try:
        for bound in apart:
            slab, pin = movement.memory.growing_host_slab(bound.component.nbytes)
            take_over(bound, slab)
            pin()
            with movement.changed:
                bound.component.host = slab
                bound.lasting = True
                movement.join(bound, bound.component)
                # The room that was taken for it.
                movement.host.release(bound.component)
            done.append(bound)
    except BaseException:
        with movement.changed:
            for bound in done:
                bound.to("host")
                movement.leave(bound)
            for bound in apart:
                if bound not in done:
                    movement.host.release(bound.component)
                    movement.forget(bound.component)
        raise


def _take_room(movement: Movement, name: str, components: Sequence[Component]) -> None:
    wanted = [(component, component.nbytes) for component in components]
    room = movement.host.room_for(wanted)
    if room is None:
        movement.host.check_fits(f"model {name!r}", sum(nbytes for _, nbytes in wanted))
        cause = f"masters that are in use leave no room for model {name!r}"
        raise InsufficientMemoryError(cause=cause, remedy="Raise host_budget, or unload models")
    for victim, _ in room:
        movement.evict_from_host(victim, f"made room for {name}")
    for component in components:
        movement.add(component)
        movement.host.hold(component, component.nbytes)
