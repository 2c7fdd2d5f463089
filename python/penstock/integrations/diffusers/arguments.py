"""What callers of the integration for diffusers write, in diffusers' words or torch's, as the integration needs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.integrations.shared.files import Place
from penstock.integrations.transformers.models import single_device


def device_of(device: Any, kwargs: dict[str, Any]) -> Any:
    """The device; that of a ``device_map``, which is taken from the keywords, where that names a single one."""
    given = single_device(kwargs.get("device_map"))
    if given is None:
        return device
    del kwargs["device_map"]
    return given


def dtype_of(given: Any) -> Any:
    """The torch dtype, by itself or by component, of a name of one; "auto" is what diffusers does without any.

    Raises:
        ConfigError: for what is no dtype.
    """
    import torch

    if isinstance(given, dict):
        return {part: dtype_of(one) for part, one in given.items()}
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if found is None and given in {None, "auto"}:
        return None
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype={given!r} is not a dtype of torch", remedy="Use one such as torch.bfloat16")
    return found


def class_named_in(found: Place) -> Any:
    """The class that a model's configuration names."""
    import diffusers

    settings = json.loads(Path(found.local, "config.json").read_text()) if found.holds("config.json") else {}
    cls = getattr(diffusers, str(settings.get("_class_name")), None)
    if not isinstance(cls, type) or not issubclass(cls, diffusers.ModelMixin):
        cause, remedy = "no config.json there names a model of diffusers", "Give its class instead of AutoModel"
        raise ConfigError(location=found.local, cause=cause, remedy=remedy)
    return cls


def dtype_keyword() -> str:
    """What diffusers calls a dtype: versions that know ``dtype`` warn of ``torch_dtype``."""
    from diffusers.utils import deprecation_utils

    return "dtype" if hasattr(deprecation_utils, "_resolve_dtype") else "torch_dtype"
