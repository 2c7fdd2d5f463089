"""Which architecture a single file holds, by the names and shapes of its tensors.

diffusers tells variants of an architecture apart, and takes what it does not know for Stable Diffusion 1. So the
architecture is found first, by what only it has. Knows no weights and no configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.errors import ConfigError

PREFIX = "model.diffusion_model."
"""Of the denoiser, in files that hold other components too."""
_SHOWN = 6
"""Groups of names that a message has."""


class _Family(NamedTuple):
    """An architecture."""

    title: str
    markers: tuple[str, ...]
    """Names of which a file has one, with the prefix or, of transformers, without it."""
    kinds: tuple[str, ...]
    """Variants, as diffusers calls them."""


_UNETS = ("v1", "inpainting", "v2", "inpainting_v2", "xl_base", "xl_inpaint", "xl_refiner", "playground-v2-5")
_FAMILIES = (
    _Family("Stable Diffusion 1, 2 or XL", (f"{PREFIX}input_blocks.0.0.weight",), _UNETS),
    _Family("Stable Diffusion 3", ("joint_blocks.0.x_block.attn.qkv.weight",), ("sd3", "sd35_medium", "sd35_large")),
    _Family(
        "FLUX",
        ("double_blocks.0.img_attn.norm.key_norm.scale",),
        ("flux-dev", "flux-schnell", "flux-fill", "flux-depth"),
    ),
)
_ENCODERS = {
    "cond_stage_model.transformer.": ("v1", "inpainting"),
    "cond_stage_model.model.": ("v2", "inpainting_v2"),
    "conditioner.embedders.": ("xl_base", "xl_inpaint", "xl_refiner", "playground-v2-5"),
    "text_encoders.": (*_FAMILIES[1].kinds, *_FAMILIES[2].kinds),
}
"""Where text encoders are, and of which variants."""
_ONLY_IN_V1 = f"{PREFIX}output_blocks.11.0.skip_connection.weight"


def variant_of(checkpoint: Mapping[str, Any], location: str) -> str:
    """The variant that a file holds, as diffusers calls it: ``"v1"``, ``"xl_base"``, ``"flux-dev"`` and others.

    Args:
        checkpoint: by name, what has the ``shape`` of a tensor.
        location: for errors.

    Raises:
        ConfigError: for a file that holds none of the architectures above, or several. It says what was found.
    """
    from diffusers.loaders.single_file_utils import infer_diffusers_model_type

    found = [family for family in _FAMILIES if any(f"{of}{one}" in checkpoint for one in family.markers for of in _OF)]
    if len(found) != 1:
        titles = " and of ".join(family.title for family in found)
        cause = f"it has tensors of {titles}" if found else f"its architecture is unknown: {_groups(checkpoint)}"
        known = "; ".join(family.title for family in _FAMILIES)
        raise _refused(location, cause, f"Known are {known}, in the layout of their authors")
    (family,) = found
    try:
        kind = str(infer_diffusers_model_type(checkpoint))
    except (KeyError, IndexError, AttributeError, UnboundLocalError) as error:
        cause = f"it looks like {family.title}, but shapes are none of a known variant ({error})"
        raise _refused(location, cause, None) from error
    if kind not in family.kinds or (kind == "v1" and _ONLY_IN_V1 not in checkpoint):
        cause = f"it looks like {family.title}, but is no variant that is known: {_groups(checkpoint)}"
        raise _refused(location, cause, None)
    for prefix, kinds in _ENCODERS.items():
        if kind not in kinds and any(name.startswith(prefix) for name in checkpoint):
            cause = (
                f"its denoiser is that of {kind}, and its text encoders ({prefix}…) are those of another architecture"
            )
            raise _refused(location, cause, None)
    return kind


_OF = ("", PREFIX)


def _groups(checkpoint: Mapping[str, Any]) -> str:
    """What a file holds, by the beginning of names."""
    groups = Counter(".".join(name.split(".")[:2]) for name in checkpoint)
    shown = ", ".join(f"{group}… ({count})" for group, count in groups.most_common(_SHOWN))
    more = len(groups) - _SHOWN
    return (shown or "no tensors") + (f" and {more} more groups" if more > 0 else "")


def _refused(location: str, cause: str, remedy: str | None) -> ConfigError:
    usual = "Give locations and build functions by component instead"
    return ConfigError(location=location, cause=cause, remedy=usual if remedy is None else f"{remedy}. {usual}")
