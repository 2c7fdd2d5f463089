"""How modules get into a pool: built for a checkpoint, or adopted with the weights that they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import DestinationError
from penstock.fp8.files import prepare
from penstock.fp8.layers import Fp8
from penstock.pool.bound import Bound, named_tensors, plain_tensors
from penstock.pool.component import Component, Stored
from penstock.pool.layout import elements_of, layout_of
from penstock.pool.quantised import Converted, Placed, float8_layers, make_float8

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint
    from penstock.pool.memory import Memory


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


def built(
    owner: str,
    name: str,
    build: Callable[[], Any],
    checkpoint: Checkpoint,
    dtype: Any,
    quantize: Fp8 | None,
    memory: Memory,
) -> Bound:
    """The module that a function builds without memory for its parameters, bound to a component of a checkpoint.

    Layers whose weights the checkpoint has as float8 get such, and with ``quantize`` others that it can convert.

    Raises:
        DestinationError: where the function builds no module, or one whose shapes differ from the checkpoint's.
        TensorNotFoundError: where names differ.
        Exception: what the function raises.
    """
    from penstock.model import check_buffers, check_left_out, no_init, of_other_shapes
    from penstock.state import IncompatibleKeys, report, report_misfits, state_of

    scheme = quantize or Fp8()
    with no_init():
        module = build()
    if not isinstance(module, torch.nn.Module):
        cause = f"what was to build it returned a {type(module).__name__}"
        raise DestinationError(f"component {name!r}: {cause}", cause=cause, remedy="Return a torch.nn.Module")
    prepare(module, checkpoint, dtype=dtype, quantize=scheme, device=memory.device)
    kind, tensors, aliases = state_of(module)
    stored = {one: one for one in checkpoint.offset_keys()}
    missing = [one for one in tensors if stored.keys().isdisjoint(aliases[one])]
    report(kind, IncompatibleKeys(missing, [one for one in stored if one not in tensors]))
    report_misfits(kind, of_other_shapes(checkpoint, stored, tensors))
    check_left_out(module, tensors)
    check_buffers(module, {id(tensors[one]) for one in stored})
    stored_names: dict[int, str] = {}
    for one in stored:
        stored_names.setdefault(id(tensors[one]), one)

    ready = {id(one) for layer in float8_layers(module).values() for one in layer._buffers.values()}

    def dtype_of(tensor: torch.Tensor) -> torch.dtype:
        stored_name = None if id(tensor) in ready else stored_names.get(id(tensor))
        return _becomes(tensor, checkpoint, stored_name, dtype)

    # By what was there before, which lives as long as ``tensors``.
    converted: dict[int, tuple[torch.dtype, Placed]] = {}
    if quantize is not None:
        converted = make_float8(module, scheme, dtype_of, computes=scheme.computes_on(memory.device))
    named = named_tensors(module)
    numbers = {id(tensor): number for number, (_, tensor) in enumerate(named)}
    names = {of: numbers[key] for key, of in stored_names.items() if key not in converted}
    becomes = {
        stored_names[key]: (numbers[id(weight)], numbers[id(scale)], was)
        for key, (was, (weight, scale)) in converted.items()
    }
    from_storage = {*names.values(), *(number for *both, _ in becomes.values() for number in both)}
    with plain_tensors():
        templates = [
            (of, torch.empty(tuple(tensor.shape), dtype=dtype_of(tensor), device="meta"))
            if number in from_storage
            else (of, tensor.detach().to("meta"))
            for number, (of, tensor) in enumerate(named)
        ]
        kept = {
            number: tensor.detach().to("cpu", copy=True)
            for number, (_, tensor) in enumerate(named)
            if number not in from_storage
        }
    source = Converted(checkpoint, names, becomes, scheme, memory) if becomes else Stored(checkpoint, names)
    component = Component(name, layout_of(templates), source)
    component.kept = kept
    return Bound(owner, module, component)


def _becomes(tensor: torch.Tensor, checkpoint: Checkpoint, stored: str | None, dtype: Any) -> torch.dtype:
    """The dtype that a module's tensor will have."""
    from penstock.frameworks.torch import DTYPES

    if stored is None:
        return tensor.dtype
    becomes = DTYPES.get(checkpoint[stored].dtype, tensor.dtype)
    return dtype if dtype is not None and becomes.is_floating_point else becomes
