"""diffusers: pipelines whose components load side by side, single models, single files, and LoRA.

A pipeline is put together by diffusers from components that are already loaded (``components``), which it supports.
What is not weights (schedulers, tokenizers, processors) it loads itself.

Building is done by one thread, because libraries change things of the whole process meanwhile (torch's default dtype).
Reading is what takes time, and that is done for all components at once. What is left to diffusers' own loaders is
loaded within ``patch_safetensors``.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock._native import LoadOptions, shown
from penstock.arguments import is_url
from penstock.errors import ConfigError, LocationNotFoundError
from penstock.integrations.diffusers.arguments import class_named_in, device_of, dtype_keyword, dtype_of
from penstock.integrations.diffusers.components import Built, begin, class_of
from penstock.integrations.diffusers.together import Together
from penstock.integrations.safetensors.patching import patch_safetensors
from penstock.integrations.shared.files import Place, called, hub_options, locate
from penstock.integrations.shared.small_files import fresh_directory, joined
from penstock.optional import required
from penstock.progress import ProgressOption
from penstock.pulling import pull

if TYPE_CHECKING:
    import torch

    from penstock.arguments import AnyPath

logger = logging.getLogger(__name__)

_THEIRS = ("device_map", "quantization_config", "output_loading_info", "ignore_mismatched_sizes")
"""Keywords of models that only diffusers' own loader understands."""


def from_pretrained(
    pipeline_class: Any,
    path: AnyPath,
    *,
    device: Any = "cpu",
    dtype: Any = None,
    variant: str | None = None,
    subfolder: str = "",
    revision: str | None = None,
    progress: ProgressOption = None,
    options: LoadOptions | None = None,
    **kwargs: Any,
) -> Any:
    """Loads a pipeline or a model of diffusers, as its own ``from_pretrained`` does, straight to a device.

    Args:
        pipeline_class: a pipeline (``StableDiffusionXLPipeline``, ``DiffusionPipeline``), or the class of a model
            (``AutoencoderKL``, ``AutoModel``).
        path: a directory, a model of a Hugging Face cache, the name of one on the Hub.
        device: where all of it ends up: ``"cpu"``, ``"cuda"``, ``"cuda:N"``.
        dtype: a torch dtype or its name, or for pipelines a dict of them by component (with ``"default"``). As with
            diffusers, None is float32.
        variant, revision: as for diffusers; ``subfolder`` for models.
        progress: ``True`` for a bar, or a function of (bytes done, bytes in all).
        options: settings of the loads.
        kwargs: what else ``from_pretrained`` takes, such as components that exist already (``vae=…``).

    Raises:
        MissingDependencyError: where diffusers is absent or too old.
        LocationNotFoundError: nothing is there.
        PenstockError: see ``penstock.open`` and ``Checkpoint.stream``. What diffusers raises comes through.
    """
    required("torch", "diffusers", "accelerate", by="penstock.integrations.diffusers")
    import diffusers

    from penstock.frameworks.torch import Torch

    where = Torch().device(device_of(device, kwargs))
    dtype = dtype_of(kwargs.pop("torch_dtype", dtype))
    began = time.perf_counter()
    hub = hub_options(kwargs)
    models = (diffusers.ModelMixin, diffusers.AutoModel)
    if isinstance(pipeline_class, type) and issubclass(pipeline_class, models):
        found = locate(path, subfolder=subfolder, revision=revision, **hub)
        cls = pipeline_class if issubclass(pipeline_class, diffusers.ModelMixin) else class_named_in(found)
        loaded = _model(cls, found, where, dtype, variant, progress, options, kwargs)
    else:
        found = _pipeline_place(path, variant, revision, hub)
        with Together(progress) as together:
            parts = _components(found, together, where, dtype, variant, options, kwargs)
        loaded = _assembled(pipeline_class, found, parts, dtype, variant, options, kwargs)
        loaded.register_to_config(_name_or_path=called(path))
        if not _is_on(loaded, where):
            loaded = loaded.to(where)
    seconds, held = time.perf_counter() - began, _nbytes(loaded) / 1e9
    logger.info("%s: %.2f GB on %s in %.2f s: %.2f GB/s", called(path), held, where, seconds, held / max(seconds, 1e-9))
    return loaded


def _modules(loaded: Any) -> list[torch.nn.Module]:
    """A model, which may come with information, or the models of a pipeline."""
    import torch

    model = loaded[0] if isinstance(loaded, tuple) else loaded
    parts = [model] if isinstance(model, torch.nn.Module) else getattr(model, "components", {}).values()
    return [part for part in parts if isinstance(part, torch.nn.Module)]


def _nbytes(loaded: Any) -> int:
    """Bytes of the parameters and buffers of a model or a pipeline."""
    return sum(
        tensor.numel() * tensor.element_size()
        for module in _modules(loaded)
        for tensors in (module.parameters(), module.buffers())
        for tensor in tensors
    )


def from_single_file(
    model_class: Any,
    path: AnyPath,
    *,
    device: Any = "cpu",
    dtype: Any = None,
    options: LoadOptions | None = None,
    **kwargs: Any,
) -> Any:
    """Loads a model, or a pipeline, from one file in its original layout, as diffusers' ``from_single_file`` does.

    Args:
        model_class: the class of a model, or of a pipeline (then only a local file will do).
        path: the safetensors file: for models, anything that ``penstock.open`` takes.
        device: where the model ends up.
        dtype: a torch dtype or its name; None is float32.
        options: settings of the load.
        kwargs: what else ``from_single_file`` takes, above all ``config=`` (a directory or the name of a model whose
            configuration this is) and ``subfolder=``.

    Raises:
        MissingDependencyError: where diffusers is absent or too old.
        ConfigError: for a pipeline at a URL.
        PenstockError: see ``penstock.open`` and ``Checkpoint.load``. What diffusers raises comes through.
    """
    required("torch", "diffusers", "accelerate", by="penstock.integrations.diffusers")
    import diffusers

    from penstock.checkpoint import open
    from penstock.frameworks.torch import Torch

    where = Torch().device(device)
    dtype = dtype_of(kwargs.pop("torch_dtype", dtype))
    if dtype is not None:
        kwargs[dtype_keyword()] = dtype
    if not issubclass(model_class, diffusers.ModelMixin):
        if is_url(path):
            cause = "pipelines are taken from single local files only"
            remedy = "Load their models with from_single_file(ModelClass, …) and hand those to the pipeline"
            raise ConfigError(location=shown(path), cause=cause, remedy=remedy)
        with patch_safetensors(options=options):
            return model_class.from_single_file(os.fsdecode(path), **kwargs).to(where)
    # Converted on arrival, so that no second copy waits on the device; but not where some of it is to stay in fp32.
    early = dtype if dtype is not None and not model_class._keep_in_fp32_modules else None
    state = open(path, options=options).load(device=where, dtype=early)
    return model_class.from_single_file(state, device=where, **kwargs)


def load_lora_weights(
    pipeline: Any,
    path: AnyPath,
    *,
    weight_name: str | None = None,
    adapter_name: str | None = None,
    options: LoadOptions | None = None,
    **kwargs: Any,
) -> None:
    """Adds a LoRA to a pipeline, as its own ``load_lora_weights`` does, from anywhere.

    Args:
        pipeline: a pipeline of diffusers that takes LoRA.
        path: the safetensors file (local, or at a URL), or a local directory or the name of a model
            on the Hub that holds it.
        weight_name: the file's name in a directory.
        adapter_name: what to call it.
        options: settings of the load.
        kwargs: what else ``load_lora_weights`` takes.

    Raises:
        MissingDependencyError: where diffusers or peft is absent or too old.
        PenstockError: see ``penstock.open`` and ``Checkpoint.load``. What diffusers raises comes through.
    """
    required("torch", "diffusers", "peft", by="penstock.integrations.diffusers")
    if adapter_name is not None:
        kwargs["adapter_name"] = adapter_name
    directory = os.fsdecode(path)
    if is_url(path):
        # LoRAs are small, and settings that only their file's metadata holds are read by diffusers.
        for name in (kwargs.pop("subfolder", None), weight_name):
            directory = joined(directory, name) if name else directory
        found = pull(directory, fresh_directory())
        directory, weight_name = str(found.directory), found.files[0].path
    if weight_name is not None:
        kwargs["weight_name"] = weight_name
    with patch_safetensors(options=options):
        pipeline.load_lora_weights(directory, **kwargs)


def _model(
    cls: Any,
    where: Place,
    device: str,
    dtype: Any,
    variant: str | None,
    progress: ProgressOption,
    options: LoadOptions | None,
    kwargs: dict[str, Any],
) -> Any:
    theirs = [name for name in _THEIRS if kwargs.get(name)]
    if kwargs.get("use_safetensors") is False:
        theirs.append("use_safetensors")
    if theirs and is_url(where.weights):
        cause = f"{theirs[0]}= is left to diffusers, which reads local files"
        remedy = "Bring the model here first (penstock.pull)"
        raise ConfigError(location=shown(where.weights), cause=cause, remedy=remedy)
    if not theirs:
        with Together(progress) as together:
            built = begin(cls, where, together, device, dtype, variant, options, of_pipeline=False, **kwargs)
            if built is not None:
                together.run()
                return built()
    where.fetch_weights(variant)
    keywords = ({} if dtype is None else {dtype_keyword(): dtype}) | kwargs
    if kwargs.get("low_cpu_mem_usage") is False:
        # diffusers takes a device only for models that it builds without memory.
        with patch_safetensors(options=options):
            loaded = cls.from_pretrained(where.local, variant=variant, **keywords)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.to(device)
        return loaded
    if device != "cpu":
        keywords = {"device_map": {"": device}} | keywords
    with patch_safetensors(options=options):
        return cls.from_pretrained(where.local, variant=variant, **keywords)


def _components(
    found: Place,
    together: Together,
    device: str,
    dtype: Any,
    variant: str | None,
    options: LoadOptions | None,
    given: dict[str, Any],
) -> dict[str, Any]:
    """The components that have weights and were not given."""
    if not found.holds("model_index.json"):
        cause = "there is no model_index.json, so this is no pipeline"
        raise LocationNotFoundError(location=found.local, cause=cause)
    if given.get("quantization_config") is not None or given.get("use_safetensors") is False:
        return {}
    import torch

    index = json.loads(Path(found.local, "model_index.json").read_text())
    loading: dict[str, Built] = {}
    parts = {part: entry for part, entry in index.items() if isinstance(entry, list) and part not in given}
    found.bring(part for part, entry in parts.items() if entry[0] is not None)
    for part, entry in parts.items():
        component = class_of(*entry)
        if component is None or not Path(found.local, part).is_dir():
            continue  # diffusers says what is not there
        wanted = dtype.get(part, dtype.get("default", torch.float32)) if isinstance(dtype, dict) else dtype
        built = begin(component, found.inside(part), together, device, wanted, variant, options)
        if built is not None:
            loading[part] = built
    together.run()
    return {part: built() for part, built in loading.items()}


def _assembled(
    pipeline_class: Any,
    found: Place,
    parts: dict[str, Any],
    dtype: Any,
    variant: str | None,
    options: LoadOptions | None,
    kwargs: dict[str, Any],
) -> Any:
    """The pipeline, of components that are loaded and those that diffusers loads."""
    keywords = {dtype_keyword(): dtype} if dtype is not None else {}
    if variant is not None:
        keywords["variant"] = variant
    with patch_safetensors(options=options):
        return pipeline_class.from_pretrained(found.local, **parts, **keywords, **kwargs)


def _is_on(pipeline: Any, device: str) -> bool:
    """Whether all weights of a pipeline are there. Moving is left out then: quantised components refuse to be moved."""
    return all(str(p.device) == device for module in _modules(pipeline) for p in module.parameters())


def _pipeline_place(path: AnyPath, variant: str | None, revision: str | None, hub: dict[str, Any]) -> Place:
    text = os.fsdecode(path)
    try:
        return locate(path, download=False)
    except LocationNotFoundError:
        if text.count("/") != 1 or is_url(text):
            raise
    from diffusers import DiffusionPipeline

    # Which of a repository's files a pipeline needs, diffusers knows.
    try:
        found = DiffusionPipeline.download(text, variant=variant, revision=revision, use_safetensors=True, **hub)
    except (OSError, ValueError) as error:
        message = f"{text}: there is no such directory, and the Hub gave no pipeline of that name: {error}"
        raise LocationNotFoundError(message, location=text, cause=str(error)) from error
    return Place(str(found), str(found))
