"""What ``--model-loader-extra-config`` may hold for ``--load-format penstock`` in vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.integrations.shared.extra_config import ExtraConfig


@dataclass(frozen=True)
class VllmExtraConfig(ExtraConfig):
    """Settings of a load. None has to be set: each is found, or has a default that suits."""

    enable_weights_track: bool | None = None
    """Fail where a parameter got no weight; by default for models that are not quantised, as vLLM does."""
