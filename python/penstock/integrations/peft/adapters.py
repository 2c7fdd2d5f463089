"""peft: adapters from anywhere, onto models that are there.

Penstock reads an adapter straight to the device of the model. Where that comes out the same, peft builds the adapter's
layers without memory (``low_cpu_mem_usage``, a supported argument) and adopts the tensors. It would not where the
adapter has another dtype than the model, is initialised from the model's weights, or lacks some of its tensors: then
layers are built with memory, as peft does by itself, and filled. Models on several devices are left to peft.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import re
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock._native import LoadOptions
from penstock.integrations.safetensors.patching import patch_safetensors
from penstock.integrations.shared.files import Place, called, locate, open_weights, require_local
from penstock.optional import required

if TYPE_CHECKING:
    from penstock.arguments import AnyPath
    from penstock.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

_HUB = ("token", "cache_dir", "local_files_only", "force_download")


_NEEDLESS = ("low_cpu_mem_usage", "torch_device", "use_safetensors")
"""What peft's own functions take and what is decided here by itself."""
_WHERE = ("device_map", "max_memory", "offload_dir", "offload_folder", "offload_index")
"""Where the parts of a model go that lies on several devices."""
_FROM_NOTHING = (True, False, "gaussian", "orthogonal")
"""Ways to initialise LoRA that do not look at the model's weights."""
_SHARED = ("prompt_encoder", "vblora_vector_bank", ".tinylora_v.", ".unilora_theta_d.")
"""In names of tensors that no adapter's file holds."""
_PLAIN = {
    *("peft_type", "task_type", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("auto_mapping", "runtime_config", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "lora_bias"),
    *("fan_in_fan_out", "target_modules", "exclude_modules", "modules_to_save", "init_lora_weights", "use_dora"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "trainable_token_indices"),
}
"""Settings of LoRA with which layers may be built without memory. Others stand for variants that compute something."""


class _Wanted(NamedTuple):
    """What a call asks for, besides the model and the place."""

    name: str
    is_trainable: bool
    autocast: bool
    key_mapping: dict[str, str] | None
    ignore_mismatched_sizes: bool


def from_pretrained(
    model: Any,
    path: AnyPath,
    adapter_name: str = "default",
    *,
    is_trainable: bool = False,
    config: Any = None,
    subfolder: str = "",
    revision: str | None = None,
    autocast_adapter_dtype: bool = True,
    ephemeral_gpu_offload: bool = False,
    key_mapping: dict[str, str] | None = None,
    ignore_mismatched_sizes: bool = False,
    options: LoadOptions | None = None,
    **hub: Any,
) -> Any:
    """Makes a ``PeftModel`` of a model and an adapter, as ``PeftModel.from_pretrained`` does.

    Args:
        model: the model to adapt, which is changed in place.
        path: the adapter: a directory, the name of one on the Hub.
        adapter_name: what to call it.
        is_trainable: whether it may be trained.
        config: the adapter's ``PeftConfig``, if not the one that lies there.
        subfolder, revision, ephemeral_gpu_offload, key_mapping, ignore_mismatched_sizes: as for peft.
        autocast_adapter_dtype: whether adapters in half precision become float32, as for peft.
        options: settings of the load.
        hub: ``token``, ``cache_dir``, ``local_files_only``, ``force_download``. For a model on several devices, and
            with ``adapters`` (X-LoRA), which are left to peft, also ``device_map`` and what goes with it. Where tensors
            are read to, and whether layers are built without memory, is found by itself: ``torch_device`` and
            ``low_cpu_mem_usage`` do nothing.

    Returns:
        The ``PeftModel``, in evaluation mode unless it is trainable.

    Raises:
        MissingDependencyError: where peft is absent or too old.
        LocationNotFoundError: nothing is there.
        PenstockError: see ``penstock.open`` and ``Checkpoint.load``. What peft raises comes through.
    """
    required("torch", "peft", by="penstock.integrations.peft")
    from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, PeftModel

    place = _place(path, subfolder, revision, hub)
    if _is_left_to_peft(model, place, hub):
        keywords = {"config": config, "key_mapping": key_mapping, "ignore_mismatched_sizes": ignore_mismatched_sizes}
        keywords |= {"is_trainable": is_trainable, "autocast_adapter_dtype": autocast_adapter_dtype}
        keywords |= {"ephemeral_gpu_offload": ephemeral_gpu_offload} | _theirs(hub)
        with patch_safetensors(options=options):
            return PeftModel.from_pretrained(model, place.local, adapter_name, **keywords)
    settings = _settings(place, is_trainable, ephemeral_gpu_offload, config)
    if key_mapping is None and not settings.is_prompt_learning:
        # Of models whose layers were renamed since adapters for them were saved.
        key_mapping = getattr(model, "_checkpoint_conversion_mapping", None)
    checkpoint = open_weights(place, "adapter_model", options=options)
    cls = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(settings.task_type, PeftModel)
    adopts = _adopts(model, settings, checkpoint)
    made = cls(model, settings, adapter_name, autocast_adapter_dtype=autocast_adapter_dtype, low_cpu_mem_usage=adopts)
    wanted = _Wanted(adapter_name, is_trainable, autocast_adapter_dtype, key_mapping, ignore_mismatched_sizes)
    missing = _fill(made, checkpoint, wanted, adopts=adopts).missing_keys
    # Of prompts the file holds what the encoder comes to; of these kinds what all layers share, once.
    missing = [name for name in missing if not any(one in name for one in _SHARED)]
    if missing:
        logger.warning("%s: not in the adapter, initialised by peft: %s", called(path), missing)
    return made


def load_adapter(
    model: Any,
    path: AnyPath,
    adapter_name: str,
    *,
    is_trainable: bool = False,
    subfolder: str = "",
    revision: str | None = None,
    autocast_adapter_dtype: bool = True,
    ephemeral_gpu_offload: bool = False,
    key_mapping: dict[str, str] | None = None,
    ignore_mismatched_sizes: bool = False,
    options: LoadOptions | None = None,
    **hub: Any,
) -> Any:
    """Adds an adapter to a ``PeftModel``, as its ``load_adapter`` does. It is not made the active one.

    Args and exceptions are those of ``from_pretrained``; ``model`` is a ``PeftModel``.

    Returns:
        The names that only one side had, as peft returns them.
    """
    required("torch", "peft", by="penstock.integrations.peft")
    place = _place(path, subfolder, revision, hub)
    if _is_left_to_peft(model, place, hub):
        keywords = {"key_mapping": key_mapping, "ignore_mismatched_sizes": ignore_mismatched_sizes}
        keywords |= {"autocast_adapter_dtype": autocast_adapter_dtype, "ephemeral_gpu_offload": ephemeral_gpu_offload}
        with patch_safetensors(options=options):
            return model.load_adapter(place.local, adapter_name, is_trainable=is_trainable, **keywords, **_theirs(hub))
    checkpoint = open_weights(place, "adapter_model", options=options)
    wanted = _Wanted(adapter_name, is_trainable, autocast_adapter_dtype, key_mapping, ignore_mismatched_sizes)
    adopts = False
    if adapter_name not in model.peft_config:
        settings = _settings(place, is_trainable, ephemeral_gpu_offload)
        model._check_new_adapter_config(settings, is_trainable=is_trainable)
        adopts = _adopts(model, settings, checkpoint)
        _add(model, wanted, settings, adopts=adopts)
    return _fill(model, checkpoint, wanted, adopts=adopts)


def _place(path: AnyPath, subfolder: str, revision: str | None, hub: dict[str, Any]) -> Place:
    unknown = sorted(set(hub) - {*_HUB, *_NEEDLESS, *_WHERE, "adapters"})
    if unknown:
        raise TypeError(f"unexpected keywords: {', '.join(unknown)}")
    hub = {name: value for name, value in hub.items() if name in _HUB}
    return locate(os.fsdecode(path), subfolder=subfolder or "", revision=revision, **hub)


def _theirs(keywords: dict[str, Any]) -> dict[str, Any]:
    return {name: keywords[name] for name in (*_WHERE, "adapters") if name in keywords}


def _is_left_to_peft(model: Any, place: Place, keywords: dict[str, Any]) -> bool:
    """Whether peft has to load by itself: onto a model on several devices, whose parts it moves back and forth."""
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) <= 1 and "adapters" not in keywords:
        return False
    left = "adapters for models on several devices, and X-LoRA, are left to peft"
    require_local(place, left, "the adapter here first (penstock.pull)")
    return True


def _settings(place: Place, is_trainable: bool, ephemeral_gpu_offload: bool, given: Any = None) -> Any:
    from peft import PeftConfig

    settings = PeftConfig.from_pretrained(place.local) if given is None else given
    if settings.is_prompt_learning and is_trainable:
        raise ValueError("an adapter of prompt learning that is loaded cannot be trained")
    settings.inference_mode = not is_trainable
    if hasattr(settings, "runtime_config"):
        settings.runtime_config.ephemeral_gpu_offload = ephemeral_gpu_offload
    return settings


def _adopts(model: Any, settings: Any, checkpoint: Checkpoint) -> bool:
    """Whether the file's tensors can be the parameters: peft would copy them into parameters of the model's dtype, or
    of float32, and into what it made of the model's weights.
    """
    from penstock.frameworks.torch import DTYPES

    if getattr(settings, "init_lora_weights", True) not in _FROM_NOTHING:
        return False
    if hasattr(settings, "init_lora_weights") and not _is_plain(settings):
        return False
    of_model = {parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point}
    return len(of_model) == 1 and {DTYPES.get(info.dtype) for info in checkpoint.values()} <= of_model


def _is_plain(settings: Any) -> bool:
    """Whether a LoRA is none of the variants that compute something of the model or when it is built."""
    changed = {field.name for field in fields(settings) if getattr(settings, field.name) != _default(field)}
    return changed <= _PLAIN


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _add(model: Any, wanted: _Wanted, settings: Any, *, adopts: bool) -> None:
    known = inspect.signature(model.add_adapter).parameters
    # Older versions leave it to the end, where `_fill` does it too.
    cast = {"autocast_adapter_dtype": wanted.autocast} if "autocast_adapter_dtype" in known else {}
    model.add_adapter(wanted.name, settings, low_cpu_mem_usage=adopts, **cast)
    if wanted.is_trainable and hasattr(model, "set_requires_grad"):
        model.set_requires_grad(wanted.name)


def _fill(model: Any, checkpoint: Checkpoint, wanted: _Wanted, *, adopts: bool) -> Any:
    from peft import set_peft_model_state_dict

    device = next((p.device for p in model.parameters() if p.device.type != "meta"), "cpu")
    weights = _renamed(checkpoint.load(device=device), wanted.key_mapping)
    result = set_peft_model_state_dict(
        model,
        weights,
        adapter_name=wanted.name,
        ignore_mismatched_sizes=wanted.ignore_mismatched_sizes,
        low_cpu_mem_usage=adopts,
    )
    if adopts:
        _initialise_rest(model, wanted)
    # What an adapter does not hold is the model's own, so only what is the adapter's is missing.
    result.missing_keys[:] = [name for name in result.missing_keys if f".{wanted.name}." in name]
    if hasattr(model.base_model, "_cast_adapter_dtype"):
        model.base_model._cast_adapter_dtype(adapter_name=wanted.name, autocast_adapter_dtype=wanted.autocast)
    if not wanted.is_trainable:
        model.eval()
    return result


def _initialise_rest(model: Any, wanted: _Wanted) -> None:
    """Gives memory to what the file did not have: what peft would initialise it to, taken from another adapter that is
    made for that and goes again.
    """
    lacking = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.device.type == "meta" and f".{wanted.name}." in f"{name}."
    }
    if not lacking:
        return
    other = f"{wanted.name}_initialised"
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    _add(model, wanted._replace(name=other), copy.deepcopy(model.peft_config[wanted.name]), adopts=False)
    for name, parameter in lacking.items():
        owner, _, own = name.rpartition(".")
        twin = model.get_parameter(f"{name}.".replace(f".{wanted.name}.", f".{other}.").removesuffix("."))
        filled = type(parameter)(twin.detach(), requires_grad=parameter.requires_grad)
        model.get_submodule(owner)._parameters[own] = filled
    model.delete_adapter(other)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])


def _renamed(weights: dict[str, Any], mapping: dict[str, str] | None) -> dict[str, Any]:
    """The tensors under the names that the first pattern that is found in each gives it, as peft renames them."""
    if not mapping:
        return weights
    renamed = {}
    for name, tensor in weights.items():
        prefix = next((p for p in ("base_model.model.", "base_model.") if name.startswith(p)), "")
        rest = name.removeprefix(prefix)
        for pattern, replacement in mapping.items():
            changed, count = re.subn(pattern, replacement, rest)
            if count:
                rest = changed
                break
        renamed[prefix + rest] = tensor
    return renamed
