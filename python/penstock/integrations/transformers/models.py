"""transformers: ``from_pretrained`` with the weights' way to the device made short.

Everything but reading stays transformers' own: it builds the model without memory, renames, merges, converts and ties.
It gets a ``state_dict`` (a supported argument) whose values are lazy, and asks for each when it wants it; what it then
gets already lies on the device, in memory that becomes the parameter. So no second copy of a weight exists, in host
memory or on the device. What cannot be had so (a model on several devices, GGUF) its own loader reads, within
``patch_safetensors``.

Where the tensors of the files will be the parameters, all of them are read while the model is being built. With a CUDA
device, transformers would reserve as much memory as the model needs on top of that, and is kept from it
(``reservation``). Where tensors are to be converted, loading begins with the first that is asked for.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock._native import LoadOptions, shown
from penstock.errors import ConfigError
from penstock.integrations.safetensors.patching import patch_safetensors
from penstock.integrations.shared.files import Place, called, is_url, locate, open_weights, require_local
from penstock.integrations.transformers import own_adapters, reservation, torchao
from penstock.integrations.transformers.lazy import LazyTensor
from penstock.integrations.transformers.model_classes import configuration, named_by, quantisation, resolve
from penstock.integrations.transformers.supply import Supply, one_group, small_groups
from penstock.integrations.transformers.views import Views
from penstock.optional import required
from penstock.progress import ProgressOption

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from penstock.arguments import AnyPath
    from penstock.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

_HUB = ("token", "cache_dir", "local_files_only", "force_download")
_SEVERAL = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps that transformers computes."""


def from_pretrained(
    model_class: Any,
    path: AnyPath,
    *model_args: Any,
    device: Any = None,
    dtype: Any = None,
    config: PretrainedConfig | AnyPath | None = None,
    variant: str | None = None,
    subfolder: str = "",
    revision: str | None = None,
    trust_remote_code: bool | None = None,
    mmap: bool = False,
    progress: ProgressOption = None,
    options: LoadOptions | None = None,
    **kwargs: Any,
) -> Any:
    """Loads a model of transformers, as its own ``from_pretrained`` does, straight to a device.

    Args:
        model_class: a class of transformers (``LlamaForCausalLM``), one that finds the class
            (``AutoModelForCausalLM``), or ``"auto"`` for the class that the model's configuration names.
        path: the model: a directory, a model of a Hugging Face cache, the name of one on the Hub. An adapter of peft
            that lies there, with the model or in its place, is put on the model.
        model_args, kwargs: what else ``from_pretrained`` takes (``attn_implementation``, ``quantization_config``, …).
        device: where the model ends up: ``"cpu"``, ``"cuda"``, ``"cuda:N"``; by default torch's default device.
        dtype: of the model: a torch dtype, its name, or ``"auto"`` (as by default) for what its configuration or its
            weights say; or a dict of these by part of the model, as for transformers.
        config: the model's configuration, if not the one that lies there; or where to read it.
        variant, subfolder, revision: as for transformers.
        trust_remote_code: whether code that lies beside the weights may run.
        mmap: parameters that are not converted are views of the mapped files (``device="cpu"``, local files), as with
            transformers itself, instead of memory of their own.
        progress: ``True`` for a bar, or a function of (bytes done, bytes in all).
        options: settings of the load.

    Returns:
        The model, in evaluation mode; with ``output_loading_info=True``, the model and transformers' information.

    Raises:
        MissingDependencyError: where transformers is absent or too old.
        ConfigError: for a class that cannot load models, an adapter that names no model, a ``state_dict``; and where
            what is left to transformers' own loader (a ``device_map`` of several devices) is not local.
        PenstockError: see ``penstock.open`` and ``Checkpoint.stream``. What transformers raises comes through.
    """
    required("torch", "transformers", "accelerate", by="penstock.integrations.transformers")
    if kwargs.pop("state_dict", None) is not None:
        raise ConfigError(f"{shown(path)}: a state_dict is for transformers' own from_pretrained, without a path")
    # Both may be given; transformers prefers the newer name.
    older = kwargs.pop("torch_dtype", None)
    dtype = next((given for given in (dtype, older) if given is not None), "auto")
    hub = {name: kwargs.pop(name) for name in _HUB if name in kwargs}
    place = locate(path, subfolder=subfolder, revision=revision, **hub)
    found = own_adapters.look(os.fsdecode(path), place, has_config=config is not None, hub=hub)
    theirs = _theirs(kwargs)
    if theirs is not None:
        return _by_transformers(
            model_class,
            found,
            place,
            theirs,
            *model_args,
            config=config,
            dtype=dtype,
            variant=variant,
            trust_remote_code=trust_remote_code,
            options=options,
            **kwargs,
        )
    where = _one_device(device, kwargs.pop("device_map", None))
    adapter_name = kwargs.pop("adapter_name", "default")
    kwargs.pop("adapter_kwargs", None)
    result = load(
        model_class,
        found.model,
        lambda config: _weights(found.model, config, variant, options),
        *model_args,
        name=found.name,
        device=where,
        dtype=dtype,
        config=config,
        trust_remote_code=trust_remote_code,
        mmap=mmap,
        progress=progress,
        options=options,
        **kwargs,
    )
    if found.adapter is not None:
        model = result[0] if isinstance(result, tuple) else result
        told = own_adapters.put_on(model, found.adapter, adapter_name, options)
        if isinstance(result, tuple) and told is not None:
            result = (model, told)
    return result


def load(
    model_class: Any,
    place: Place,
    weights: Callable[[PretrainedConfig], Checkpoint],
    *model_args: Any,
    name: str,
    device: str,
    dtype: Any,
    config: PretrainedConfig | AnyPath | None = None,
    trust_remote_code: bool | None = None,
    mmap: bool = False,
    progress: ProgressOption = None,
    options: LoadOptions | None = None,
    **kwargs: Any,
) -> Any:
    """What ``from_pretrained`` does once it is known where the model is; for other engines.

    Args:
        place: where the small files are.
        weights: opens the weights of a model of that configuration.
        name: what the model was asked for by.
        device: ``"cpu"`` or ``"cuda:N"``.
    """
    began = time.perf_counter()
    if trust_remote_code is not None:
        kwargs["trust_remote_code"] = trust_remote_code
    given = kwargs
    settings, kwargs = configuration(model_class, place, config, dict(given))
    cls, settings = resolve(model_class, settings, place, trust_remote_code)
    # A class that finds the class has handed keywords to the configuration before generation could see them.
    for_generation = given if cls is model_class else kwargs
    checkpoint = weights(settings)
    adopts = _adopts(cls, settings, checkpoint, dtype, kwargs)
    groups = one_group(checkpoint) if adopts else small_groups(checkpoint)
    supply: Supply | Views
    if mmap:
        if device != "cpu" or is_url(place.weights):
            raise ConfigError(f"{called(name)}: mmap=True is for device='cpu' and local files")
        supply = Views(checkpoint, progress=progress, options=options)
    else:
        supply = Supply(checkpoint, groups, device, progress=progress, options=options)
    state = {tensor: LazyTensor(supply, checkpoint[tensor]) for group in groups for tensor in group}
    try:
        headers = torchao.told(checkpoint.metadata() or {}) if torchao.is_of(settings) else nullcontext()
        with headers, reservation.none() if adopts else nullcontext(False) as unreserved:
            if unreserved:
                supply.begin()
            result = cls.from_pretrained(
                None, *model_args, config=settings, state_dict=state, dtype=dtype, device_map={"": device}, **kwargs
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
    model.name_or_path = model.config.name_or_path = called(name)
    if kwargs.get("generation_config") is None:
        _generation(model, place, trust_remote_code, for_generation)
    seconds = time.perf_counter() - began
    loaded, rate = supply.bytes / 1e9, supply.bytes / max(seconds, 1e-9) / 1e9
    logger.info("%s: %.2f GB on %s in %.2f s: %.2f GB/s", called(name), loaded, device, seconds, rate)
    return result


def _theirs(kwargs: dict[str, Any]) -> str | None:
    """The first keyword that only transformers' own loader understands, as the caller wrote it."""
    device_map = kwargs.get("device_map")
    if isinstance(device_map, dict):
        several = len(set(device_map.values())) > 1 or "disk" in device_map.values()
    else:
        several = isinstance(device_map, str) and device_map in _SEVERAL
    if several:
        return f"device_map={device_map!r}"
    if kwargs.get("gguf_file"):
        return "gguf_file"
    return "use_safetensors=False" if kwargs.get("use_safetensors") is False else None


def _by_transformers(
    model_class: Any,
    found: own_adapters.Found,
    place: Place,
    theirs: str,
    *model_args: Any,
    config: PretrainedConfig | AnyPath | None,
    trust_remote_code: bool | None,
    options: LoadOptions | None,
    **kwargs: Any,
) -> Any:
    """What transformers' own loader makes of files that are here. It puts an adapter on by itself."""
    left = f"{theirs} is left to transformers"
    brought = "the model here first (penstock.pull), or use device= for one device"
    require_local(place, left, brought, kwargs.get("variant"))
    if trust_remote_code is not None:
        kwargs["trust_remote_code"] = trust_remote_code
    if isinstance(model_class, str) and model_class == "auto":
        model_class = named_by(configuration(model_class, found.model, config, dict(kwargs))[0])
    with patch_safetensors(options=options):
        result = model_class.from_pretrained(place.local, *model_args, config=config, **kwargs)
    model = result[0] if isinstance(result, tuple) else result
    model.name_or_path = model.config.name_or_path = found.name
    return result


def _one_device(device: Any, device_map: Any) -> str:
    """The device of the whole model, as ``"cpu"`` or ``"cuda:N"``."""
    import torch
    from transformers import modeling_utils

    from penstock.frameworks.torch import Torch

    if isinstance(device_map, dict):
        device_map = next(iter(device_map.values()), None)
    given = device if device_map is None else device_map
    if given is None:
        # That of `with torch.device(…)`, or of `torch.set_default_device`.
        given = torch.empty(0).device
        check = getattr(modeling_utils, "check_and_set_device_map", None)
        if given.type == "meta" and check is not None:
            check(None)  # says why not
    return Torch().device(given)


def _weights(place: Place, config: PretrainedConfig, variant: str | None, options: LoadOptions | None) -> Checkpoint:
    """The files that the configuration names, or those under the usual names."""
    named = getattr(config, "transformers_weights", None)
    besides = getattr(type(config), "extra_files", ())
    return open_weights(place, "model", variant, options, named=named, besides=besides)


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
    stays = getattr(config, "quantization_config", None) is not None and not quantisation(config, "dequantize")
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


def _generation(model: PreTrainedModel, place: Place, trust_remote_code: bool | None, kwargs: dict[str, Any]) -> None:
    """What generation takes from files beside the weights: transformers reads it where it reads weights by itself."""
    if not model.can_generate():
        return
    from transformers import GenerationConfig

    known = vars(GenerationConfig())
    kwargs = {name: value for name, value in kwargs.items() if name in known}
    # Without a file of its own it is derived from the model's configuration, as transformers does.
    name = "generation_config.json"
    if not place.holds(name):
        name, kwargs = "config.json", kwargs | {"_from_model_config": True}
    model.generation_config = GenerationConfig.from_pretrained(place.local, config_file_name=name, **kwargs)
    if trust_remote_code and hasattr(model, "load_custom_generate"):
        # There may be none.
        with suppress(OSError):
            model.generate = partial(model.load_custom_generate(place.local, trust_remote_code=True), model=model)
