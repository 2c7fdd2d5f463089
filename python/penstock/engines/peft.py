"""peft: adapters from anywhere, onto models that are there.

peft builds the adapter's layers without memory (``low_cpu_mem_usage``, a supported argument) and adopts the tensors it
is given. Penstock reads those straight to the device of the model.
"""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

from penstock._native import Config
from penstock.engines.files import Place, locate, open_weights
from penstock.engines.libraries import required

if TYPE_CHECKING:
    from penstock.checkpoint import PathLike

_HUB = ("token", "cache_dir", "local_files_only", "force_download")


def from_pretrained(
    model: Any,
    path: PathLike,
    adapter_name: str = "default",
    *,
    is_trainable: bool = False,
    subfolder: str = "",
    revision: str | None = None,
    autocast_adapter_dtype: bool = True,
    penstock_config: Config | None = None,
    **hub: Any,
) -> Any:
    """Makes a ``PeftModel`` of a model and an adapter, as ``PeftModel.from_pretrained`` does.

    Args:
        model: the model to adapt, which is changed in place.
        path: the adapter: a directory, the name of one on the Hub.
        adapter_name: what to call it.
        is_trainable: whether it may be trained.
        subfolder, revision: as for peft.
        autocast_adapter_dtype: whether adapters in half precision become float32, as for peft.
        penstock_config: settings of the load.
        hub: ``token``, ``cache_dir``, ``local_files_only``, ``force_download``.

    Returns:
        The ``PeftModel``, in evaluation mode unless it is trainable.

    Raises:
        MissingDependencyError: where peft is absent or too old.
        ObjectNotFoundError: nothing is there.
        PenstockError: see ``penstock.open`` and ``Checkpoint.load``. What peft raises comes through.
    """
    required("torch", "peft")
    from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, PeftModel

    place = _place(path, subfolder, revision, hub)
    settings = _settings(place, is_trainable)
    cls = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(settings.task_type, PeftModel)
    made = cls(model, settings, adapter_name, autocast_adapter_dtype=autocast_adapter_dtype, low_cpu_mem_usage=True)
    _fill(made, place, adapter_name, is_trainable, autocast_adapter_dtype, penstock_config)
    return made


def load_adapter(
    model: Any,
    path: PathLike,
    adapter_name: str,
    *,
    is_trainable: bool = False,
    subfolder: str = "",
    revision: str | None = None,
    autocast_adapter_dtype: bool = True,
    penstock_config: Config | None = None,
    **hub: Any,
) -> Any:
    """Adds an adapter to a ``PeftModel``, as its ``load_adapter`` does. It is not made the active one.

    Args and exceptions are those of ``from_pretrained``; ``model`` is a ``PeftModel``.

    Returns:
        The names that only one side had, as peft returns them.
    """
    required("torch", "peft")
    place = _place(path, subfolder, revision, hub)
    if adapter_name not in model.peft_config:
        settings = _settings(place, is_trainable)
        model._check_new_adapter_config(settings, is_trainable=is_trainable)
        cast = {"autocast_adapter_dtype": autocast_adapter_dtype}
        known = inspect.signature(model.add_adapter).parameters
        # Older versions leave it to the end, where `_fill` does it too.
        kept = cast if "autocast_adapter_dtype" in known else {}
        model.add_adapter(adapter_name, settings, low_cpu_mem_usage=True, **kept)
        if is_trainable and hasattr(model, "set_requires_grad"):
            model.set_requires_grad(adapter_name)
    return _fill(model, place, adapter_name, is_trainable, autocast_adapter_dtype, penstock_config)


def _place(path: PathLike, subfolder: str, revision: str | None, hub: dict[str, Any]) -> Place:
    unknown = sorted(set(hub) - set(_HUB))
    if unknown:
        raise TypeError(f"unexpected keywords: {', '.join(unknown)}")
    return locate(os.fspath(path), subfolder=subfolder, revision=revision, **hub)


def _settings(place: Place, is_trainable: bool) -> Any:
    from peft import PeftConfig

    settings = PeftConfig.from_pretrained(place.local)
    if settings.is_prompt_learning and is_trainable:
        raise ValueError("an adapter of prompt learning that is loaded cannot be trained")
    settings.inference_mode = not is_trainable
    return settings


def _fill(
    model: Any, place: Place, adapter_name: str, is_trainable: bool, autocast: bool, config: Config | None
) -> Any:
    from peft import set_peft_model_state_dict

    device = next((p.device for p in model.parameters() if p.device.type != "meta"), "cpu")
    weights = open_weights(place, "adapter_model", config=config).load(device=device)
    result = set_peft_model_state_dict(model, weights, adapter_name=adapter_name, low_cpu_mem_usage=True)
    # What an adapter does not hold is the model's own, so only what is the adapter's is missing.
    result.missing_keys[:] = [name for name in result.missing_keys if f".{adapter_name}." in name]
    if hasattr(model.base_model, "_cast_adapter_dtype"):
        model.base_model._cast_adapter_dtype(adapter_name=adapter_name, autocast_adapter_dtype=autocast)
    if not is_trainable:
        model.eval()
    return result
