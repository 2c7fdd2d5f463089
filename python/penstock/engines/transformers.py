"""transformers: ``from_pretrained`` with the weights' way to the device made short.

Everything but reading stays transformers' own: it builds the model without memory, renames, merges, converts and ties.
It gets a ``state_dict`` (a supported argument) whose values are lazy, and asks for each when it wants it; what it then
gets already lies on the device, in memory that becomes the parameter. So no second copy of a weight exists, in host
memory or on the device.

Where the tensors of the files will be the parameters, all of them are read while the model is being built. With a CUDA
device, transformers would reserve as much memory as the model needs on top of that, and is kept from it
(``reservation``). Where tensors are to be converted, loading begins with the first that is asked for.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock._native import Config
from penstock.engines import reservation
from penstock.engines.files import Place, is_url, locate, open_weights
from penstock.engines.lazy import LazyTensor
from penstock.engines.libraries import required
from penstock.engines.supply import Supply, one_group, small_groups
from penstock.engines.views import Views
from penstock.errors import ConfigError
from penstock.progress import ProgressOption

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from penstock.checkpoint import Checkpoint, PathLike

logger = logging.getLogger(__name__)

_HUB = ("token", "cache_dir", "local_files_only", "force_download")


def from_pretrained(
    model_class: Any,
    path: PathLike,
    *model_args: Any,
    device: Any = "cpu",
    dtype: Any = "auto",
    config: PretrainedConfig | None = None,
    variant: str | None = None,
    subfolder: str = "",
    revision: str | None = None,
    trust_remote_code: bool | None = None,
    mmap: bool = False,
    progress: ProgressOption = None,
    penstock_config: Config | None = None,
    **kwargs: Any,
) -> Any:
    """Loads a model of transformers, as its own ``from_pretrained`` does, straight to a device.

    Args:
        model_class: a class of transformers (``LlamaForCausalLM``), one that finds the class
            (``AutoModelForCausalLM``), or ``"auto"`` for the class that the model's configuration names.
        path: the model: a directory, a model of a Hugging Face cache, the name of one on the Hub.
        model_args, kwargs: what else ``from_pretrained`` takes (``attn_implementation``, ``quantization_config``, …).
        device: where the model ends up: ``"cpu"``, ``"cuda"``, ``"cuda:N"``.
        dtype: of the model: a torch dtype, its name, or ``"auto"`` for what its configuration or its weights say; or a
            dict of these by part of the model, as for transformers.
        config: the model's configuration, if not the one that lies there.
        variant, subfolder, revision: as for transformers.
        trust_remote_code: whether code that lies beside the weights may run.
        mmap: parameters that are not converted are views of the mapped files (``device="cpu"``, local files), as with
            transformers itself, instead of memory of their own.
        progress: ``True`` for a bar, or a function of (bytes done, bytes in all).
        penstock_config: settings of the load.

    Returns:
        The model, in evaluation mode; with ``output_loading_info=True``, the model and transformers' information.

    Raises:
        MissingDependencyError: where transformers is absent or too old.
        ConfigError: for a ``device_map`` of several devices, a class that cannot load models, or an adapter.
        PenstockError: see ``penstock.open`` and ``Checkpoint.stream``. What transformers raises comes through.
    """
    required("torch", "transformers", "accelerate")
    where = _one_device(device, kwargs.pop("device_map", None))
    hub = {name: kwargs.pop(name) for name in _HUB if name in kwargs}
    place = locate(path, subfolder=subfolder, revision=revision, **hub)
    if place.holds("adapter_config.json") and not place.holds("config.json") and config is None:
        remedy = "Load the model that it is for, and then penstock.engines.peft.from_pretrained(model, path)"
        raise ConfigError(f"{path}: this is an adapter of peft, not a model. {remedy}", object=str(path), remedy=remedy)
    return load(
        model_class,
        place,
        lambda: open_weights(place, "model", variant, penstock_config),
        *model_args,
        name=str(path),
        device=where,
        dtype=kwargs.pop("torch_dtype", dtype),
        config=config,
        trust_remote_code=trust_remote_code,
        mmap=mmap,
        progress=progress,
        penstock_config=penstock_config,
        **kwargs,
    )


def load(
    model_class: Any,
    place: Place,
    weights: Callable[[], Checkpoint],
    *model_args: Any,
    name: str,
    device: str,
    dtype: Any,
    config: PretrainedConfig | None = None,
    trust_remote_code: bool | None = None,
    mmap: bool = False,
    progress: ProgressOption = None,
    penstock_config: Config | None = None,
    **kwargs: Any,
) -> Any:
    """What ``from_pretrained`` does once it is known where the model is; for other engines.

    Args:
        place: where the small files are.
        weights: opens the weights.
        name: what the model was asked for by.
        device: ``"cpu"`` or ``"cuda:N"``.
    """
    began = time.perf_counter()
    if trust_remote_code is not None:
        kwargs["trust_remote_code"] = trust_remote_code
    if config is None:
        config, kwargs = _configuration(model_class, place, kwargs)
    cls, config = _resolve(model_class, config, place, trust_remote_code)
    checkpoint = weights()
    adopts = _adopts(cls, config, checkpoint, dtype, kwargs)
    groups = one_group(checkpoint) if adopts else small_groups(checkpoint)
    supply: Supply | Views
    if mmap:
        if device != "cpu" or is_url(place.weights):
            raise ConfigError(f"{name}: mmap=True is for device='cpu' and local files")
        supply = Views(checkpoint, progress=progress, config=penstock_config)
    else:
        supply = Supply(checkpoint, groups, device, progress=progress, config=penstock_config)
    state = {tensor: LazyTensor(supply, checkpoint[tensor]) for group in groups for tensor in group}
    try:
        with reservation.none() if adopts else nullcontext(False) as unreserved:
            if unreserved:
                supply.begin()
            result = cls.from_pretrained(
                None, *model_args, config=config, state_dict=state, dtype=dtype, device_map={"": device}, **kwargs
            )
    except Exception as error:
        # transformers may have wrapped what went wrong with reading.
        if supply.failure is not None and supply.failure is not error:
            raise supply.failure from error
        raise
    finally:
        supply.close()
    if supply.failure is not None:
        raise supply.failure
    model = result[0] if isinstance(result, tuple) else result
    model.name_or_path = model.config.name_or_path = name
    if kwargs.get("generation_config") is None:
        _generation(model, place, trust_remote_code)
    seconds = time.perf_counter() - began
    logger.info("%s: %.2f GB on %s in %.2f s", name, supply.bytes / 1e9, device, seconds)
    return result


def _one_device(device: Any, device_map: Any) -> str:
    """The device of the whole model, as ``"cpu"`` or ``"cuda:N"``."""
    from penstock.frameworks.torch import Torch

    if isinstance(device_map, dict) and len(set(device_map.values())) == 1:
        device_map = next(iter(device_map.values()))
    if isinstance(device_map, dict) or device_map in {"auto", "balanced", "balanced_low_0", "sequential", "disk"}:
        raise ConfigError(
            f"device_map={device_map!r}: this loads whole models to one device. Use device=, or transformers' own "
            "from_pretrained within penstock.patch_safetensors()",
            remedy="Use device=, or penstock.patch_safetensors()",
        )
    return Torch().device(device if device_map is None else device_map)


def _configuration(model_class: Any, place: Place, kwargs: dict[str, Any]) -> tuple[PretrainedConfig, dict[str, Any]]:
    """The model's configuration, and the keywords that were not for it."""
    from transformers import AutoConfig

    # What a class without a configuration of its own needs is told by the file.
    config_class = getattr(model_class, "config_class", None) or AutoConfig
    # Concerns the weights and not the configuration, which would take it for an attribute.
    kept = {name: kwargs.pop(name) for name in ("quantization_config",) if name in kwargs}
    config, unused = config_class.from_pretrained(place.local, return_unused_kwargs=True, **kwargs)
    return config, unused | kept


def _resolve(
    model_class: Any, config: PretrainedConfig, place: Place, trust_remote_code: bool | None
) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """The class to build, and the part of the configuration that it takes."""
    import transformers

    if model_class == "auto":
        named = [name for name in config.architectures or [] if hasattr(transformers, name)]
        model_class = getattr(transformers, named[0]) if named else transformers.AutoModel
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is None:
        if not hasattr(model_class, "from_pretrained"):
            raise ConfigError(f"{model_class!r} is neither 'auto' nor a class of transformers with from_pretrained")
        return model_class, config
    remote = (getattr(config, "auto_map", None) or {}).get(model_class.__name__)
    if remote and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(remote, place.local), config
    if type(config) not in mapping:
        hint = ". Its code lies beside the weights; trust_remote_code=True lets it run" if remote else ""
        raise ConfigError(
            f"{place.local}: {model_class.__name__} knows no model for {type(config).__name__}{hint}",
            object=place.local,
        )
    found = mapping[type(config)]
    if isinstance(found, (list, tuple)):
        by_name = {candidate.__name__: candidate for candidate in found}
        found = next((by_name[name] for name in config.architectures or [] if name in by_name), found[0])
    text = getattr(config, "sub_configs", {}).get("text_config")
    if text is not None and getattr(found, "config_class", None) == text:
        quantization = getattr(config, "quantization_config", None)
        config = config.get_text_config()
        if quantization is not None:
            config.quantization_config = quantization
    return found, config


def _adopts(
    cls: type[PreTrainedModel], config: PretrainedConfig, checkpoint: Checkpoint, dtype: Any, kwargs: dict[str, Any]
) -> bool:
    """Whether the model's parameters will be the checkpoint's tensors as they are.

    A wrong answer costs memory while loading, nothing else.
    """
    import torch

    from penstock.frameworks.torch import DTYPES

    if kwargs.get("quantization_config") is not None or cls.__name__ not in (config.architectures or []):
        return False
    if isinstance(dtype, dict):  # one for each part of the model
        return False
    if any(re.search(r"\.experts\.\d+\.", name) for name in checkpoint):
        return False
    if dtype in {None, "auto"}:
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    # A checkpoint that is quantised stays so, unless it is to be undone.
    quantised = getattr(config, "quantization_config", None)
    stays = quantised is not None and not _setting(quantised, "dequantize")
    converted = sum(
        info.nbytes
        for info in checkpoint.values()
        if dtype is not None
        and info.dtype in DTYPES
        and DTYPES[info.dtype].is_floating_point
        and DTYPES[info.dtype] is not dtype
        and not (stays and DTYPES[info.dtype].itemsize == 1)
    )
    return converted <= checkpoint.nbytes // 100


def _setting(quantisation: Any, name: str) -> Any:
    """A setting of a quantisation, which is a dict as read from a file and an object as made by hand."""
    return quantisation.get(name) if isinstance(quantisation, dict) else getattr(quantisation, name, None)


def _generation(model: PreTrainedModel, place: Place, trust_remote_code: bool | None) -> None:
    """What generation takes from files beside the weights: transformers reads it where it reads weights by itself."""
    if not model.can_generate():
        return
    from transformers import GenerationConfig

    # Without a file of its own it is derived from the model's configuration, as transformers does.
    name = "generation_config.json"
    own = place.holds(name)
    model.generation_config = GenerationConfig.from_pretrained(
        place.local, config_file_name=name if own else "config.json", **({} if own else {"_from_model_config": True})
    )
    if trust_remote_code and hasattr(model, "load_custom_generate"):
        # There may be none.
        with suppress(OSError):
            model.generate = partial(model.load_custom_generate(place.local, trust_remote_code=True), model=model)
