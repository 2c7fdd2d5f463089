"""transformers' own loader with its tensors from a ``TensorSource``, in the thread that loads.

Within ``supplied``, the files of one model are one lazy file that hands out tensors on the target device, wherever they
are stored. Which class to build, quantisation, renaming, generation and adapters stay transformers' business: it only
resolves and opens weight files here. Other models, other threads and files of adapters go to the originals.

transformers also reserves a model's worth of GPU memory before it asks for the first tensor, so that torch's allocator
serves the parameters from one piece. Penstock's tensors are the parameters, and are allocated while the model is still
being built; the reservation would come on top of them. Within ``unreserved`` there is none.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import MissingDependencyError
from penstock.integrations.safetensors.patching import adjust
from penstock.patches import Replacement
from penstock.safetensors import safe_open

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint
    from penstock.supply import TensorSource

FILE = "penstock/model.safetensors"
"""What transformers takes for the model's one file. There is none of this name."""


class _Model(NamedTuple):
    path: str
    checkpoint: Checkpoint
    source: TensorSource


_here = threading.local()


@contextmanager
def supplied(path: str, checkpoint: Checkpoint, source: TensorSource) -> Iterator[None]:
    """While this is active, the model of ``path`` that this thread loads has the tensors of ``source``.

    Args:
        path: the directory that transformers is given.
        checkpoint: the model's weights.
        source: delivers them.

    Raises:
        MissingDependencyError: transformers has other functions for that than those that are known.
    """
    from transformers import modeling_utils

    # Imported by transformers when a model is quantised so, and not before.
    torchao = sys.modules.get("transformers.quantizers.quantizer_torchao")
    modules = [modeling_utils] if torchao is None else [modeling_utils, torchao]
    with ExitStack() as entered:
        for module in modules:
            entered.callback(adjust, module)
        known = [entered.enter_context(one.on(modeling_utils)) for one in (_RESOLVING, _OPENING)]
        if not all(known):
            cause = "this transformers finds or opens weight files by functions of other names"
            remedy = "Use its own from_pretrained within penstock.patch_safetensors, or another version"
            raise MissingDependencyError(cause=cause, remedy=remedy)
        if torchao is not None:
            entered.enter_context(_TORCHAO.on(torchao))
        before = getattr(_here, "model", None)
        _here.model = _Model(path, checkpoint, source)
        try:
            yield
        finally:
            _here.model = before


@contextmanager
def unreserved() -> Iterator[bool]:
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


def _reserving(original: Callable[..., Any]) -> Callable[..., Any]:
    def reserve(*arguments: Any, **keywords: Any) -> Any:
        return None if getattr(_here, "depth", 0) else original(*arguments, **keywords)

    return reserve


def _resolving(original: Callable[..., Any]) -> Callable[..., Any]:
    def resolve(*arguments: Any, **keywords: Any) -> Any:
        model: _Model | None = getattr(_here, "model", None)
        named = str(keywords.get("transformers_explicit_filename"))
        if model is None or keywords.get("pretrained_model_name_or_path") != model.path or "adapter_model" in named:
            return original(*arguments, **keywords)
        return [FILE], None

    return resolve


def _opening(original: Callable[..., Any]) -> Callable[..., Any]:
    def open_file(filename: Any, *arguments: Any, **keywords: Any) -> Any:
        model: _Model | None = getattr(_here, "model", None)
        if model is None or filename != FILE:
            return original(filename, *arguments, **keywords)
        return safe_open.of_source(model.checkpoint, model.source)

    return open_file


_RESERVING = Replacement("transformers.modeling_utils.caching_allocator_warmup", _reserving)
_RESOLVING = Replacement("transformers.modeling_utils._get_resolved_checkpoint_files", _resolving)
_OPENING = Replacement("transformers.modeling_utils.safe_open", _opening)
_TORCHAO = Replacement("transformers.quantizers.quantizer_torchao.safe_open", _opening)
