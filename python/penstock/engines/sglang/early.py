"""Reading ahead from the moment SGLang has its settings: while it starts processes and builds the model.

Files on a local disk or a file server only, and only where the machine needs all of them: not for the stages of a
pipeline, nor for a server of several machines.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from typing import Any

import penstock
from penstock.engines import early
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
    previous(server_args)
    early.at_start("SGLang", functools.partial(_opened, server_args), logger)


def _opened(server_args: Any) -> penstock.Checkpoint | None:
    """The files of a server's model, if they are to be read ahead."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.utils.runai_utils import is_runai_obj_uri

    settings = resolving_view(server_args)
    if str(settings.load_format).lower() != FORMAT or settings.pp_size > 1 or settings.nnodes > 1:
        return None
    if is_runai_obj_uri(settings.model_path):
        return None
    directory = early.here(settings.model_path, settings.revision, settings.download_dir)
    extra = settings.model_loader_extra_config
    # JSON until somebody reads it.
    options = Options.of((json.loads(extra) if isinstance(extra, str) else extra) or {})
    return penstock.open(directory, config=options.config())
