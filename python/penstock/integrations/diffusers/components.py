"""The components of a pipeline of diffusers, and how each gets its weights.

Models of diffusers are built by their own ``from_config`` without memory and get their tensors from
``penstock.model.place``; text encoders come through ``integrations.transformers``. What is neither, diffusers loads
itself: quantised components, weights that are pickles, classes that are replaced while they load.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from penstock._native import LoadOptions
from penstock.arguments import is_url
from penstock.errors import LocationNotFoundError
from penstock.integrations.diffusers.together import Together
from penstock.integrations.shared.files import Place, open_weights
from penstock.integrations.transformers import models as of_transformers
from penstock.model import no_init, place

if TYPE_CHECKING:
    import torch

    from penstock.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

Built = Callable[[], Any]
"""Waits for a component that is being loaded, and returns it."""


def begin(
    component: Any,
    where: Place,
    together: Together,
    device: str,
    dtype: torch.dtype | None,
    variant: str | None = None,
    options: LoadOptions | None = None,
    *,
    of_pipeline: bool = True,
    **kwargs: Any,
) -> Built | None:
    """Prepares a component's load. None for what diffusers has to load.

    Args:
        component: its class.
        where: its directory.
        together: runs the load.
        device: ``"cpu"`` or ``"cuda:N"``.
        dtype, variant: as for diffusers.
        options: settings of the load.
        of_pipeline: whether it is part of a pipeline, of which components without the variant are loaded without it.
        kwargs: for its configuration.
    """
    from diffusers import ModelMixin

    is_diffusers = issubclass(component, ModelMixin)
    stem = "diffusion_pytorch_model" if is_diffusers else "model"
    checkpoint = _weights(where, stem, variant, options, of_pipeline=of_pipeline)
    if checkpoint is None:
        return None
    if is_diffusers:
        return _begin_model(component, where, checkpoint, together, device, dtype, options, kwargs)
    together.expect(checkpoint)

    def encoder() -> Any:
        # Not read at the side: transformers builds it in the same call, which is not for several threads at once.
        progress = together.share()
        return of_transformers.load(
            component,
            where,
            lambda _: checkpoint,
            name=where.local,
            device=device,
            dtype=dtype,
            progress=progress,
            **kwargs,
        )

    return encoder


def class_of(library: str | None, name: str | None) -> type | None:
    """The class of a component that has weights: a model of diffusers or of transformers. None for anything else."""
    if library is None or name is None:
        return None
    import diffusers
    import transformers
    from diffusers import pipelines

    known = {"diffusers": diffusers, "transformers": transformers}
    cls = getattr(getattr(pipelines, library, known.get(library)), name, None)
    models = (diffusers.ModelMixin, transformers.PreTrainedModel)
    return cls if isinstance(cls, type) and issubclass(cls, models) else None


def _weights(
    where: Place, stem: str, variant: str | None, options: LoadOptions | None, *, of_pipeline: bool
) -> Checkpoint | None:
    """The weights of a component: of the variant if there are such; None where diffusers has to look for others."""
    if variant and of_pipeline:
        # As in diffusers, a component of a pipeline that has not the variant is loaded without it. A model is not.
        with suppress(LocationNotFoundError):
            return open_weights(where, stem, variant, options)
        variant = None
    try:
        return open_weights(where, stem, variant, options)
    except LocationNotFoundError as error:
        if is_url(where.weights):
            raise  # diffusers reads local files
        logger.debug("left to diffusers: %s", error)
        return None


def _begin_model(
    cls: Any,
    where: Place,
    checkpoint: Checkpoint,
    together: Together,
    device: str,
    dtype: torch.dtype | None,
    options: LoadOptions | None,
    kwargs: dict[str, Any],
) -> Built | None:
    import torch
    from diffusers.models.modeling_utils import LegacyModelMixin

    settings, unused = cls.load_config(where.local, return_unused_kwargs=True, **kwargs)
    eight_bits = dtype is not None and dtype.itemsize == 1
    if settings.get("quantization_config") or eight_bits or issubclass(cls, LegacyModelMixin):
        return None
    with _default_dtype(dtype), no_init():
        model = cls.from_config(settings, **unused)
    stored = {name: name for name in checkpoint}
    if len(checkpoint.files) == 1:
        # Names of old checkpoints, which are always one file.
        model._fix_state_dict_keys_on_load(stored)
    renamed = {old: new for new, old in stored.items() if old != new}
    built_as: dict[str, torch.dtype] = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    kept = cls._keep_in_fp32_modules or []
    kept = kept if isinstance(kept, list) else [kept]

    def becomes(name: str) -> torch.dtype:
        if dtype is None:
            return built_as[name]
        return torch.float32 if any(part in name.split(".") for part in kept) else dtype

    def read() -> None:
        progress = together.share()
        keys = place(
            model, checkpoint, device, dtype=becomes, renamed=renamed, strict=False, progress=progress, options=options
        )
        ignored = cls._keys_to_ignore_on_load_unexpected or []
        unused = [name for name in keys.unexpected_keys if not any(re.search(one, name) for one in ignored)]
        if unused:
            logger.warning("%s: %s does not use these weights: %s", where.local, cls.__name__, unused)

    together.expect(checkpoint)
    done = together.also(read)

    def finished() -> Any:
        done.result()
        model.register_to_config(_name_or_path=where.local)
        return model.eval()

    return finished


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """What a constructor computes buffers in: the dtype that the model is to have, as with diffusers."""
    import torch

    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
