"""Reading ahead from the moment vLLM has its configuration: while it starts processes and builds the model.

Files on a local disk or a file server only, and only where the machine needs all of them: not for the stages of a
pipeline.
"""

from __future__ import annotations

import functools
import multiprocessing
from typing import Any

from vllm.logger import init_logger

from penstock.engines import early
from penstock.engines.files import is_url, locate

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
        try:
            _begin(self)
        except Exception as error:  # noqa: BLE001 - the load itself will say what is wrong
            logger.debug("nothing is read ahead: %s", error)

    verify._penstock_early = True  # type: ignore[attr-defined]
    VllmConfig.try_verify_and_update_config = verify


def _begin(config: Any) -> None:
    from penstock.engines.vllm.loader import PenstockModelLoader

    model, load = config.model_config, config.load_config
    if load.load_format != "penstock" or config.parallel_config.pipeline_parallel_size > 1:
        return
    # Processes that vLLM started: the one that started them has begun.
    if multiprocessing.parent_process() is not None:
        return
    if is_url(model.model) or getattr(model, "model_weights", None):
        return
    # What is not there yet is fetched when it is needed, by whoever needs it.
    place = locate(model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True)
    checkpoint = PenstockModelLoader(load).open_files(place.local, model)
    if early.begin(checkpoint):
        gb, where = checkpoint.nbytes / 1e9, checkpoint.storage
        logger.info("Penstock: reading ahead while vLLM starts: %.2f GB on %s", gb, where)
