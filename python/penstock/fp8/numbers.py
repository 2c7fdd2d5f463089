"""Numbers of float8_e4m3fn with float32 scales: how weights are rounded to them, and how far that moves them.

A scale belongs to a row (an output feature) or to the whole tensor. The largest magnitude becomes 448, the format's
largest number. Rounding is to the nearest, ties to even.

Promises the same bits on every device; that a row of zeros stays one; that a number which is not finite becomes NaN,
the only such number of the format, and does not change the scale of others; and that temporary memory is bounded,
whatever the tensor's size.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of float8_e4m3fn."""
_SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: division by a smaller one differs between devices."""
_AT_ONCE = 1 << 24
"""Elements that are converted at once: 64 MiB as float32."""

Scales = Literal["row", "tensor"]


class TensorError(NamedTuple):
    """How far a tensor of float8 is from the one that it was made of. Both are compared as float32."""

    largest: float
    """Largest difference of an element."""
    relative: float
    """The Euclidean norm of the difference over that of the original; 0 where both are 0."""
    not_finite: int
    """Elements that were NaN or infinite, and are NaN. They do not count above."""


def shape_of_scale(rows: int, scales: Scales) -> tuple[int, ...]:
    """The shape of the scales of a weight with so many rows."""
    return (rows, 1) if scales == "row" else (1,)


def quantise(weight: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor) -> TensorError:
    """Rounds a weight to float8.

    Args:
        weight: of shape (rows, columns), of a floating-point dtype; the work is done on its device.
        stored: is filled: float8_e4m3fn of the same shape, on any device.
        scale: is filled: float32 of shape (rows, 1), or (1,) for one scale of all.
    """
    rows = max(_AT_ONCE // max(weight.shape[1], 1), 1)
    parts = [slice(start, start + rows) for start in range(0, weight.shape[0], rows)]
    of_rows = scale.dim() > 1
    shared = None
    if not of_rows:
        largest = [_largest(weight[part].float())[0].amax() for part in parts]
        shared = _scale_of(torch.stack(largest).amax().view(1)) if largest else _scale_of(scale.new_zeros(1))
        scale.copy_(shared, non_blocking=True)
    sums = []
    for part in parts:
        numbers = weight[part].float()
        magnitudes, finite = _largest(numbers)
        factor = _scale_of(magnitudes) if shared is None else shared
        if finite is not None:
            numbers = torch.where(finite, numbers, torch.nan)
        rounded = (numbers / factor).clamp_(-LARGEST, LARGEST).to(FLOAT8)
        stored[part].copy_(rounded, non_blocking=True)
        if of_rows:
            scale[part].copy_(factor, non_blocking=True)
        off = rounded.float().mul_(factor).sub_(numbers)
        if finite is not None:
            off, numbers = (torch.where(finite, one, 0) for one in (off, numbers))
        norms = [one.square().sum(dtype=torch.float64) for one in (off, numbers)]
        lost = norms[0].new_zeros(()) if finite is None else (~finite).sum().double()
        sums.append(torch.stack([off.abs().amax().double(), *norms, lost]))
    if not sums:
        return TensorError(0.0, 0.0, 0)
    largest_off, moved, there, not_finite = zip(*torch.stack(sums).tolist(), strict=True)
    relative = (sum(moved) / sum(there)) ** 0.5 if sum(there) else 0.0
    return TensorError(max(largest_off), relative, int(sum(not_finite)))


def dequantised(stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight that float8 numbers and their scales stand for, rounded to a dtype."""
    # In place, so that there is no temporary of float32: it is multiplied as one, all the same.
    return stored.to(dtype).mul_(scale)


def quantised_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as float8, with a float32 scale for each row, of shape (rows, 1)."""
    scale = _scale_of(x.abs().amax(dim=1, keepdim=True).float())
    return (x / scale).clamp_(-LARGEST, LARGEST).to(FLOAT8), scale


def quantised_whole(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as float8, with one float32 scale, of shape (1,)."""
    scale = _scale_of(x.abs().amax().float().view(1))
    return (x / scale).clamp_(-LARGEST, LARGEST).to(FLOAT8), scale


def _largest(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The largest magnitude of each row, as a column, and which numbers are finite; None where all are."""
    if not numbers.shape[1]:
        return numbers.new_zeros((numbers.shape[0], 1)), None
    found = numbers.abs().amax(dim=1, keepdim=True)
    if bool(found.isfinite().all()):
        return found, None
    finite = numbers.isfinite()
    return torch.where(finite, numbers.abs(), 0).amax(dim=1, keepdim=True), finite


def _scale_of(largest: torch.Tensor) -> torch.Tensor:
    return torch.where(largest == 0, 1.0, (largest / LARGEST).clamp(min=_SMALLEST_SCALE))
