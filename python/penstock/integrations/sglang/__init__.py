"""SGLang: ``sglang serve … --load-format penstock``.

SGLang finds ``register`` by its entry point (``sglang.srt.plugins``) in each of its processes. What the format does is
in ``loader``, how SGLang comes to know it in ``hooks``, what it has to know of object stores in ``stores``.
Importing this package imports nothing of SGLang.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.integrations.shared.plugin import Plugin

if TYPE_CHECKING:
    from penstock.recording import Statistics

PLUGIN = Plugin(
    engine="SGLang",
    distributions=("sglang",),
    oldest=(0, 5, 20),
    newest_tried=(0, 5, 23),
    logger=logging.getLogger(__name__),
)


def register() -> None:
    """Makes SGLang know the format. May be called any number of times; raises nothing.

    Where SGLang lacks what the format needs, or ``PENSTOCK_DISABLE`` is set, that is logged at DEBUG and SGLang goes on
    without it.
    """

    def set_up() -> None:
        from penstock.integrations.sglang import hooks, stores

        stores.register()
        hooks.register()

    PLUGIN.register(set_up)


def last_load() -> Statistics | None:
    """Figures of the latest load of this process by the format, or None."""
    return PLUGIN.last_load
