"""Low-rank products added to weights: peft's formula, ``weight += (up @ down) * scaling``, one adapter after the other.

Products are worked out in fp32 (fp64 where a matrix is), every sum is rounded to the weight's dtype, as peft does with
adapters in its default precision. Large ones are worked out by rows, so that they take little memory. Promises nothing
about what was in the weight before: ``overlay`` has it restored from the master.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from penstock.pool.adapters.fitting import Part, is_transposed

if TYPE_CHECKING:
    from penstock.pool.adapters.adapter import Adapter
    from penstock.pool.adapters.tier import Tier
    from penstock.pool.bound import Bound
    from penstock.pool.overlay import Target

AT_ONCE = 64 << 20
"""Bytes of a product that are worked out at once."""


def add_to(weight: torch.Tensor, part: Part, down: torch.Tensor, up: torch.Tensor, factor: float) -> None:
    """Adds a product to a weight, in place and on its device."""
    dtype = torch.promote_types(torch.promote_types(down.dtype, up.dtype), torch.float32)
    inner, outer = down.to(dtype).flatten(1), up.to(dtype).flatten(1)
    target = weight.t() if is_transposed(part.layer) else weight
    rows = max(AT_ONCE // max(inner.shape[1] * dtype.itemsize, 1), 1)
    for start in range(0, target.shape[0], rows):
        there = target[start : start + rows]
        product = (outer[start : start + rows] @ inner).mul_(factor).reshape(there.shape)
        if there.dtype.itemsize > 1:
            there += product
        else:
            # Formats of 8 bits are for storage: torch does not add in them.
            there.copy_(there.to(dtype) + product)


class Merging:
    """Adds adapters to the weights of one module's component, for its ``Overlay``."""

    def __init__(self, tier: Tier, bound: Bound) -> None:
        self._tier, self._bound = tier, bound

    def __call__(self, targets: Mapping[int, Target]) -> None:
        """Adds to each weight what is wanted of it: ``((adapter, weight), …)``.

        Raises:
            PenstockError: where an adapter cannot be read again. Weights have anything then.
        """
        adapters: dict[Adapter, None] = {}
        for _, wanted in targets.values():
            adapters.update((adapter, None) for adapter, _ in wanted)
        for adapter in adapters:
            with self._tier.in_host(adapter) as host:
                slab = self._tier.sent(host)
                for part in adapter.parts:
                    if part.bound is not self._bound or part.number not in targets:
                        continue
                    there, wanted = targets[part.number]
                    weight = dict(wanted).get(adapter)
                    if weight is not None:
                        down, up = adapter.matrices(part, slab)
                        add_to(there, part, down, up, part.factor(weight))
