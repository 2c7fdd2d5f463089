"""transformers reserves a model's worth of GPU memory before it asks for the first tensor; not so within ``none``.

The reservation makes torch's allocator serve the parameters from one piece. Penstock's tensors are the parameters, and
are allocated while the model is still being built; the reservation would come on top of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.patches import Replacement

_here = threading.local()


@contextmanager
def none() -> Iterator[bool]:
    """While this is active, models that this thread loads have no memory reserved for them. Other threads' have.

    Yields whether that is so: a transformers that has no such function, or not under that name, reserves as it does.
    """
    from transformers import modeling_utils

    with _RESERVING.on(modeling_utils) as exists:
        _here.depth = getattr(_here, "depth", 0) + 1
        try:
            yield exists
        finally:
            _here.depth -= 1


def _unless_here(original: Any) -> Any:
    def reserve(*arguments: Any, **keywords: Any) -> Any:
        return None if getattr(_here, "depth", 0) else original(*arguments, **keywords)

    return reserve


_RESERVING = Replacement("transformers.modeling_utils.caching_allocator_warmup", _unless_here)
