"""Which layers of a module get float8 weights, and giving them these.

The rule: modules whose class is ``torch.nn.Linear`` itself, whose weight is bfloat16 or float16, that ``Fp8.skip`` does
not name, and whose weight no other parameter of the module is tied to, but that of another such layer. So embeddings,
norms, convolutions, biases, and layers of other classes stay as they are, and ``lm_head`` too.

Promises that the choice needs no weights: names, classes, dtypes and ties decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from penstock.errors import ConfigError, DestinationError, DeviceError
from penstock.fp8.linear import Float8Linear
from penstock.fp8.numbers import FLOAT8, Scales, TensorError, quantise, shape_of_scale
from penstock.optional import installed_version
from penstock.patterns import matches_any

_CONVERTED = (torch.bfloat16, torch.float16)
_CAPABILITY = (8, 9)
"""Of the first GPUs that multiply in FP8."""
_TORCH = (2, 5)
"""The first that multiplies with a scale for each row."""


@dataclass(frozen=True)
class Fp8:
    """How weights become float8.

    Raises:
        ConfigError: for other values than these.
    """

    scales: Scales = "row"
    """One for each row of a weight (an output feature), which is more accurate, or one for each ``"tensor"``."""
    skip: tuple[str, ...] = ("lm_head",)
    """Shell patterns of layers that stay as they are: of their whole names, or of the last part of these."""
    compute: Literal["auto", "fp8", "weights"] = "auto"
    """``"fp8"``: activations are rounded to float8 as well, and multiplied so. ``"weights"``: weights are dequantised
    before each use. ``"auto"``: the first on a GPU that can, otherwise the second."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip", (self.skip,) if isinstance(self.skip, str) else tuple(self.skip))
        for name, known in (("scales", ("row", "tensor")), ("compute", ("auto", "fp8", "weights"))):
            if getattr(self, name) not in known:
                cause = f"{name}={getattr(self, name)!r} is not one of {', '.join(map(repr, known))}"
                raise ConfigError(cause=cause)

    def computes_on(self, device: torch.device) -> bool:
        """Whether layers multiply in FP8 there.

        Raises:
            DeviceError: where they are to, and the device cannot.
        """
        can = computes_fp8(device)
        if self.compute == "fp8" and not (can or (device.type == "cpu" and _knows_fp8())):
            cause = f"{device} does not multiply in FP8: that needs an NVIDIA GPU of compute capability 8.9 or later"
            cause += "" if _knows_fp8() else f", and torch 2.5, not {torch.__version__}"
            raise DeviceError(cause=cause, remedy='Give compute="auto": weights are stored in FP8 then')
        return self.compute == "fp8" or (self.compute == "auto" and can)


def scheme_of(given: Any) -> Fp8:
    """What ``quantize=`` was given as: ``"fp8"``, or an ``Fp8``.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(given, Fp8):
        return given
    if given == "fp8":
        return Fp8()
    raise ConfigError(cause=f'quantize={given!r} is neither "fp8" nor a penstock.fp8.Fp8')


def computes_fp8(device: torch.device) -> bool:
    """Whether a GPU multiplies matrices of float8_e4m3fn."""
    if device.type != "cuda" or torch.version.hip is not None or not _knows_fp8():
        return False
    return torch.cuda.get_device_capability(device) >= _CAPABILITY


def _knows_fp8() -> bool:
    version = installed_version("torch")
    return not version or version >= _TORCH


def chosen(
    module: torch.nn.Module, scheme: Fp8, dtype_of: Callable[[torch.Tensor], torch.dtype] | None = None
) -> dict[str, torch.nn.Linear]:
    """The layers of a module that are converted, by name.

    Args:
        module: with or without memory.
        scheme: how.
        dtype_of: the dtype that a weight will have; by default that it has.
    """
    found = {}
    for name, layer in module.named_modules():
        if type(layer) is not torch.nn.Linear:
            continue
        weight = layer._parameters.get("weight")
        if weight is None or not weight.numel() or type(weight) is not torch.nn.Parameter:
            continue
        dtype = weight.dtype if dtype_of is None else dtype_of(weight)
        if dtype in _CONVERTED and not _is_skipped(name, scheme):
            found[name] = layer
    mine = {id(layer) for layer in found.values()}
    others = {
        id(tensor)
        for layer in module.modules()
        for of, tensor in layer._parameters.items()
        if tensor is not None and not (id(layer) in mine and of == "weight")
    }
    return {name: layer for name, layer in found.items() if id(layer._parameters["weight"]) not in others}


def _is_skipped(name: str, scheme: Fp8) -> bool:
    return matches_any(name, scheme.skip) or matches_any(name.rpartition(".")[2], scheme.skip)


def refused(what: str, module: torch.nn.Module, scheme: Fp8) -> ConfigError:
    """The error of a module in which there is nothing to convert: what it has instead."""
    linears = {name: layer for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}
    left = [name for name in linears if not _is_skipped(name, scheme)]
    cause, remedy = f"{what} has no torch.nn.Linear, so there is nothing to convert to FP8", "Leave quantize= out"
    if linears and not left:
        cause, remedy = f"skip={scheme.skip} names every linear layer of {what}", "Name fewer"
    elif left:
        cause = (
            f"nothing in {what} can be converted to FP8: of its {len(linears)} linear layers none is a torch.nn.Linear "
            f"itself with a weight of bfloat16 or float16 that is tied to nothing else"
        )
        remedy = "Give dtype=torch.bfloat16 if its weights are float32"
    return ConfigError(cause=cause, remedy=remedy)


def replace(
    layers: Sequence[torch.nn.Linear], of_scale: Sequence[int], dtype: torch.dtype, *, computes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives layers that share one weight the memory for it as float8, uninitialised.

    Args:
        layers: at least one.
        of_scale: the shape of its scales.
        dtype: what the weight is dequantised to.
        computes: whether they multiply in FP8.

    Returns:
        The weight and its scales, on the device where the weight was.
    """
    old = layers[0].weight
    stored = torch.empty(tuple(old.shape), dtype=FLOAT8, device=old.device)
    scale = torch.empty(tuple(of_scale), dtype=torch.float32, device=old.device)
    for layer in layers:
        Float8Linear.take(layer, stored, scale, dtype, computes=computes)
    return stored, scale


def tied(layers: Mapping[str, torch.nn.Linear]) -> list[tuple[str, list[torch.nn.Linear]]]:
    """Layers that share a weight, with the first one's name, in their order."""
    groups: dict[int, tuple[str, list[torch.nn.Linear]]] = {}
    for name, layer in layers.items():
        groups.setdefault(id(layer.weight), (name, []))[1].append(layer)
    return list(groups.values())


def convert(module: torch.nn.Module, quantize: str | Fp8 = "fp8") -> dict[str, TensorError]:
    """Gives a module's linear layers float8 weights, in place, one by one: memory for half of one more is enough.

    Args:
        module: on the CPU or a GPU, which then computes in FP8 if it can.
        quantize: ``"fp8"``, or how (``Fp8``).

    Returns:
        By the name of each converted weight, how far it is from what it was.

    Raises:
        ConfigError: where nothing of it can be converted.
        DestinationError: for weights without memory (the meta device).
        DeviceError: where it is to compute in FP8, and cannot. Nothing was changed then, in all three cases.
    """
    scheme = scheme_of(quantize)
    layers = chosen(module, scheme)
    if not layers:
        raise refused(f"the {type(module).__name__}", module, scheme)
    groups, computes = tied(layers), {}
    for name, (layer, *_) in groups:
        if layer.weight.is_meta:
            cause = "it has no memory (the meta device), so there is nothing to convert"
            raise DestinationError(tensor=f"{name}.weight", cause=cause, remedy="Load the model first")
        computes[name] = scheme.computes_on(layer.weight.device)
    errors = {}
    with torch.inference_mode(mode=False), torch.no_grad():
        for name, group in groups:
            weight = group[0].weight
            of_scale = shape_of_scale(weight.shape[0], scheme.scales)
            stored, scale = replace(group, of_scale, weight.dtype, computes=computes[name])
            errors[f"{name}.weight"] = quantise(weight.detach(), stored, scale)
            # Nobody has it any more.
            del weight
    return errors
