"""Tensors and modules that torch spreads over processes: what of them this process holds.

A ``DTensor`` says by its placements how a tensor is cut; the local shard is a box of the whole tensor, or several where
a dimension was cut twice from right to left (FSDP2 with tensor parallelism). Boxes are worked out as torch cuts
(``torch.chunk``), checked against the shape of the local tensor, and refused where a placement is not known here:
nothing is guessed. No process talks to another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from penstock.errors import DestinationError
from penstock.frameworks.base import Piece, destination_refused

if TYPE_CHECKING:
    import torch

Span = tuple[int, int]
"""``(start, end)`` along one dimension."""


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a ``DTensor``. Imports nothing: there is none before its module was imported."""
    for module in ("torch.distributed.tensor", "torch.distributed._tensor"):
        kind = getattr(sys.modules.get(module), "DTensor", None)
        if isinstance(kind, type) and isinstance(tensor, kind):
            return True
    return False


def local_pieces(name: str, tensor: Any) -> tuple[torch.Tensor, list[Piece]]:
    """The local tensor of a ``DTensor``, and its boxes of the whole one.

    Raises:
        DestinationError: for a placement that is not ``Shard``, ``_StridedShard`` or ``Replicate``, or a local tensor
            of another shape than the placements give.
    """
    local: torch.Tensor = tensor._local_tensor
    spans = _spans(name, tensor)
    if spans is None:
        return local, []
    lengths = tuple(sum(end - start for start, end in of) for of in spans)
    if lengths != tuple(local.shape):
        if 0 in lengths and local.numel() == 0:
            return local, []
        raise destination_refused(
            name,
            f"its placements {_shown(tensor)} give this rank shape {list(lengths)}, its local tensor has "
            f"{list(local.shape)}",
            "Load with torch's set_model_state_dict, or distribute the tensor evenly",
        )
    if 0 in lengths:
        return local, []
    if all(len(of) == 1 for of in spans):
        return local, [Piece(tuple(of[0] for of in spans), local)]
    return local, [
        Piece(tuple(span for span, _ in box), local[tuple(slice(*at) for _, at in box)])
        for box in product(*(_placed(of) for of in spans))
    ]


def _spans(name: str, tensor: Any) -> list[list[Span]] | None:
    """For every dimension, the spans of the whole tensor that this process holds, in the order of the local tensor.

    None for a process that is not in the mesh.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    spans: list[list[Span]] = [[(0, size)] for size in tensor.shape]
    kinds = [type(placement).__name__ for placement in placements]
    for kind, placement in zip(kinds, placements, strict=True):
        if kind not in {"Shard", "_StridedShard", "Replicate"}:
            partial = "each rank holds a summand of it" if "Partial" in kind else "its layout is not known to Penstock"
            remedy = "Redistribute it to Shard or Replicate placements first"
            raise destination_refused(name, f"a DTensor with placement {placement!r}: {partial}", remedy)
    if coordinate is None:
        return None
    for at in _in_order(tensor, kinds):
        placement, count, index = placements[at], mesh.size(at), coordinate[at]
        dimension = placement.dim % tensor.dim()
        if kinds[at] == "Shard":
            spans[dimension] = _chunk(spans[dimension], count, index)
        else:
            # Cut into as many parts as later mesh dimensions have cut it before; of each, this rank has its chunk.
            factor = int(placement.split_factor)
            parts = (_chunk(_chunk(spans[dimension], factor, part), count, index) for part in range(factor))
            spans[dimension] = _merged(span for of in parts for span in of)
    return spans


def _in_order(tensor: Any, kinds: Sequence[str]) -> list[int]:
    """The mesh dimensions that cut the tensor, in the order in which they do."""
    order = getattr(tensor._spec, "shard_order", None)
    if order is None:
        return [at for at, kind in enumerate(kinds) if kind != "Replicate"]
    return [int(at) for entry in order for at in entry.mesh_dims]


def _chunk(spans: list[Span], count: int, index: int) -> list[Span]:
    """What ``torch.chunk`` of the elements of ``spans`` gives as number ``index`` of ``count``."""
    total = sum(end - start for start, end in spans)
    size = -(-total // count)
    first, last = min(size * index, total), min(size * (index + 1), total)
    found, before = [], 0
    for start, end in spans:
        cut = (max(start, start + first - before), min(end, start + last - before))
        if cut[0] < cut[1]:
            found.append(cut)
        before += end - start
    return found


def _merged(spans: Any) -> list[Span]:
    merged: list[Span] = []
    for start, end in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _placed(spans: list[Span]) -> list[tuple[Span, Span]]:
    """Each span with where it lies in the local tensor."""
    placed, at = [], 0
    for start, end in spans:
        placed.append(((start, end), (at, at + end - start)))
        at += end - start
    return placed


def _shown(tensor: Any) -> str:
    return ", ".join(repr(placement) for placement in tensor.placements)


def check_module(module: torch.nn.Module) -> None:
    """Refuses modules whose parameters are not where a write would last: flattened, or gathered for a while.

    Raises:
        DestinationError: naming the module.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    flattens: type | tuple[()] = getattr(fsdp, "FullyShardedDataParallel", ())
    for path, part in module.named_modules():
        where = f"module {path!r}" if path else f"the module ({type(part).__name__})"
        if isinstance(part, flattens):
            cause = f"{where} is a FullyShardedDataParallel (FSDP1): its state_dict is a copy of its parameters"
            remedy = "Shard it with fully_shard (FSDP2), load before it is wrapped, or use load_state_dict"
            raise DestinationError(f"{cause}. {remedy}", tensor=path, cause=cause, remedy=remedy)
        if not all(getattr(group, "is_sharded", True) for group in _groups(part)):
            cause = f"{where} is unsharded at the moment: what is written to gathered parameters is lost"
            remedy = "Call its reshard() first"
            raise DestinationError(f"{cause}. {remedy}", tensor=path, cause=cause, remedy=remedy)


def _groups(module: torch.nn.Module) -> Sequence[Any]:
    """The groups of parameters that ``fully_shard`` made of a module: more than one in newer torch."""
    state_of = getattr(module, "_get_fsdp_state", None)
    if state_of is None:
        return ()
    state = state_of()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
