"""Weights of linear layers as float8 (e4m3fn) with float32 scales: half the bytes of bfloat16.

* ``numbers``: rounding, scales, and what that costs in accuracy. ``linear``: the layer that has such weights.
* ``layers``: which layers of a module are converted, and converting them. ``files``: checkpoints of such modules.

Knows no pool, and nothing of where weights come from.
"""

from penstock.fp8.files import prepare, save
from penstock.fp8.layers import Fp8, convert
from penstock.fp8.linear import Float8Linear
from penstock.fp8.numbers import TensorError

__all__ = ["Float8Linear", "Fp8", "TensorError", "convert", "prepare", "save"]
