"""How modules get into a pool: built for a checkpoint, or adopted with the weights that they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import DestinationError
from penstock.pool.bound import Bound, named_tensors, plain_tensors
from penstock.pool.component import Component, Stored
from penstock.pool.layout import elements_of, layout_of

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint


def adopted(owner: str, name: str, module: torch.nn.Module) -> Bound:
    """A module that is built, bound to a component of its own; it keeps its memory until ``take_over``.

    Raises:
        DestinationError: for tensors without plain memory.
    """
    named = named_tensors(module)
    for of, tensor in named:
        if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
            cause = "it has no memory (the meta device, or a lazy module), so there is nothing to adopt"
            raise DestinationError(tensor=of, cause=cause, remedy="Register the model with its checkpoint")
    return Bound(owner, module, Component(name, layout_of(named), None))


def take_over(bound: Bound, slab: torch.Tensor) -> None:
    """Moves a module's tensors to a slab, one by one."""
    with plain_tensors():
        for tensor, place in zip(bound.tensors, bound.component.layout.places, strict=True):
            if place.nbytes:
                # All elements of its memory: where they overlap, or have gaps, they do so in the slab.
                place.elements(slab).copy_(elements_of(tensor))
            # Its old memory is free from here on, unless another tensor shares it.
            tensor.data = place.of(slab)


def built(owner: str, name: str, build: Callable[[], Any], checkpoint: Checkpoint, dtype: Any) -> Bound:
    """The module that a function builds without memory for its parameters, bound to a component of a checkpoint.

    Raises:
        DestinationError: where the function builds no module, or one whose shapes differ from the checkpoint's.
        TensorNotFoundError: where names differ.
        Exception: what the function raises.
    """
    from penstock.model import check_buffers, check_left_out, no_init, of_other_shapes
    from penstock.state import IncompatibleKeys, report, report_misfits, state_of

    with no_init():
        module = build()
    if not isinstance(module, torch.nn.Module):
        cause = f"what was to build it returned a {type(module).__name__}"
        raise DestinationError(f"component {name!r}: {cause}", cause=cause, remedy="Return a torch.nn.Module")
    kind, tensors, aliases = state_of(module)
    stored = {one: one for one in checkpoint.offset_keys()}
    missing = [one for one in tensors if stored.keys().isdisjoint(aliases[one])]
    report(kind, IncompatibleKeys(missing, [one for one in stored if one not in tensors]))
    report_misfits(kind, of_other_shapes(checkpoint, stored, tensors))
    check_left_out(module, tensors)
    check_buffers(module, {id(tensors[one]) for one in stored})
    named = named_tensors(module)
    numbers = {id(tensor): number for number, (_, tensor) in enumerate(named)}
    stored_names: dict[int, str] = {}
    for one in stored:
        stored_names.setdefault(numbers[id(tensors[one])], one)
    with plain_tensors():
        templates = [
            (of, _typed(tensor, checkpoint, stored_names.get(number), dtype))
            for number, (of, tensor) in enumerate(named)
        ]
        kept = {
            number: tensor.detach().to("cpu", copy=True)
            for number, (_, tensor) in enumerate(named)
            if number not in stored_names
        }
    source = Stored(checkpoint, {of: number for number, of in stored_names.items()})
    component = Component(name, layout_of(templates), source)
    component.kept = kept
    return Bound(owner, module, component)


def _typed(tensor: torch.Tensor, checkpoint: Checkpoint, stored: str | None, dtype: Any) -> torch.Tensor:
    """A tensor without memory of the shape of a module's, and of the dtype that it will have."""
    if stored is None:
        return tensor.detach().to("meta")
    from penstock.frameworks.torch import DTYPES

    becomes = DTYPES.get(checkpoint[stored].dtype, tensor.dtype)
    if dtype is not None and becomes.is_floating_point:
        becomes = dtype
    return torch.empty(tuple(tensor.shape), dtype=becomes, device="meta")
