"""The formats that LoRA comes in, as pairs of matrices with the names of layers.

* peft: ``base_model.model.LAYER.lora_A.weight``, with ``adapter_config.json`` beside it;
* diffusers: ``unet.LAYER.lora_A.weight``, or the older ``unet.LAYER.lora.down.weight``;
* kohya: ``lora_unet_LAYER.lora_down.weight`` with ``.alpha``, where dots in names of layers are underscores.

diffusers' own converters come first where they are installed and know the model (``converting``). Promises that every
tensor of a file is used or named in an error. Knows names only: whether shapes fit is ``fitting``'s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.errors import AdapterError
from penstock.pool.adapters.converting import converted

if TYPE_CHECKING:
    import torch

    from penstock.pool.adapters.reading import Content

_HALF = re.compile(r"^(?P<path>.+?)\.lora(?P<half>_A|_B|_down|_up|\.down|\.up)(?:\.(?!weight$)[^.]+)?\.weight$")
_DOWN = {"_A", "_down", ".down"}
_ALPHA = re.compile(r"^(?P<path>.+?)(?:\.lora_A\.weight)?\.alpha$")
_PEFT = "base_model.model."
_KOHYA = {
    "lora_unet_": ("unet", "transformer"),
    "lora_te_": ("text_encoder",),
    "lora_te1_": ("text_encoder",),
    "lora_te2_": ("text_encoder_2",),
    "lora_te3_": ("text_encoder_3",),
}
"""Prefixes, and the components that they mean."""
_NOT_LORA = {
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    "lokr_": "LoKr",
    "hada_": "LoHa",
    "lora_mid": "LoRA with a core tensor (LyCORIS)",
    "lora_embedding_": "LoRA of an embedding",
    "lora_B.bias": "LoRA with biases",
    "oft_": "OFT",
    "ia3_": "IA3",
}
"""Parts of names, and what they say."""


@dataclass
class Pair:
    """The two matrices of one layer."""

    component: str | None
    """Of the model; None where the file does not say."""
    path: str
    """Of the layer in its component."""
    down: torch.Tensor | None = None
    """``(rank, in)``, or ``(rank, in, height, width)``."""
    up: torch.Tensor | None = None
    """``(out, rank)``, or ``(out, rank, 1, 1)``."""
    alpha: float | None = None
    """None: as the rank, so that the product is not scaled."""
    rslora: bool = False
    key: str = ""
    """A name in the file."""

    def scaling(self, rank: int) -> tuple[float, float]:
        """What the product is multiplied with, and divided by."""
        return (rank if self.alpha is None else self.alpha), math.sqrt(rank) if self.rslora else rank


@dataclass
class _Named:
    pairs: dict[tuple[str | None, str], Pair] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def pairs_of(content: Content, location: str, modules: Mapping[str, torch.nn.Module], pipeline: Any) -> list[Pair]:
    """The pairs of an adapter.

    Args:
        content: what its files hold.
        location: for messages.
        modules: of its model, by the names of components.
        pipeline: the pipeline of diffusers that they are of, or None.

    Raises:
        AdapterError: for adapters of other kinds, and tensors that are no half of a pair.
    """
    _check_kind(content, location)
    tensors = content.tensors
    if content.config is not None or content.by_component or _is_plain(tensors, modules):
        named = _named(tensors, modules)
    else:
        renamed = converted(tensors, location, modules, pipeline)
        named = _named(tensors if renamed is None else renamed, modules)
    if named.unknown:
        some = ", ".join(repr(key) for key in named.unknown[:3])
        cause = f"{len(named.unknown)} of its tensors, such as {some}, are no part of a LoRA that the pool knows"
        raise AdapterError(location=location, tensor=named.unknown[0], cause=cause)
    pairs = list(named.pairs.values())
    if not pairs:
        raise AdapterError(location=location, cause="it holds no LoRA")
    for pair in pairs:
        if pair.down is None or pair.up is None:
            lacks = "down (A)" if pair.down is None else "up (B)"
            cause = f"layer {pair.path!r} lacks its {lacks} matrix"
            raise AdapterError(location=location, tensor=pair.key, cause=cause, remedy="Save the adapter again")
        _configure(pair, content, location)
    return pairs


def _check_kind(content: Content, location: str) -> None:
    for key in content.tensors:
        kind = next((kind for part, kind in _NOT_LORA.items() if part in key), None)
        if kind is not None:
            cause = f"it is {kind}, which the pool does not know"
            raise AdapterError(
                location=location, tensor=key, cause=cause, remedy="Merge it into a checkpoint of its own"
            )
    configs = [content.config] if content.config is not None else []
    for config in configs:
        kind = str(config.get("peft_type", "LORA"))
        used = next(
            (of for of in ("use_dora", "lora_bias", "modules_to_save", "layer_replication") if config.get(of)), ""
        )
        if kind != "LORA" or used:
            cause = f"its adapter_config.json says {used or f'peft_type {kind}'}, which the pool does not know"
            raise AdapterError(location=location, cause=cause, remedy="Merge it into a checkpoint of its own")


def _is_plain(tensors: Mapping[str, Any], modules: Mapping[str, torch.nn.Module]) -> bool:
    """Whether a file names components, and layers that these have."""
    for key in tensors:
        match = _HALF.match(key)
        component, _, path = (match["path"] if match else "").partition(".")
        if component not in modules or not _has(modules[component], path):
            return False
    return True


def _has(module: torch.nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def _named(tensors: Mapping[str, Any], modules: Mapping[str, torch.nn.Module]) -> _Named:
    found, alphas = _Named(), []
    flat: dict[str, dict[str, str]] = {}
    for key, value in tensors.items():
        match, alpha = _HALF.match(key), _ALPHA.match(key)
        if match is not None:
            place = _place(match["path"], modules, flat)
            pair = found.pairs.setdefault(place, Pair(*place, key=key))
            setattr(pair, "down" if match["half"] in _DOWN else "up", value)
        elif alpha is not None:
            alphas.append((_place(alpha["path"], modules, flat), key, float(value)))
        else:
            found.unknown.append(key)
    for place, key, of_layer in alphas:
        if place in found.pairs:
            found.pairs[place].alpha = of_layer
        else:
            found.unknown.append(key)
    return found


def _place(
    path: str, modules: Mapping[str, torch.nn.Module], flat: dict[str, dict[str, str]]
) -> tuple[str | None, str]:
    """The component that a name is of, or None where it does not say, and the path of the layer in there."""
    if path.startswith(_PEFT):
        return None, path.removeprefix(_PEFT)
    for prefix, components in _KOHYA.items():
        if path.startswith(prefix):
            one = next((name for name in components if name in modules), None)
            if one is None and len(modules) == 1 and prefix == "lora_unet_":
                one = next(iter(modules))
            name = path.removeprefix(prefix)
            if one is None:
                return components[0], name
            # Which dots were underscores, only the module says.
            if one not in flat:
                flat[one] = {of.replace(".", "_"): of for of, _ in modules[one].named_modules()}
            known = flat[one]
            return one, known.get(name, known.get(name.removeprefix("text_model_"), name))
    first, _, rest = path.partition(".")
    if first in modules:
        return first, rest
    if first in {"unet", "transformer", "diffusion_model", "text_encoder", "text_encoder_2", "text_encoder_3"}:
        is_it = len(modules) == 1 and not first.startswith("text_encoder")
        return (next(iter(modules)) if is_it else first), rest
    return None, path


def _configure(pair: Pair, content: Content, location: str) -> None:
    """Takes alpha from peft's configuration, which is beside the file, or in its header."""
    config = content.config
    if config is None and content.by_component:
        prefix = pair.key.partition(".")[0] + "."
        config = {
            key.removeprefix(prefix): value for key, value in content.by_component.items() if key.startswith(prefix)
        }
        if config.get("use_dora") or config.get("lora_bias"):
            raise AdapterError(location=location, cause=f"the header says that {pair.component} has DoRA, or biases")
    if not config:
        if pair.component is None and pair.alpha is None and pair.key.startswith(_PEFT):
            cause = "it has names of peft, and no adapter_config.json beside it, so its alpha is not known"
            raise AdapterError(location=location, tensor=pair.key, cause=cause, remedy="Give the adapter's directory")
        return
    pair.rslora = bool(config.get("use_rslora"))
    pair.alpha = float(_of_layer(config.get("alpha_pattern") or {}, pair.path, config.get("lora_alpha", 8)))


def _of_layer(pattern: Mapping[str, Any], path: str, otherwise: Any) -> Any:
    """As peft: the first key that is the layer's path or its end, as a regular expression."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", path)), otherwise)
