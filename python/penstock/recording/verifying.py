"""Comparing two models bit by bit: what was recorded, with what was loaded eagerly.

It knows torch modules, and neither recorders nor engines.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.errors import PenstockError

_NAMED = 5
"""Tensors that differ are named up to this many."""
_PIECE = 64 << 20
"""Bytes that are compared at a time."""


class VerificationError(PenstockError, ValueError):
    """Two models that should be equal are not.

    Attributes:
        differing: the names of all parameters and buffers that differ, or that one of the two lacks.
    """

    def __init__(self, message: str, differing: list[str] | None = None) -> None:
        super().__init__(
            message,
            tensor=differing[0] if differing else None,
            remedy='Load this model with {"record": false}, and report it',
        )
        self.differing = differing or []


def tensors_of(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a model by name, those that are not saved included, tied ones by each name."""
    if isinstance(model, Mapping):
        return dict(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    return {**named, **dict(model.named_buffers(remove_duplicate=False))}


def copy_state(source: torch.nn.Module, destination: torch.nn.Module) -> None:
    """Copies the bytes of all parameters and buffers to those of the same name, shape and dtype.

    So two models begin equal, where their constructors left memory as it was.
    """
    others = tensors_of(destination)
    with torch.no_grad():
        for name, tensor in tensors_of(source).items():
            other = others.get(name)
            if other is not None and (other.shape, other.dtype) == (tensor.shape, tensor.dtype) and not tensor.is_meta:
                other.data.copy_(tensor.data)


def differing(
    one: torch.nn.Module | Mapping[str, torch.Tensor], other: torch.nn.Module | Mapping[str, torch.Tensor]
) -> list[str]:
    """The names of parameters and buffers that are not the same in two models, bit by bit.

    Dtype, shape and bytes are compared. Devices and strides may differ, and the bits of NaNs: torch converts a NaN to
    others where memory is contiguous than where it is strided.

    Args:
        one: a module, or tensors by name.
        other: what to compare it with.
    """
    these, those = tensors_of(one), tensors_of(other)
    names = [name for name in these if name not in those] + [name for name in those if name not in these]
    return names + [name for name in these if name in those and not _are_equal(these[name], those[name])]


def verify_equal(
    one: torch.nn.Module | Mapping[str, torch.Tensor], other: torch.nn.Module | Mapping[str, torch.Tensor]
) -> int:
    """Compares two models bit by bit; returns how many parameters and buffers are equal.

    Raises:
        VerificationError: some differ; the first are named.
    """
    found = differing(one, other)
    if not found:
        return len(tensors_of(one))
    shown = ", ".join(found[:_NAMED]) + (", …" if len(found) > _NAMED else "")
    raise VerificationError(
        f"{len(found)} of {len(tensors_of(one))} parameters and buffers differ from those of an eager load: {shown}. "
        'Load this model with {"record": false}, and report it',
        found,
    )


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_meta or other.is_meta:
        return one.is_meta == other.is_meta
    if one.layout != torch.strided or other.layout != torch.strided:
        return one.layout == other.layout and bool(torch.equal(one.to_dense(), other.to_dense()))
    with torch.no_grad():
        if one.numel() == 0:
            return True
        these, those = _bytes(one), _bytes(other)
        pieces = range(0, len(these), _PIECE)
        return all(
            _pieces_are_equal(these[at : at + _PIECE], those[at : at + _PIECE].to(these.device), one.dtype)
            for at in pieces
        )


def _pieces_are_equal(these: torch.Tensor, those: torch.Tensor, dtype: torch.dtype) -> bool:
    if torch.equal(these, those):
        return True
    if not (dtype.is_floating_point or dtype.is_complex):
        return False
    real = dtype.to_real() if dtype.is_complex else dtype
    try:
        # As float32: not all dtypes have ``isnan``.
        nans = these.view(real).float().isnan() & those.view(real).float().isnan()
    except (RuntimeError, NotImplementedError):
        # float4, which has none.
        return False
    differ = (these.view(-1, real.itemsize) != those.view(-1, real.itemsize)).any(1)
    return not bool((differ & ~nans).any())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
