"""Use of a model's memory on the device after its lease: what the debug mode of a pool finds, and says.

Memory that components left holds NaN there, so what reads it late shows. What writes to it late is found here: whenever
a lease is asked for or has ended, all work on the device is waited for, and that memory is looked at.
"""

from __future__ import annotations

import logging

from penstock.pool.movement import Movement

logger = logging.getLogger(__name__)
_NAMED = 4
"""Components that a line names."""


class LateUse:
    """Looks for late writes, if the pool is in its debug mode."""

    def __init__(self, movement: Movement) -> None:
        self._movement = movement

    def check(self) -> None:
        """Counts and logs writes since the last call. Not to be called with the lock held."""
        movement = self._movement
        if not movement.memory.debug or movement.closed or not movement.memory.was_written_late():
            return
        with movement.changed:
            movement.stats.late_writes += 1
            gone = [str(one) for one, state in movement.states.items() if state.left_device and not one.on_device]
        named = ", ".join(gone[:_NAMED]) + (f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else "")
        logger.error(
            "memory of %s was written to after its component had left: an alias of a weight, or a CUDA graph, was used "
            "after its lease. Not there now: %s",
            movement.memory.device,
            named or "nothing that is still in the pool",
        )
