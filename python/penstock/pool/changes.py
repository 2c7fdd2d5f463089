"""Writes to weights within a lease: the model that made them keeps them, as a copy of its own.

Version counters tell which tensors were written to. Writes that bypass them (``tensor.data``, views that were made
before, other libraries' kernels) are not seen, and are lost at the next eviction.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.pool.component import Component

if TYPE_CHECKING:
    import torch

    from penstock.pool.pool import Part
    from penstock.pool.residency import Residency

logger = logging.getLogger(__name__)


def keep_changes(residency: Residency, part: Part) -> None:
    """Saves what a module's tensors were changed to, at the end of a lease and with the lock held."""
    component, bound = part.component, part.bound
    if component.device is None:
        return
    written = bound.written()
    if not written:
        return
    values = {number: bound.tensors[number].detach().to("cpu", copy=True) for number in written}
    if len(component.bound) > 1:
        part.component = _own(residency, component, part, values)
        return
    component.kept.update(values)
    if component.host is not None:
        views = component.layout.views(component.host)
        for number, value in values.items():
            views[number].copy_(value)
    bound.seen()


def _own(residency: Residency, shared: Component, part: Part, values: dict[int, torch.Tensor]) -> Component:
    """A component of this model alone, with the changed values; the shared one becomes what it was."""
    logger.info("%s was written to, and is shared: its model has a copy of its own now", shared)
    own = Component(shared.name, shared.layout, shared.source)
    own.kept = {**shared.kept, **values}
    residency.add(own)
    shared.bound.remove(part.bound)
    own.bound.append(part.bound)
    own.rebind_one(part.bound)
    if shared.device is not None:
        views = shared.layout.views(shared.device)
        shared.restore({number: views[number] for number in values})
    return own
