"""vLLM's key of compiled graphs, without where the model lies: what was compiled for a directory serves a bucket.

The key of vLLM has the name or path of the model besides its whole configuration (``hf_config``), which stays in it.
For starts of ``penstock run --start-cache`` alone. A quantised model keeps its location in the key: some methods make
constants of numbers in the checkpoint, and two checkpoints may share a configuration.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from penstock.patches import replace_for_good


def register() -> None:
    """Has vLLM compute the key so; once.

    Raises:
        ImportError, AttributeError: this vLLM computes it in another way. Nothing was changed then.
    """
    from vllm.config import ModelConfig

    replace_for_good(ModelConfig, "vllm.config.ModelConfig.compute_hash", _hashing)


def _hashing(original: Any) -> Any:
    """Around ``ModelConfig.compute_hash``."""

    @functools.wraps(original)
    def compute_hash(self: Any) -> Any:
        if getattr(self, "quantization", None) is not None or getattr(self, "hf_config", None) is None:
            return original(self)
        elsewhere = copy.copy(self)
        elsewhere.model = ""
        if getattr(elsewhere, "model_weights", None):
            elsewhere.model_weights = ""
        return original(elsewhere)

    return compute_hash
