"""Models on object stores: ``vllm serve s3://bucket/model --load-format penstock``.

vLLM leaves models on object stores to loaders that it knows by name, and fetches their configuration and tokenizer by
the package ``runai_model_streamer``. It is made to take ``penstock`` too, and, where that package is absent, to fetch
with Penstock. Every other format is left as it is.
"""

from __future__ import annotations

import functools
from typing import Any

_SCHEMES = ("s3://", "gs://", "az://", "azure://", "abfss://", "https://", "http://", "hf://")


def is_url(location: str) -> bool:
    """Whether weights at ``location`` are read over the network."""
    return location.lower().startswith(_SCHEMES)


def register() -> None:
    """Wraps what has to be wrapped; once."""
    from vllm.config import VllmConfig
    from vllm.transformers_utils import runai_utils

    original = VllmConfig.try_verify_and_update_config
    if not hasattr(original, "_penstock"):

        @functools.wraps(original)
        def verify(self: Any) -> None:
            model_config, load_config = self.model_config, self.load_config
            weights = getattr(model_config, "model_weights", None)
            if load_config.load_format != "penstock" or not weights:
                original(self)
                return
            # It refuses weights on object stores for formats whose names it does not know.
            model_config.model_weights = ""
            try:
                original(self)
            finally:
                model_config.model_weights = weights

        verify._penstock = True  # type: ignore[attr-defined]
        VllmConfig.try_verify_and_update_config = verify

    if "placeholder" in type(runai_utils.runai_pull_files).__name__.lower():
        from penstock.engines import objects

        runai_utils.runai_pull_files = objects.pull
        runai_utils.runai_list_safetensors = objects.list_safetensors
