"""Adapters of peft that lie in a model's directory, or in its place.

transformers takes both for a model with the adapter on it: a directory that holds a model and an adapter, and one that
holds an adapter whose configuration names the model. The layers are put in by the model's own ``load_adapter``, which
gets the adapter's tensors as Penstock read them, on the model's device. For a ``PeftModel`` around a model there is
``integrations.peft``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock._native import LoadOptions, shown
from penstock.errors import ConfigError
from penstock.integrations.shared.files import Place, locate, open_weights
from penstock.optional import is_installed, required

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SETTINGS = "adapter_config.json"


class Found(NamedTuple):
    """What lies in a place that was asked for."""

    name: str
    """What the model is called by."""
    model: Place
    adapter: Place | None
    """What goes on the model, if anything."""


def look(name: str, place: Place, *, has_config: bool, hub: dict[str, Any]) -> Found:
    """Tells a model from one with an adapter, and from an adapter that names its model.

    Args:
        name: what the caller asked for.
        place: where that is.
        has_config: whether the caller gave the model's configuration.
        hub: keywords of ``locate`` for a model that the adapter names.

    Raises:
        ConfigError: for an adapter alone that names no model.
        MissingDependencyError: for an adapter alone, where peft is absent or too old.
    """
    if not place.holds(_SETTINGS):
        return Found(name, place, None)
    if place.holds("config.json") or has_config:
        # Like transformers, which does not look for adapters where peft is absent.
        return Found(name, place, place if is_installed("peft") else None)
    required("peft", by="penstock.integrations.transformers")
    base = json.loads(Path(place.local, _SETTINGS).read_text()).get("base_model_name_or_path")
    if not base:
        remedy = "Load that model, and then penstock.integrations.peft.from_pretrained(model, path)"
        raise ConfigError(
            f"{shown(place.weights)}: this is an adapter of peft that does not name its model. {remedy}",
            location=shown(place.weights),
            remedy=remedy,
        )
    return Found(base, locate(base, **hub), place)


def put_on(
    model: PreTrainedModel, place: Place, name: str, options: LoadOptions | None = None, **kwargs: Any
) -> dict[str, Any] | None:
    """Gives a model an adapter.

    Args:
        model: changed in place.
        place: the adapter's.
        name: what to call it.
        options: settings of the load.
        kwargs: what else the model's ``load_adapter`` takes.

    Returns:
        What transformers tells of the load, of those versions that do.
    """
    from peft import PeftConfig

    weights = open_weights(place, "adapter_model", options=options).load(device=model.device, options=options)
    settings = PeftConfig.from_pretrained(place.local)
    told = model.load_adapter(adapter_name=name, peft_config=settings, adapter_state_dict=weights, **kwargs)
    return told.to_dict() if hasattr(told, "to_dict") else None
