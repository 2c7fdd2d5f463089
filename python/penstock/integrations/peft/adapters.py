"""peft: adapters from anywhere, onto models that are there.

peft's own loader reads them, within ``patch_safetensors``: adapters are small, so one that is not on this machine is
copied here first. What Penstock adds is where an adapter may be (a URL, a folder, the Hub without other files), its
errors for weights that are missing, and the refusal of keywords that nobody knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock._native import LoadOptions
from penstock.integrations.safetensors.patching import patch_safetensors
from penstock.integrations.shared.files import check_order, hub_options, locate, open_weights
from penstock.optional import required

if TYPE_CHECKING:
    from penstock.arguments import AnyPath

_WEIGHTS = "adapter_model"
"""peft's name for weights."""
_PEFTS = {
    *("config", "autocast_adapter_dtype", "ephemeral_gpu_offload", "key_mapping", "ignore_mismatched_sizes"),
    *("low_cpu_mem_usage", "torch_device", "use_safetensors", "adapters"),
    *("device_map", "max_memory", "offload_dir", "offload_folder", "offload_index"),
}
"""What peft's loaders take besides. Other keywords they would pass over."""


def from_pretrained(
    model: Any,
    path: AnyPath,
    adapter_name: str = "default",
    *,
    is_trainable: bool = False,
    subfolder: str = "",
    revision: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    trust: Any = None,
    options: LoadOptions | None = None,
    **kwargs: Any,
) -> Any:
    """Makes a ``PeftModel`` of a model and an adapter, as ``PeftModel.from_pretrained`` does.

    Args:
        model: the model to adapt, which is changed in place.
        path: the adapter: a directory, a URL, the name of one on the Hub.
        adapter_name: what to call it.
        is_trainable: whether it may be trained.
        subfolder, revision: where in there, and of which commit.
        storage_options: credentials, endpoint and settings of the store of a URL, as for ``penstock.open``.
        trust: whose signatures are trusted, as for ``penstock.open``. Small files are signed then, too.
        options: settings of the load.
        kwargs: ``token``, ``cache_dir``, ``local_files_only``, ``force_download``, and what else peft takes:
            ``config``, ``autocast_adapter_dtype``, ``key_mapping``, ….

    Returns:
        The ``PeftModel``, in evaluation mode unless it is trainable.

    Raises:
        MissingDependencyError: where peft is absent or too old.
        LocationNotFoundError: nothing is there.
        ConfigError: for swapped arguments; storage options with the name of one on the Hub.
        PenstockError: see ``penstock.open`` and ``penstock.pull``. What peft raises comes through.
    """
    directory = _brought("from_pretrained", model, path, subfolder, revision, storage_options, trust, kwargs)
    from peft import PeftConfig, PeftModel

    settings = PeftConfig.from_pretrained(directory) if kwargs.get("config") is None else kwargs["config"]
    if settings.is_prompt_learning and is_trainable:
        raise ValueError("an adapter of prompt learning that is loaded cannot be trained")
    with patch_safetensors(options=options):
        return PeftModel.from_pretrained(model, directory, adapter_name, is_trainable=is_trainable, **kwargs)


def load_adapter(
    model: Any,
    path: AnyPath,
    adapter_name: str,
    *,
    is_trainable: bool = False,
    subfolder: str = "",
    revision: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    trust: Any = None,
    options: LoadOptions | None = None,
    **kwargs: Any,
) -> Any:
    """Adds an adapter to a ``PeftModel``, as its ``load_adapter`` does. It is not made the active one.

    Args and exceptions are those of ``from_pretrained``; ``model`` is a ``PeftModel``.

    Returns:
        The names that only one side had, as peft returns them.
    """
    directory = _brought("load_adapter", model, path, subfolder, revision, storage_options, trust, kwargs)
    with patch_safetensors(options=options):
        return model.load_adapter(directory, adapter_name, is_trainable=is_trainable, **kwargs)


def _brought(
    call: str,
    model: Any,
    path: AnyPath,
    subfolder: str,
    revision: str | None,
    storage_options: Mapping[str, Any] | None,
    trust: Any,
    kwargs: dict[str, Any],
) -> str:
    """The directory of an adapter, with its weights. Keywords of the Hub are taken out of ``kwargs``."""
    required("torch", "peft", by="penstock.integrations.peft")
    check_order(call, "the model", model, path)
    hub = hub_options(kwargs)
    if unknown := sorted(set(kwargs) - _PEFTS):
        raise TypeError(f"unexpected keywords: {', '.join(unknown)}")
    place = locate(
        path, subfolder=subfolder or "", revision=revision, storage_options=storage_options, trust=trust, **hub
    )
    open_weights(place, _WEIGHTS)
    place.bring_file(f"{_WEIGHTS}.safetensors")
    return place.local
