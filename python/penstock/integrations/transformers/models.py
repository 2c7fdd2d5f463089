"""transformers: ``from_pretrained`` with the weights' way to the device made short.

Everything but reading stays transformers' own: it builds the model without memory, renames, merges, converts and ties.
Its loader is given the model's directory, and finds one lazy file there (``supplied``), whose tensors already lie on
the device, in memory that becomes the parameter. So no second copy of a weight exists, in host memory or on the device.
What cannot be had so (a model on several devices, GGUF) it reads from the files, within ``patch_safetensors``.

Where the tensors of the files will be the parameters, all of them are read while the model is being built. With a CUDA
device, transformers would reserve as much memory as the model needs on top of that, and is kept from it
(``supplied.unreserved``). Where tensors are to be converted, loading begins with the first that is asked for.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from penstock._native import LoadOptions, shown
from penstock.arguments import is_url
from penstock.errors import ConfigError
from penstock.integrations.safetensors.patching import patch_safetensors
from penstock.integrations.shared.files import Place, called, check_order, hub_options, locate, open_weights
from penstock.integrations.transformers.supplied import supplied, unreserved
from penstock.optional import is_installed, required
from penstock.progress import ProgressOption
from penstock.supply.mapped import MappedSource
from penstock.supply.streamed import Supply, one_group, small_groups

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from penstock.arguments import AnyPath
    from penstock.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

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
    storage_options: Mapping[str, Any] | None = None,
    trust: Any = None,
    options: LoadOptions | None = None,
    **kwargs: Any,
) -> Any:
    """Loads a model of transformers, as its own ``from_pretrained`` does, straight to a device.

    Args:
        model_class: a class of transformers (``LlamaForCausalLM``), one that finds the class
            (``AutoModelForCausalLM``), or ``"auto"`` for the class that the model's configuration names.
        path: the model: a directory, a model of a Hugging Face cache, the name of one on the Hub. An adapter of peft
            that lies there with the model is put on it.
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
        storage_options: credentials, endpoint and settings of the store of a URL, as for ``penstock.open``.
        trust: whose signatures are trusted, as for ``penstock.open``. Small files are signed then, too.
        options: settings of the load.

    Returns:
        The model, in evaluation mode; with ``output_loading_info=True``, the model and transformers' information.

    Raises:
        MissingDependencyError: where transformers is absent or too old.
        ConfigError: for a class that cannot load models, or none; a ``state_dict``; and where what is left to
            transformers' own loader (a ``device_map`` of several devices) is not local.
        PenstockError: see ``penstock.open`` and ``Checkpoint.stream``. What transformers raises comes through.
    """
    required("torch", "transformers", "accelerate", by="penstock.integrations.transformers")
    check_order("from_pretrained", "the class of a model or 'auto'", model_class, path, names=("auto",))
    if kwargs.pop("state_dict", None) is not None:
        raise ConfigError(f"{shown(path)}: a state_dict is for transformers' own from_pretrained, without a path")
    # Both may be given; transformers prefers the newer name.
    older = kwargs.pop("torch_dtype", None)
    dtype = next((given for given in (dtype, older) if given is not None), "auto")
    hub = hub_options(kwargs)
    place = locate(path, subfolder=subfolder, revision=revision, storage_options=storage_options, trust=trust, **hub)
    # transformers puts an adapter that lies beside its model on it, where peft is installed.
    if place.holds("adapter_config.json") and is_installed("peft"):
        place.bring_file("adapter_model.safetensors")
    left = _left(kwargs)
    if left is not None:
        if is_url(place.weights):
            cause = f"{left} is left to transformers, which reads local files"
            remedy = "Bring the model here first (penstock.pull), or use device= for one device"
            raise ConfigError(location=shown(place.weights), cause=cause, remedy=remedy)
        place.fetch_weights(variant)
        cls = model_class
        if isinstance(model_class, str) and model_class == "auto":
            cls = named_by(_configuration(model_class, place, config, trust_remote_code))
        with patch_safetensors(options=options):
            result = cls.from_pretrained(
                place.local,
                *model_args,
                config=config,
                dtype=dtype,
                variant=variant,
                **_trusting(trust_remote_code),
                **kwargs,
            )
        return _named(result, os.fsdecode(path))
    where = _one_device(device, kwargs.pop("device_map", None))
    return load(
        model_class,
        place,
        lambda config: _weights(place, config, variant, options),
        *model_args,
        name=os.fsdecode(path),
        device=where,
        dtype=dtype,
        config=config,
        trust_remote_code=trust_remote_code,
        mmap=mmap,
        progress=progress,
        **kwargs,
    )


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
    **kwargs: Any,
) -> Any:
    """What ``from_pretrained`` does once it is known where the model is; for other integrations.

    Args:
        place: where the small files are.
        weights: opens the weights of a model of that configuration, with the settings of the load.
        name: what the model was asked for by.
        device: ``"cpu"`` or ``"cuda:N"``.
    """
    began = time.perf_counter()
    settings = _configuration(model_class, place, config, trust_remote_code)
    cls = named_by(settings) if isinstance(model_class, str) and model_class == "auto" else model_class
    builds = _built(cls, settings, place, trust_remote_code)
    checkpoint = weights(settings)
    adopts = _adopts(builds, settings, checkpoint, dtype, kwargs)
    source: Supply | MappedSource
    if mmap:
        if device != "cpu" or is_url(place.weights):
            raise ConfigError(f"{called(name)}: mmap=True is for device='cpu' and local files")
        source = MappedSource(checkpoint, progress=progress)
    else:
        groups = one_group(checkpoint) if adopts else small_groups(checkpoint)
        source = Supply(checkpoint, groups, device, progress=progress)
    try:
        with (
            supplied(place.local, checkpoint, source),
            unreserved() if adopts else nullcontext(False) as is_unreserved,
        ):
            if is_unreserved and isinstance(source, Supply):
                source.begin()
            result = cls.from_pretrained(
                place.local,
                *model_args,
                config=config,
                dtype=dtype,
                device_map={"": device},
                **_trusting(trust_remote_code),
                **kwargs,
            )
    except Exception as error:
        # transformers may have wrapped what went wrong with reading.
        if source.failure is not None and source.failure is not error:
            raise source.failure from error
        raise
    finally:
        source.close()
    if source.failure is not None:
        raise source.failure
    seconds = time.perf_counter() - began
    loaded, rate = source.bytes / 1e9, source.bytes / max(seconds, 1e-9) / 1e9
    logger.info("%s: %.2f GB on %s in %.2f s: %.2f GB/s", called(name), loaded, device, seconds, rate)
    return _named(result, called(name))


def _named(result: Any, name: str) -> Any:
    model = result[0] if isinstance(result, tuple) else result
    model.name_or_path = model.config.name_or_path = name
    return result


def _trusting(trust_remote_code: bool | None) -> dict[str, bool]:
    return {} if trust_remote_code is None else {"trust_remote_code": trust_remote_code}


def named_by(config: PretrainedConfig) -> Any:
    """The class that a configuration names, or one that finds the class."""
    import transformers

    names = config.architectures or []
    for name in names:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for finder, reference in (getattr(config, "auto_map", None) or {}).items():
        # Of code that lies beside the weights: "modeling_x.XForCausalLM", found by "AutoModelForCausalLM".
        is_model = finder.startswith("AutoModel") and hasattr(transformers, finder)
        if is_model and isinstance(reference, str) and reference.rpartition(".")[2] in names:
            return getattr(transformers, finder)
    return transformers.AutoModel


def _configuration(
    model_class: Any, place: Place, given: PretrainedConfig | AnyPath | None, trust_remote_code: bool | None
) -> PretrainedConfig:
    """The model's configuration as it is stored, from which follows where weights are and how they are read."""
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(given, PretrainedConfig):
        return given
    config_class = getattr(model_class, "config_class", None) or AutoConfig
    source = place.local if given is None else os.fspath(given)
    config: PretrainedConfig = config_class.from_pretrained(source, **_trusting(trust_remote_code))
    return config


def _built(cls: Any, config: PretrainedConfig, place: Place, trust_remote_code: bool | None) -> set[str]:
    """Names of the classes of which transformers builds one.

    Raises:
        ConfigError: for what is no class of models, and one that knows none for this configuration.
    """
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is None:
        if not hasattr(cls, "from_pretrained"):
            raise ConfigError(f"{cls!r} is neither 'auto' nor a class of transformers with from_pretrained")
        return {cls.__name__}
    remote = (getattr(config, "auto_map", None) or {}).get(cls.__name__)
    if isinstance(remote, str) and trust_remote_code:
        return {remote.rpartition(".")[2]}
    if type(config) not in mapping:
        cause = f"{cls.__name__} knows no model for {type(config).__name__}"
        remedy = "Its code lies beside the weights; trust_remote_code=True lets it run" if remote else None
        raise ConfigError(location=place.local, cause=cause, remedy=remedy)
    found = mapping[type(config)]
    return {one.__name__ for one in (found if isinstance(found, (list, tuple)) else [found])}


def _left(kwargs: dict[str, Any]) -> str | None:
    """The first keyword that only transformers' own loader understands, as the caller wrote it."""
    device_map = kwargs.get("device_map")
    if device_map and single_device(device_map) in (None, "disk"):
        return f"device_map={device_map!r}"
    if kwargs.get("gguf_file"):
        return "gguf_file"
    return "use_safetensors=False" if kwargs.get("use_safetensors") is False else None


def single_device(device_map: Any) -> Any:
    """The device that a ``device_map`` names for the whole model; None where it names none, or several."""
    if isinstance(device_map, dict):
        devices = set(device_map.values())
        return devices.pop() if len(devices) == 1 else None
    return None if device_map in _SEVERAL else device_map


def _one_device(device: Any, device_map: Any) -> str:
    """The device of the whole model, as ``"cpu"`` or ``"cuda:N"``."""
    import torch
    from transformers import modeling_utils

    from penstock.frameworks.torch import Torch

    named = single_device(device_map)
    given = device if named is None else named
    if given is None:
        # That of `with torch.device(…)`, or of `torch.set_default_device`.
        given = torch.empty(0).device
        check = getattr(modeling_utils, "check_and_set_device_map", None)
        if given.type == "meta" and check is not None:
            check(None)  # says why not
    return Torch().device(given)


def _weights(place: Place, config: PretrainedConfig, variant: str | None, options: LoadOptions | None) -> Checkpoint:
    """The files that the configuration names, or those under the usual names."""
    for name in getattr(type(config), "extra_files", ()):
        place.bring_file(name)  # transformers adds those to the weights by itself
    return open_weights(place, "model", variant, options, named=getattr(config, "transformers_weights", None))


def _adopts(
    builds: set[str], config: PretrainedConfig, checkpoint: Checkpoint, dtype: Any, kwargs: dict[str, Any]
) -> bool:
    """Whether the model's parameters will be the checkpoint's tensors as they are.

    A wrong answer costs memory while loading, nothing else.
    """
    import torch

    from penstock.frameworks.torch import DTYPES

    if kwargs.get("quantization_config") is not None or builds.isdisjoint(config.architectures or []):
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
    stored = getattr(config, "quantization_config", None)
    undone = stored.get("dequantize") if isinstance(stored, dict) else getattr(stored, "dequantize", None)
    stays = stored is not None and not undone
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
