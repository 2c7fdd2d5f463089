"""Adapters of peft that lie in a model's directory, or in its place.

transformers takes both for a model with the adapter on it. An adapter beside its model it finds by itself. One that
lies alone names its model, which may be anywhere; that is loaded first, then the adapter by the model's own
``load_adapter``. For a ``PeftModel`` around a model there is ``integrations.peft``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from penstock._native import shown
from penstock.errors import ConfigError
from penstock.integrations.shared.files import Place, locate
from penstock.optional import is_installed, required

_SETTINGS = "adapter_config.json"


class Found(NamedTuple):
    """What lies in a place that was asked for."""

    name: str
    """What the model is called by."""
    model: Place
    alone: bool
    """Whether the place holds an adapter, and the model lies elsewhere."""


def look(name: str, place: Place, *, has_config: bool, hub: dict[str, Any]) -> Found:
    """Tells a model from an adapter that names its model, and has the adapter's weights on the local disk.

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
        return Found(name, place, alone=False)
    alone = not (place.holds("config.json") or has_config)
    if alone:
        required("peft", by="penstock.integrations.transformers")
    # Like transformers, which does not look for adapters where peft is absent.
    if is_installed("peft"):
        place.bring_adapter()
    if not alone:
        return Found(name, place, alone=False)
    base = json.loads(Path(place.local, _SETTINGS).read_text()).get("base_model_name_or_path")
    if not base:
        remedy = "Load that model, and then penstock.integrations.peft.from_pretrained(model, path)"
        cause = "this is an adapter of peft that does not name its model"
        raise ConfigError(location=shown(place.weights), cause=cause, remedy=remedy)
    return Found(base, locate(base, **hub), alone=True)
