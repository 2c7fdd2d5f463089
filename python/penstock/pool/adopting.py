"""Adopting modules that are built: their weights become masters of a pool, tensor by tensor, or join equal ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import InsufficientMemoryError
from penstock.pool.bound import Bound
from penstock.pool.lock import let_in
from penstock.pool.making import take_over

if TYPE_CHECKING:
    from penstock.pool.component import Component
    from penstock.pool.movement import Movement


def adopt(movement: Movement, name: str, bounds: Sequence[Bound]) -> None:
    """Gives modules, each bound to a component of its own that is in no book yet, masters that last.

    Memory for one more tensor is enough: the old memory of each is free once it was moved. Called within
    ``lock.deferred``; KeyboardInterrupt may come while bytes are compared and moved.

    Raises:
        InsufficientMemoryError: where the host budget has no room; nothing has been moved then.
        Exception: where moving fails. The modules have plain host memory that is theirs; the pool has none of them.
    """
    moved: list[Bound] = []
    equal: dict[Bound, tuple[Component, int]] = {}
    with movement.changed:
        # What these are compared with has to stay until they join it.
        movement.comparing += 1
    try:
        left = list(bounds)
        while left:
            apart = _find_equal(movement, left, equal)
            with movement.changed:
                _take_room(movement, name, [bound.component for bound in apart])
            _move(movement, apart, moved)
            left = _join(movement, equal)
    except BaseException:
        with movement.changed:
            for one, _ in equal.values():
                movement.host.release(one)
            for bound in moved:
                bound.to("host")
                movement.leave(bound)
        raise
    finally:
        with movement.changed:
            movement.comparing -= 1
            movement.changed.notify_all()


def _find_equal(movement: Movement, bounds: Sequence[Bound], equal: dict[Bound, tuple[Component, int]]) -> list[Bound]:
    """Notes which components have the bytes of these modules, and holds them. Returns the modules without one."""
    apart = []
    for bound in bounds:
        found = movement.find_equal(bound)
        if found is None:
            apart.append(bound)
        else:
            equal[bound] = found
    return apart


def _move(movement: Movement, apart: Sequence[Bound], moved: list[Bound]) -> None:
    """Moves modules to masters of their own, for which room was taken. They are added to ``moved`` one by one."""
    try:
        for bound in apart:
            with let_in():
                slab, pin = movement.memory.growing_host_slab(bound.component.nbytes)
                take_over(bound, slab)
                pin()
            with movement.changed:
                bound.component.host = slab
                bound.lasting = True
                movement.join(bound, bound.component)
                # The room that was taken for it.
                movement.host.release(bound.component)
            moved.append(bound)
    except BaseException:
        with movement.changed:
            for bound in apart:
                if bound not in moved:
                    movement.host.release(bound.component)
                    movement.forget(bound.component)
        raise


def _join(movement: Movement, equal: dict[Bound, tuple[Component, int]]) -> list[Bound]:
    """Lets modules join the components of equal bytes, all at once; or returns those whose was changed meanwhile."""
    with movement.changed:
        changed = [bound for bound, found in equal.items() if not movement.is_as_compared(*found)]
        for bound in changed:
            movement.host.release(equal.pop(bound)[0])
        for bound, (one, _) in equal.items() if not changed else ():
            bound.lasting = True
            movement.join(bound, one)
            movement.host.release(one)
        if not changed:
            equal.clear()
        return changed


def _take_room(movement: Movement, name: str, components: Sequence[Component]) -> None:
    wanted = [(component, component.nbytes) for component in components]
    room = movement.host.room_for(wanted)
    with movement.awaiting_masters():
        while room is None and movement.is_keeping and not movement.closed:
            # Masters that are being made may go after that.
            movement.changed.wait()
            room = movement.host.room_for(wanted)
    movement.check_open()
    if room is None:
        movement.host.check_fits(f"model {name!r}", sum(nbytes for _, nbytes in wanted))
        cause = f"masters that are in use leave no room for model {name!r}"
        raise InsufficientMemoryError(cause=cause, remedy="Raise host_budget, or unload models")
    for victim, _ in room:
        movement.evict_from_host(victim, f"made room for {name}")
    for component in components:
        movement.add(component)
        movement.host.hold(component, component.nbytes)
