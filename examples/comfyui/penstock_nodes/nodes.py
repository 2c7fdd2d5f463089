"""The nodes: ComfyUI's own loaders of state dicts, with weights that Penstock has read.

Each takes a file of ComfyUI's model folders, or a URL (``s3://``, ``gs://``, ``az://``, ``https://``), which wins.
"""

from __future__ import annotations

from typing import Any

import comfy.sd
import folder_paths

from . import weights

URL = ("STRING", {"default": "", "tooltip": "s3://, gs://, az:// or https:// of a safetensors file, instead of a file"})
NONE = "(none: the URL)"


def _files(folder: str) -> tuple[list[str]]:
    return ([NONE, *folder_paths.get_filename_list(folder)],)


def _read(folder: str, name: str, url: str) -> tuple[dict[str, Any], dict[str, str], str]:
    """The state dict, the metadata, and where both came from."""
    full_path = None if name == NONE else folder_paths.get_full_path(folder, name)
    path = weights.found(name, url, full_path)
    state, metadata = weights.load(path)
    return state, metadata, path


def _known(loaded: Any, path: str) -> Any:
    if loaded is None:
        raise RuntimeError(f"{path}: ComfyUI does not recognise this model")
    return loaded


class PenstockCheckpoint:
    """A whole checkpoint: model, text encoder and VAE."""

    CATEGORY = "loaders/penstock"
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 - ComfyUI's name
        """What the node takes."""
        return {"required": {"name": _files("checkpoints")}, "optional": {"url": URL}}

    def load(self, name: str, url: str = "") -> tuple[Any, Any, Any]:
        """Loads it."""
        state, metadata, path = _read("checkpoints", name, url)
        embeddings = folder_paths.get_folder_paths("embeddings")
        made = comfy.sd.load_state_dict_guess_config(state, embedding_directory=embeddings, metadata=metadata)
        return tuple(_known(made, path)[:3])


class PenstockDiffusionModel:
    """A diffusion model alone."""

    CATEGORY = "loaders/penstock"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """What the node takes."""
        return {"required": {"name": _files("diffusion_models")}, "optional": {"url": URL}}

    def load(self, name: str, url: str = "") -> tuple[Any]:
        """Loads it."""
        state, metadata, path = _read("diffusion_models", name, url)
        return (_known(comfy.sd.load_diffusion_model_state_dict(state, metadata=metadata), path),)


class PenstockVAE:
    """A VAE alone."""

    CATEGORY = "loaders/penstock"
    RETURN_TYPES = ("VAE",)
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """What the node takes."""
        return {"required": {"name": _files("vae")}, "optional": {"url": URL}}

    def load(self, name: str, url: str = "") -> tuple[Any]:
        """Loads it."""
        state, metadata, _ = _read("vae", name, url)
        made = comfy.sd.VAE(sd=state, metadata=metadata)
        made.throw_exception_if_invalid()
        return (made,)


class PenstockTextEncoder:
    """A text encoder alone."""

    CATEGORY = "loaders/penstock"
    RETURN_TYPES = ("CLIP",)
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """What the node takes."""
        kinds = ([kind.name.lower() for kind in comfy.sd.CLIPType],)
        return {"required": {"name": _files("text_encoders"), "kind": kinds}, "optional": {"url": URL}}

    def load(self, name: str, kind: str, url: str = "") -> tuple[Any]:
        """Loads it."""
        state, _, path = _read("text_encoders", name, url)
        made = comfy.sd.load_text_encoder_state_dicts(
            [state],
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            clip_type=comfy.sd.CLIPType[kind.upper()],
        )
        return (_known(made, path),)


class PenstockLora:
    """A LoRA, added to a model and its text encoder."""

    CATEGORY = "loaders/penstock"
    RETURN_TYPES = ("MODEL", "CLIP")
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """What the node takes."""
        strength = ("FLOAT", {"default": 1.0, "min": -100.0, "max": 100.0, "step": 0.01})
        required = {"model": ("MODEL",), "clip": ("CLIP",), "name": _files("loras")}
        return {
            "required": required | {"model_strength": strength, "clip_strength": strength},
            "optional": {"url": URL},
        }

    def load(
        self, model: Any, clip: Any, name: str, model_strength: float, clip_strength: float, url: str = ""
    ) -> tuple[Any, Any]:
        """Adds it."""
        state, _, _ = _read("loras", name, url)
        changed: tuple[Any, Any] = comfy.sd.load_lora_for_models(model, clip, state, model_strength, clip_strength)
        return changed


NODE_CLASS_MAPPINGS = {
    node.__name__: node
    for node in (PenstockCheckpoint, PenstockDiffusionModel, PenstockVAE, PenstockTextEncoder, PenstockLora)
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "PenstockCheckpoint": "Load Checkpoint (Penstock)",
    "PenstockDiffusionModel": "Load Diffusion Model (Penstock)",
    "PenstockVAE": "Load VAE (Penstock)",
    "PenstockTextEncoder": "Load Text Encoder (Penstock)",
    "PenstockLora": "Load LoRA (Penstock)",
}
