"""Checkpoints that torchao has quantised: transformers reads in the files' headers what their tensors are parts of.

Given a ``state_dict`` it has no files to look into, so it is told what the headers say, wherever they are.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from penstock.integrations.transformers.model_classes import quantisation
from penstock.patches import Replacement

_here = threading.local()


def is_of(config: Any) -> bool:
    """Whether a model's configuration says that its weights are quantised by torchao."""
    method = quantisation(config, "quant_method")
    return bool(getattr(method, "value", method) == "torchao")


@contextmanager
def told(headers: Mapping[str, str]) -> Iterator[None]:
    """While this is active, models of torchao's that this thread loads are made by these strings of the headers."""
    from transformers.quantizers import quantizer_torchao

    before = getattr(_here, "headers", None)
    with _PROCESSING.on(quantizer_torchao.TorchAoHfQuantizer):
        _here.headers = headers
        try:
            yield
        finally:
            _here.headers = before


def _with_headers(original: Any) -> Any:
    @functools.wraps(original)
    def process(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        known = getattr(_here, "headers", None)
        if known is not None:
            self.metadata = dict(known)
        return result

    return process


_PROCESSING = Replacement(
    "transformers.quantizers.quantizer_torchao.TorchAoHfQuantizer._process_model_before_weight_loading", _with_headers
)
