"""diffusers: pipelines whose components load side by side, and single models.

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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock._native import LoadOptions, shown
from penstock.arguments import is_url
from penstock.errors import ConfigError, LocationNotFoundError
from penstock.integrations.diffusers.arguments import class_named_in, device_of, dtype_keyword, dtype_of
from penstock.integrations.diffusers.components import Built, begin, class_of
from penstock.integrations.diffusers.together import Together
from penstock.integrations.safetensors.patching import patch_safetensors
from penstock.integrations.shared.files import (
    Place,
    called,
    check_order,
    guard_of,
    hub_options,
    locate,
    refuse_options,
)
from penstock.optional import required
from penstock.progress import ProgressOption

if TYPE_CHECKING:
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
    storage_options: Mapping[str, Any] | None = None,
    trust: Any = None,
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
        storage_options: credentials, endpoint and settings of the store of a URL, as for ``penstock.open``.
        trust: whose signatures are trusted, as for ``penstock.open``. Small files are signed then, too.
        options: settings of the loads.
        kwargs: what else ``from_pretrained`` takes, such as components that exist already (``vae=…``).

    Raises:
        MissingDependencyError: where diffusers is absent or too old.
        LocationNotFoundError: nothing is there.
        ConfigError: for what is no class, or no path; storage options with the name of one on the Hub.
        PenstockError: see ``penstock.open`` and ``Checkpoint.stream``. What diffusers raises comes through.
    """
    required("torch", "diffusers", "accelerate", by="penstock.integrations.diffusers")
    check_order("from_pretrained", "the class of a pipeline or a model", pipeline_class, path)
    import diffusers

    from penstock.frameworks.torch import Torch

    where = Torch().device(device_of(device, kwargs))
    dtype = dtype_of(kwargs.pop("torch_dtype", dtype))
    began = time.perf_counter()
    hub = hub_options(kwargs)
    models = (diffusers.ModelMixin, diffusers.AutoModel)
    if isinstance(pipeline_class, type) and issubclass(pipeline_class, models):
        found = locate(
            path, subfolder=subfolder, revision=revision, storage_options=storage_options, trust=trust, **hub
        )
        cls = pipeline_class if issubclass(pipeline_class, diffusers.ModelMixin) else class_named_in(found)
        loaded = _model(cls, found, where, dtype, variant, progress, options, kwargs)
    else:
        found = _pipeline_place(path, variant, revision, storage_options, trust, hub)
        with Together(progress) as together:
            parts = _components(found, together, where, dtype, variant, options, kwargs)
        loaded = _assembled(pipeline_class, found, parts, dtype, variant, options, kwargs)
        loaded.register_to_config(_name_or_path=called(path))
        if not _is_on(loaded, where):
            loaded = loaded.to(where)
    logger.info("%s on %s in %.2f s", called(path), where, time.perf_counter() - began)
    return loaded


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
        found.check_all()
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
        if built is None:
            found.inside(part).check_all()
        else:
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
    import torch

    modules = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    return all(str(p.device) == device for module in modules for p in module.parameters())


def _pipeline_place(
    path: AnyPath,
    variant: str | None,
    revision: str | None,
    storage_options: Mapping[str, Any] | None,
    trust: Any,
    hub: dict[str, Any],
) -> Place:
    text = os.fsdecode(path)
    try:
        return locate(path, download=False, storage_options=storage_options, trust=trust)
    except LocationNotFoundError:
        if text.count("/") != 1 or is_url(text):
            raise
    refuse_options(text, storage_options)
    from diffusers import DiffusionPipeline

    # Which of a repository's files a pipeline needs, diffusers knows.
    try:
        found = DiffusionPipeline.download(text, variant=variant, revision=revision, use_safetensors=True, **hub)
    except (OSError, ValueError) as error:
        message = f"{text}: there is no such directory, and the Hub gave no pipeline of that name: {error}"
        raise LocationNotFoundError(message, location=text, cause=str(error)) from error
    return Place(str(found), str(found), guard=guard_of(str(found), trust, is_partial=True))
