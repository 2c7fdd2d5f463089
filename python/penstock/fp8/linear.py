"""A linear layer whose weight is float8, and its two ways to compute.

It is a ``torch.nn.Linear`` to everyone: converted in place, so hooks and references stay. ``weight`` gives the
dequantised weight, so code that reads its dtype, or multiplies by it itself, goes on. Its memory is two buffers,
``weight`` (float8_e4m3fn) and ``weight_scale`` (float32), which ``state_dict`` has under these names. They are no
parameters: what asks the parameters of a model for its dtype gets that of the others.

Promises that ``.to(dtype)`` changes the dtype it computes in, and never the numbers it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from penstock.errors import DestinationError
from penstock.fp8.numbers import TensorError, dequantised, quantise, quantised_rows, quantised_whole

_MULTIPLE = 16
"""Of both features, for matrix multiplication in FP8."""
_BITS = {torch.float8_e4m3fn: torch.uint8, torch.float32: torch.int32}
"""The integers that have the bits of a buffer."""


class Float8Linear(torch.nn.Linear):
    """A linear layer with a float8 weight."""

    weight_dtype: torch.dtype
    """That of the weight it was made of: what it is dequantised to."""
    computes: bool
    """Whether it multiplies in FP8, where shapes and dtypes allow that. Otherwise the weight is dequantised first."""

    @staticmethod
    def take(
        layer: torch.nn.Linear, stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, computes: bool
    ) -> None:
        """Makes a layer one of these, with such a weight in the place of its own."""
        layer.__class__ = Float8Linear
        del layer._parameters["weight"]
        layer._buffers["weight"], layer._buffers["weight_scale"] = stored, scale
        layer.weight_dtype, layer.computes = dtype, computes  # type: ignore[assignment]

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight, dequantised: a copy, so what is written to it is lost. ``requantise`` changes the layer's."""
        stored, scale = self._buffers.get("weight"), self._buffers.get("weight_scale")
        if stored is None or scale is None:
            # Somebody has given it another weight. torch looks for that when there is no such attribute.
            raise AttributeError("weight")
        return dequantised(stored, scale, self.weight_dtype)

    def requantise(self, weight: torch.Tensor) -> TensorError:
        """Rounds another weight into the memory of its own: what is to be changed goes this way, such as a merged LoRA.

        Args:
            weight: of the layer's shape, of a floating-point dtype.

        Returns:
            How far it is from that.

        Raises:
            DestinationError: where the shapes differ, or the layer has no float8 weight at present.
        """
        stored, scale = self._buffers.get("weight"), self._buffers.get("weight_scale")
        if stored is None or scale is None or stored.is_meta or weight.shape != stored.shape:
            has = "no float8 weight in memory" if stored is None or stored.is_meta else f"one of {list(stored.shape)}"
            cause = f"the layer has {has}, and the weight is one of {list(weight.shape)}"
            raise DestinationError(tensor="weight", cause=cause)
        with torch.no_grad():
            return quantise(weight.detach(), stored, scale)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch calls it
        """As of ``torch.nn.Linear``."""
        stored, scale = self._buffers.get("weight"), self._buffers.get("weight_scale")
        if stored is None or scale is None or not self._can_compute(input, stored, scale):
            return functional.linear(input, self.weight, self.bias)
        rows, of_rows = input.reshape(-1, input.shape[-1]), scale.dim() > 1
        numbers, of_input = quantised_rows(rows) if of_rows else quantised_whole(rows)
        bias = self.bias if self.bias is not None and self.bias.dtype == input.dtype else None
        found = torch._scaled_mm(
            numbers,
            stored.t(),
            of_input,
            scale.t() if of_rows else scale.view(1),
            bias=bias,
            out_dtype=input.dtype,
            use_fast_accum=True,
        )
        found = found.view(*input.shape[:-1], found.shape[-1])
        return found if bias is self.bias else found + self.bias

    def _can_compute(self, x: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor) -> bool:
        # Rows with scales of their own are multiplied to bfloat16 only.
        fits = x.dtype == self.weight_dtype and (x.dtype == torch.bfloat16 or scale.dim() <= 1)
        fits &= x.shape[-1] == stored.shape[1] and x.numel() > 0 and x.device == stored.device
        fits &= not any(features % _MULTIPLE for features in stored.shape)
        return self.computes and fits and not (x.requires_grad and torch.is_grad_enabled())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        buffers = self._buffers
        given = {name: one for name, one in buffers.items() if one is not None and one.dtype in _BITS}
        # As integers, which no change of dtypes touches.
        bits = {name: one.view(_BITS[one.dtype]) for name, one in given.items()}
        buffers.update(bits)
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            for name, one in given.items():
                now = buffers[name]
                buffers[name] = one if now is bits[name] or now is None else now.view(one.dtype)
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        return self

    def extra_repr(self) -> str:
        """As of ``torch.nn.Linear``, with how it computes."""
        how = "computes in FP8" if self.computes else f"computes in {self.weight_dtype}"
        return f"{super().extra_repr()}, float8, {how}"
