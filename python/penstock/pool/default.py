"""The pool of a process for a device: what several libraries in one program share."""

from __future__ import annotations

import os
import threading
from typing import Any

from penstock.errors import ConfigError
from penstock.pool.pool import ModelPool

_pools: dict[str, ModelPool] = {}
_lock = threading.Lock()


def default_pool(device: Any = "cuda", **settings: Any) -> ModelPool:
    """The process's pool for a device, which is made by the first call. May be called from any thread.

    Args:
        device: as for ``ModelPool``.
        settings: what ``ModelPool`` takes besides. Only a call that makes the pool may give any.

    Raises:
        ConfigError: for settings of a pool that is there already.
        Exception: as ``ModelPool``.
    """
    from penstock.frameworks.torch import Torch

    where = Torch().device(device)
    with _lock:
        pool = _pools.get(where)
        if pool is None or pool.closed:
            pool = _pools[where] = ModelPool(where, **settings)
        elif settings:
            cause = f"the process has a pool for {where} already, so {', '.join(settings)} would be ignored"
            raise ConfigError(cause=cause, remedy="Give settings in the first call, or use pool.resize")
        return pool


def _in_child() -> None:
    """A forked child makes its own."""
    global _lock  # noqa: PLW0603 - it may be held by a thread that is not in the child
    _lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_in_child)
