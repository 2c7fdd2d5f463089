"""Models on object stores: ``vllm serve s3://bucket/model --load-format penstock``.

vLLM leaves models on object stores to loaders that it knows by name, and fetches their configuration and tokenizer by
the package ``runai_model_streamer``. For engines that ask for ``penstock``, and only for those, it accepts that format
too, and fetches with Penstock where that package is absent. With every other format each function replaced here calls
the original with the same arguments, so its result and its errors are vLLM's.

What is replaced, and when, is listed in ``penstock.patches``.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from penstock.integrations.shared.plugin import FORMAT
from penstock.patches import replace_for_good

_here = threading.local()


def register() -> None:
    """Has vLLM's engine arguments call ``install`` when their format is ours; once.

    Raises:
        ImportError, AttributeError: this vLLM lacks something that is to be replaced. Nothing was changed then.
    """
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.transformers_utils import runai_utils

    wanted = {
        EngineArgs: ("create_model_config", "create_engine_config"),
        VllmConfig: ("try_verify_and_update_config",),
        runai_utils: ("runai_pull_files", "runai_list_safetensors"),
    }
    for owner, names in wanted.items():
        for name in names:
            # getattr(module, name) of an absent package's placeholder is an object, so this imports nothing.
            getattr(owner, name)
    for name in wanted[EngineArgs]:
        replace_for_good(EngineArgs, f"vllm.engine.arg_utils.EngineArgs.{name}", _configuring)


def install() -> None:
    """Replaces what a model on an object store needs; once. For processes in which the format was chosen."""
    from vllm.config import VllmConfig
    from vllm.transformers_utils import runai_utils

    replace_for_good(VllmConfig, "vllm.config.VllmConfig.try_verify_and_update_config", _verifying)
    if "placeholder" in type(runai_utils.runai_pull_files).__name__.lower():
        for name, ours in (("runai_pull_files", "pull"), ("runai_list_safetensors", "list_safetensors")):
            target = f"vllm.transformers_utils.runai_utils.{name}"
            replace_for_good(runai_utils, target, functools.partial(_fetching, ours))


def _configuring(original: Any) -> Any:
    """Around the methods of ``EngineArgs`` that make configurations."""

    @functools.wraps(original)
    def configure(self: Any, *args: Any, **kwargs: Any) -> Any:
        if str(self.load_format).lower() != FORMAT:
            return original(self, *args, **kwargs)
        install()
        _here.depth = getattr(_here, "depth", 0) + 1
        try:
            return original(self, *args, **kwargs)
        finally:
            _here.depth -= 1

    return configure


def _fetching(ours: str, original: Any) -> Any:
    """In the place of a function of ``runai_model_streamer``, which is not installed."""

    def fetch(*args: Any, **kwargs: Any) -> Any:
        if not getattr(_here, "depth", 0):
            return original(*args, **kwargs)
        from penstock.integrations.shared import objects

        return getattr(objects, ours)(*args, **kwargs)

    return fetch


def _verifying(original: Any) -> Any:
    """Around ``try_verify_and_update_config``, which refuses object stores for formats whose names it does not know."""

    @functools.wraps(original)
    def verify(self: Any, *args: Any, **kwargs: Any) -> Any:
        model_config = self.model_config
        weights = getattr(model_config, "model_weights", None)
        if not weights or getattr(self.load_config, "load_format", None) != FORMAT:
            return original(self, *args, **kwargs)
        model_config.model_weights = ""
        try:
            return original(self, *args, **kwargs)
        finally:
            model_config.model_weights = weights

    return verify
