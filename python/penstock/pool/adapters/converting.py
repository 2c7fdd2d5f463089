"""diffusers' converters of LoRA names, where it is installed and the model is one of its own.

They know what other trainers call the layers of SDXL, Flux and others: blocks under other numbers, matrices that are of
several layers at once. A pipeline has the right converter; of single components, the denoiser's class tells which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import AdapterError

if TYPE_CHECKING:
    import torch

_MIXINS = {
    "UNet2DConditionModel": "StableDiffusionXLLoraLoaderMixin",
    "SD3Transformer2DModel": "SD3LoraLoaderMixin",
    "FluxTransformer2DModel": "FluxLoraLoaderMixin",
    "Flux2Transformer2DModel": "Flux2LoraLoaderMixin",
    "QwenImageTransformer2DModel": "QwenImageLoraLoaderMixin",
    "WanTransformer3DModel": "WanLoraLoaderMixin",
    "LTXVideoTransformer3DModel": "LTXVideoLoraLoaderMixin",
    "HunyuanVideoTransformer3DModel": "HunyuanVideoLoraLoaderMixin",
    "Lumina2Transformer2DModel": "Lumina2LoraLoaderMixin",
    "ZImageTransformer2DModel": "ZImageLoraLoaderMixin",
}
"""By the class of a denoiser: the class of ``diffusers.loaders.lora_pipeline`` that converts names for it."""


def converted(
    tensors: Mapping[str, torch.Tensor], location: str, modules: Mapping[str, torch.nn.Module], pipeline: Any
) -> dict[str, Any] | None:
    """An adapter with the names that diffusers has for layers, and alphas; or None where diffusers does not know it.

    Raises:
        AdapterError: with what the converter refuses.
    """
    converter = _converter(modules, pipeline)
    if converter is None:
        return None
    denoiser = next((module for module in modules.values() if type(module).__name__ == "UNet2DConditionModel"), None)
    keywords: dict[str, Any] = {} if denoiser is None else {"unet_config": denoiser.config}
    if _takes_alphas(converter):
        keywords["return_alphas"] = True
    try:
        result = converter.lora_state_dict(dict(tensors), **keywords)
        renamed, alphas = (*result, None)[:2] if isinstance(result, tuple) else (result, None)
        return _with_names_of_peft({**renamed, **_alphas(alphas or {})})
    except Exception as error:
        cause = f"diffusers finds no layers of {type(pipeline or denoiser).__name__} in it: {error}"
        raise AdapterError(location=location, cause=cause, remedy="Is it for another architecture?") from error


def _converter(modules: Mapping[str, torch.nn.Module], pipeline: Any) -> Any:
    if hasattr(pipeline, "lora_state_dict"):
        return type(pipeline)
    for module in modules.values():
        name = _MIXINS.get(type(module).__name__)
        if name is not None and type(module).__module__.startswith("diffusers."):
            from diffusers.loaders import lora_pipeline

            return getattr(lora_pipeline, name, None)
    return None


def _takes_alphas(converter: Any) -> bool:
    code = getattr(converter.lora_state_dict, "__wrapped__", converter.lora_state_dict).__code__
    return "return_alphas" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _alphas(alphas: Mapping[str, Any]) -> dict[str, Any]:
    return {key if key.endswith(".alpha") else f"{key}.alpha": value for key, value in alphas.items()}


def _with_names_of_peft(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Older names of halves to ``lora_A`` and ``lora_B``, as diffusers does it when it loads them."""
    from diffusers.utils.state_dict_utils import (
        convert_state_dict_to_diffusers,
        convert_state_dict_to_peft,
        convert_unet_state_dict_to_peft,
    )

    found: dict[str, Any] = {}
    for component in dict.fromkeys(key.partition(".")[0] for key in tensors):
        prefix = f"{component}."
        part = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if component.startswith("text_encoder"):
            part = convert_state_dict_to_peft(convert_state_dict_to_diffusers(part))
        elif not any(".lora_A" in key for key in part):
            part = convert_unet_state_dict_to_peft(part)
        found.update({prefix + key: value for key, value in part.items()})
    return found
