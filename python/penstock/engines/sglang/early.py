"""Reading ahead from the moment SGLang has its settings: while it starts processes and builds the model.

Files on a local disk or a file server only, and only where the machine needs all of them: not for the stages of a
pipeline, nor for a server of several machines.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
from collections.abc import Callable
from typing import Any

import penstock
from penstock.engines import early
from penstock.engines.files import locate
from penstock.engines.options import Options
from penstock.engines.sglang import FORMAT

logger = logging.getLogger(__name__)


def register() -> None:
    """Has SGLang begin with it when it knows which loader a model wants; once."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS, register_resolution_hook

    if _after_format not in _HOOKS.get("handle_load_format", ()):
        register_resolution_hook("handle_load_format")(_after_format)


def _after_format(server_args: Any, previous: Callable[[Any], None]) -> None:
    """``handle_load_format``."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.utils.runai_utils import is_runai_obj_uri

    previous(server_args)
    settings = resolving_view(server_args)
    # Processes that SGLang started: the one that started them has begun.
    if str(settings.load_format).lower() != FORMAT or multiprocessing.parent_process() is not None:
        return
    if settings.pp_size > 1 or settings.nnodes > 1 or is_runai_obj_uri(settings.model_path):
        return
    try:
        # What is not there yet is fetched when it is needed, by whoever needs it.
        hub = {"cache_dir": settings.download_dir, "local_files_only": True}
        place = locate(settings.model_path, revision=settings.revision, **hub)
        options = Options.of(_extra(settings.model_loader_extra_config))
        checkpoint = penstock.open(place.local, config=options.config())
        if early.begin(checkpoint):
            gb, where = checkpoint.nbytes / 1e9, checkpoint.storage
            logger.info("Penstock: reading ahead while SGLang starts: %.2f GB on %s", gb, where)
    except Exception as error:  # noqa: BLE001 - the load itself will say what is wrong
        logger.debug("nothing is read ahead: %s", error)


def _extra(given: Any) -> dict[str, Any]:
    """``--model-loader-extra-config`` is JSON until somebody reads it."""
    read = json.loads(given) if isinstance(given, str) else given
    return dict(read or {})
