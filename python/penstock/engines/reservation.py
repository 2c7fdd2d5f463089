"""transformers reserves a model's worth of GPU memory before it asks for the first tensor; not so within ``none``.

The reservation makes torch's allocator serve the parameters from one piece. Penstock's tensors are the parameters, and
are allocated while the model is still being built; the reservation would come on top of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAME = "caching_allocator_warmup"

_lock = threading.Lock()
_users = 0
_original: Any = None
_here = threading.local()


@contextmanager
def none() -> Iterator[bool]:
    """While this is active, models that this thread loads have no memory reserved for them. Other threads' have.

    Yields whether that is so: a transformers that has no such function, or not under that name, reserves as it does.
    """
    from transformers import modeling_utils

    global _users, _original  # noqa: PLW0603 - the function is the whole process's, so is the count of its users
    with _lock:
        if not _users:
            _original = getattr(modeling_utils, NAME, None)
            if _original is not None:
                setattr(modeling_utils, NAME, _unless_here(_original))
        _users += 1
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield _original is not None
    finally:
        _here.depth -= 1
        with _lock:
            _users -= 1
            if not _users and _original is not None:
                setattr(modeling_utils, NAME, _original)


def _unless_here(original: Any) -> Any:
    def reserve(*arguments: Any, **keywords: Any) -> Any:
        return None if getattr(_here, "depth", 0) else original(*arguments, **keywords)

    return reserve
