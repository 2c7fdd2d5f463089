"""Checkpoints with float8 weights: written, and modules made ready for them.

The layout is that of compressed-tensors, which vLLM reads too. For each converted layer ``X`` of shape (rows, columns)
a file holds ``X.weight``, F8_E4M3 of that shape, and ``X.weight_scale``, F32 of shape (rows, 1), or (1,) for one scale
of all. The weight is their product. The other tensors are as in any file. Its metadata has ``fp8.dtype``, the dtype
that the weights had before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import ConfigError, DestinationError
from penstock.fp8.layers import Fp8, replace, scheme_of, tied
from penstock.fp8.linear import Float8Linear
from penstock.safetensors import save_file

if TYPE_CHECKING:
    from penstock.arguments import AnyPath
    from penstock.checkpoint import Checkpoint

_KEY = "fp8.dtype"
_FLOATING = {str(one).removeprefix("torch."): one for one in (torch.bfloat16, torch.float16, torch.float32)}


def save(module: torch.nn.Module, path: AnyPath, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a module with float8 weights to a safetensors file. Tied tensors are written once.

    Args:
        module: converted by ``convert``, or by a pool: within a lease, or where its master is in host memory.
        path: of a file of this machine.
        metadata: what else the file's header is to say.

    Raises:
        ConfigError: where it has no float8 weights, or such of several dtypes.
        DestinationError: where its weights have no memory at present.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, Float8Linear)]
    dtypes = {str(layer.weight_dtype).removeprefix("torch.") for layer in layers}
    if len(dtypes) != 1:
        cause = f"its float8 weights were {' and '.join(sorted(dtypes))}" if dtypes else "it has no float8 weights"
        raise ConfigError(cause=f"the {type(module).__name__} cannot be written: {cause}", remedy="Convert it first")
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_meta:
            cause = "it has no memory at present"
            raise DestinationError(
                tensor=name, cause=cause, remedy="Write it within a lease, or prefetch it to the host"
            )
        tensors.setdefault(id(tensor), (name, tensor.detach().contiguous()))
    save_file(dict(tensors.values()), path, {"format": "pt", **(metadata or {}), _KEY: dtypes.pop()})


def prepare(
    module: torch.nn.Module,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | None = None,
    quantize: str | Fp8 = "fp8",
    device: Any = "cpu",
) -> list[str]:
    """Makes linear layers of a module ready for a checkpoint that holds their weights as float8.

    Their new memory is where the old one was, and uninitialised: load the checkpoint to the module next.

    Args:
        module: with or without memory.
        checkpoint: what ``penstock.open`` returned.
        dtype: what weights are dequantised to; by default what the file's metadata says, else bfloat16.
        quantize: how layers compute (``Fp8.compute``).
        device: where they will.

    Returns:
        Names of these layers. Empty for a checkpoint without such weights.

    Raises:
        ConfigError: for metadata that names no such dtype.
        DestinationError: for scales of other shapes than these two.
        DeviceError: where they are to compute in FP8 there, and cannot.
    """
    scheme, there = scheme_of(quantize), torch.device(device)
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if type(layer) is torch.nn.Linear and layer._parameters.get("weight") is not None
    }
    ready = []
    for _, group in tied(layers):
        names = [name for name, layer in layers.items() if any(layer is one for one in group)]
        held = next((name for name in names if _is_held(checkpoint, name)), None)
        if held is not None:
            of_scale = _shape_of_scale(checkpoint, held, group[0].out_features)
            computes = scheme.computes_on(there)
            replace(group, of_scale, dtype or _dtype_of(checkpoint), computes=computes)
            ready += names
    return ready


def _is_held(checkpoint: Checkpoint, name: str) -> bool:
    weight = checkpoint.get(_in(name, "weight"))
    return weight is not None and weight.dtype == "F8_E4M3" and _in(name, "weight_scale") in checkpoint


def _in(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name


def _shape_of_scale(checkpoint: Checkpoint, layer: str, rows: int) -> tuple[int, ...]:
    info = checkpoint[_in(layer, "weight_scale")]
    shape = tuple(info.shape)
    if shape not in {(rows, 1), (1,), ()}:
        cause = f"a scale of shape {list(shape)} belongs neither to each of {rows} rows ([{rows}, 1]) nor to all ([1])"
        remedy = "Other quantisations (blocks, groups) are for the library that wrote them"
        raise DestinationError(location=info.location, tensor=_in(layer, "weight_scale"), cause=cause, remedy=remedy)
    return shape


def _dtype_of(checkpoint: Checkpoint) -> torch.dtype:
    named = (checkpoint.metadata() or {}).get(_KEY, "bfloat16")
    if named not in _FLOATING:
        cause = f"its metadata says that {_KEY} is {named!r}, which is not one of {', '.join(_FLOATING)}"
        raise ConfigError(location=checkpoint.files[0][0], cause=cause, remedy="Give dtype=torch.bfloat16")
    return _FLOATING[named]
