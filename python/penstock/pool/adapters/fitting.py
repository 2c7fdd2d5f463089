"""The layers of a model that an adapter is for, and whether it fits them.

Promises that an adapter fits as a whole or is refused with the tensor that does not. Knows ``Linear``, convolutions
of one group, and transformers' ``Conv1D``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.errors import AdapterError
from penstock.pool.adapters.formats import Pair

if TYPE_CHECKING:
    from penstock.pool.bound import Bound

logger = logging.getLogger(__name__)
_MATRIX = 2
"""Dimensions."""
_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


@dataclass(eq=False)
class Part:
    """What an adapter has for one layer."""

    bound: Bound
    layer: torch.nn.Module
    number: int
    """Of the layer's weight in its component."""
    scaling: tuple[float, float]
    """What the product is multiplied with, and divided by."""
    index: int = 0
    """Of the two matrices in the adapter's layout."""

    def factor(self, weight: float) -> float:
        """What the product is multiplied with. In peft's order, so that both round alike."""
        times, over = self.scaling
        return weight * times / over


Fitted = tuple[Part, torch.Tensor, torch.Tensor]
"""With its matrices: down ``(rank, in)``, up ``(out, rank)``, and the dimensions of a convolution."""


def is_transposed(layer: torch.nn.Module) -> bool:
    """Whether a layer's weight is ``(in, out)``: that of transformers' ``Conv1D``."""
    return type(layer).__name__ == "Conv1D"


def fitted(
    pairs: Sequence[Pair], location: str, bounds: Mapping[str, Bound], *, component: str | None, strict: bool
) -> list[Fitted]:
    """The parts of an adapter.

    Args:
        pairs: of its file.
        location: for messages.
        bounds: the model's modules, by the names of components.
        component: which of them layers are of where the file does not say. By default, the only one that has all.
        strict: whether layers that the model lacks are an error; otherwise they are left out.

    Raises:
        AdapterError: for what does not fit.
    """
    unsaid = [pair for pair in pairs if pair.component is None]
    if unsaid:
        of = component or _only(unsaid, location, bounds)
        for pair in unsaid:
            pair.component = of
    parts: list[Fitted] = []
    missing = []
    for pair in pairs:
        layer = _layer(pair, bounds)
        if layer is None:
            missing.append(pair)
        else:
            parts.append(_part(pair, location, bounds[str(pair.component)], layer))
    if missing:
        some = ", ".join(f"{pair.component}.{pair.path}" for pair in missing[:3])
        cause = f"{len(missing)} of its {len(pairs)} layers are not in the model, such as {some}"
        if strict or not parts:
            remedy = "It is for another architecture" if not parts else "strict=False leaves these out"
            raise AdapterError(location=location, tensor=missing[0].key, cause=cause, remedy=remedy)
        logger.warning("%s: %s: they are left out", location, cause)
    return parts


def _only(pairs: Sequence[Pair], location: str, bounds: Mapping[str, Bound]) -> str:
    """The component that has the most of these layers, which must be one."""
    if len(bounds) == 1:
        return next(iter(bounds))
    found = {name: sum(_found(bound.module, pair.path) is not None for pair in pairs) for name, bound in bounds.items()}
    most = max(found.values())
    fit = [name for name, count in found.items() if count == most]
    if len(fit) > 1:
        cause = f"it does not say which component it is for: {', '.join(map(repr, fit))} fit equally well"
        raise AdapterError(location=location, cause=cause, remedy="Name it: load_adapter(…, component=…)")
    return fit[0]


def _layer(pair: Pair, bounds: Mapping[str, Bound]) -> torch.nn.Module | None:
    bound = bounds.get(str(pair.component))
    return None if bound is None else _found(bound.module, pair.path)


def _found(module: torch.nn.Module, path: str) -> torch.nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        # Newer text encoders of transformers have no ``text_model`` in between.
        shorter = path.removeprefix("text_model.")
        return None if shorter == path else _found(module, shorter)


def _part(pair: Pair, location: str, bound: Bound, layer: torch.nn.Module) -> Fitted:
    down, up = _matrix(pair.down), _matrix(pair.up)

    def refuse(cause: str, remedy: str = "It is for another architecture") -> AdapterError:
        return AdapterError(location=location, tensor=pair.key, cause=f"layer {pair.path!r}: {cause}", remedy=remedy)

    weight = layer._parameters.get("weight")
    is_known = isinstance(layer, (torch.nn.Linear, *_CONVOLUTIONS)) or is_transposed(layer)
    if not is_known or weight is None:
        raise refuse(
            f"a {type(layer).__name__} has no weight that a LoRA could be added to", "Leave it out of the LoRA"
        )
    number = next((number for number, tensor in enumerate(bound.tensors) if tensor is weight), None)
    if number is None:
        raise refuse("its weight was replaced since the model came into the pool", "Leave modules as they are")
    if not weight.is_floating_point() or not down.is_floating_point() or not up.is_floating_point():
        raise refuse(f"a LoRA of {down.dtype} on a weight of {weight.dtype} is not to be had", "Use a plain dtype")
    if min(down.dim(), up.dim()) < _MATRIX:
        raise refuse("what should be matrices has one dimension", "Save the adapter again")
    rank = down.shape[0]
    if not rank:
        raise refuse("its rank is 0", "Save the adapter again")
    shape = tuple(weight.shape)
    if isinstance(layer, _CONVOLUTIONS):
        if layer.groups > 1:
            raise refuse(f"the convolution has {layer.groups} groups", "Leave it out of the LoRA")
        ones = (1,) * (len(shape) - _MATRIX)
        down, up = (half.reshape(*half.shape, *ones) if half.dim() == _MATRIX else half for half in (down, up))
        wanted = (rank, *shape[1:]), (shape[0], rank, *ones)
    else:
        down, up = (half.flatten(1) if half.numel() == half.shape[0] * half.shape[1] else half for half in (down, up))
        outer, inner = shape[::-1] if is_transposed(layer) else shape
        wanted = (rank, inner), (outer, rank)
    if (tuple(down.shape), tuple(up.shape)) != wanted:
        cause = f"matrices {tuple(down.shape)} and {tuple(up.shape)} do not fit its weight {shape}"
        raise refuse(cause)
    return Part(bound, layer, number, pair.scaling(rank)), down, up


def _matrix(half: torch.Tensor | None) -> torch.Tensor:
    if half is None:
        raise AssertionError("a half is missing")
    # Formats of 8 bits cannot be multiplied; all of their numbers are in this one.
    return half.to(torch.bfloat16) if half.is_floating_point() and half.dtype.itemsize == 1 else half
