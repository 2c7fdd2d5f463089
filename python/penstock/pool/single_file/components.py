"""The components of a single file: modules without memory, and which tensors of the file are theirs.

Each conversion is diffusers' own. Which of its functions belongs to which class is all that is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ConfigError, PenstockError
from penstock.model import no_init

_CLIPS = ("CLIPTextModel", "CLIPTextModelWithProjection")


def module_of(cls: Any, directory: Path, name: str) -> torch.nn.Module:
    """A component without memory for its parameters, with the settings that a directory has of it.

    Raises:
        ConfigError: where it has none, or they do not fit the class.
    """
    from diffusers import ModelMixin

    try:
        with no_init():
            if issubclass(cls, ModelMixin):
                made = cls.from_config(cls.load_config(str(directory), subfolder=name))
            else:
                made = cls(cls.config_class.from_pretrained(str(directory), subfolder=name))
    except PenstockError:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        cause = f"a {cls.__name__} cannot be built of the settings of {name!r}: {error}"
        raise ConfigError(location=str(directory), cause=cause) from error
    module: torch.nn.Module = made
    return module.eval()


def tensors_of(module: torch.nn.Module, name: str, tensors: Mapping[str, Any]) -> dict[str, Any] | None:
    """What of a file's tensors belongs to a component, converted, by the component's names; None if there is nothing.

    Args:
        module: the component.
        name: what the pipeline calls it.
        tensors: of the file, by name; none of them is read.
    """
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
    from diffusers.loaders.single_file_utils import (
        LDM_VAE_KEYS,
        convert_sd3_t5_checkpoint_to_diffusers,
        is_t5_in_single_file,
    )

    kind = type(module).__name__
    if kind in _CLIPS:
        return _clip(module, tensors)
    if kind == "T5EncoderModel":
        return convert_sd3_t5_checkpoint_to_diffusers(tensors) if is_t5_in_single_file(tensors) else None
    known = SINGLE_FILE_LOADABLE_CLASSES.get(kind)
    if known is None:
        raise ConfigError(cause=f"diffusers has no conversion for component {name!r}, a {kind}")
    if name == "vae" and not any(key.startswith(tuple(LDM_VAE_KEYS)) for key in tensors):
        return None
    # Conversions take tensors out of what they are given.
    converted: dict[str, Any] = known["checkpoint_mapping_fn"](
        config=dict(getattr(module, "config", {})), checkpoint=dict(tensors)
    )
    return converted


def _clip(module: Any, tensors: Mapping[str, Any]) -> dict[str, Any] | None:
    """As diffusers' ``create_diffusers_clip_model_from_ldm`` decides."""
    from diffusers.loaders import single_file_utils as utils

    names = utils.CHECKPOINT_KEY_NAMES
    inner = getattr(module, "text_model", module)
    width = inner.embeddings.position_embedding.weight.shape[-1]

    def is_of_width(which: str) -> bool:
        return names[which] in tensors and tensors[names[which]].shape[-1] == width

    if names["clip"] in tensors or is_of_width("clip_sdxl"):
        found = utils.convert_ldm_clip_checkpoint(tensors)
    elif is_of_width("clip_sd3"):
        found = utils.convert_ldm_clip_checkpoint(tensors, "text_encoders.clip_l.transformer.")
        # Which such files do not have.
        found["text_projection.weight"] = torch.eye(width, dtype=tensors[names["clip_sd3"]].dtype)
    elif names["open_clip"] in tensors:
        found = utils.convert_open_clip_checkpoint(module, tensors, prefix="cond_stage_model.model.")
    elif is_of_width("open_clip_sdxl"):
        found = utils.convert_open_clip_checkpoint(module, tensors, prefix="conditioner.embedders.1.model.")
    elif names["open_clip_sdxl_refiner"] in tensors:
        found = utils.convert_open_clip_checkpoint(module, tensors, prefix="conditioner.embedders.0.model.")
    elif is_of_width("open_clip_sd3"):
        found = utils.convert_ldm_clip_checkpoint(tensors, "text_encoders.clip_g.transformer.")
    else:
        return None
    if inner is module:
        found = {name.removeprefix("text_model."): tensor for name, tensor in found.items()}
    return dict(found)
