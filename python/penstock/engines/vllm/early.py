"""Reading ahead from the moment vLLM has its configuration: while it starts processes and builds the model.

Files on a local disk or a file server only, and only where the machine needs all of them: not for the stages of a
pipeline.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.logger import init_logger

import penstock
from penstock.engines import early
from penstock.engines.files import is_url
from penstock.engines.vllm import FORMAT

# Under vLLM's own name, so that vLLM's handlers show what is logged.
logger = init_logger("vllm.penstock")


def register() -> None:
    """Has vLLM's configuration begin with it when it is made; once."""
    from vllm.config import VllmConfig

    original = VllmConfig.try_verify_and_update_config
    if hasattr(original, "_penstock_early"):
        return

    @functools.wraps(original)
    def verify(self: Any) -> None:
        original(self)
        early.at_start("vLLM", functools.partial(_opened, self), logger)

    verify._penstock_early = True  # type: ignore[attr-defined]
    VllmConfig.try_verify_and_update_config = verify


def _opened(config: Any) -> penstock.Checkpoint | None:
    """The files of a configuration's model, if they are to be read ahead."""
    from penstock.engines.vllm.loader import PenstockModelLoader

    model, load = config.model_config, config.load_config
    if load.load_format != FORMAT or config.parallel_config.pipeline_parallel_size > 1:
        return None
    if is_url(model.model) or getattr(model, "model_weights", None):
        return None
    directory = early.here(model.model, model.revision, load.download_dir)
    return PenstockModelLoader(load).open_files(directory, model)
