"""Components whose linear layers have float8 weights: converted on the way from storage, or stored so.

What is converted is read to the pool's device in bounded memory, a tensor at a time, rounded there, and copied to where
the component is wanted. Its master and its copy are float8, so they have half the bytes.

Promises that a component is the same bits wherever it was converted, and that its layout is known before its weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import ConfigError, InsufficientMemoryError
from penstock.fp8.layers import Fp8, chosen, refused, replace, scheme_of, tied
from penstock.fp8.linear import Float8Linear
from penstock.fp8.numbers import FLOAT8, TensorError, quantise, shape_of_scale
from penstock.pool.bound import Bound
from penstock.pool.component import Derived, Stored, Watch
from penstock.pool.memory import Memory

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

Placed = tuple[torch.Tensor, torch.Tensor]
"""The float8 weight of layers, and its scales."""


class Converted(Stored):
    """A checkpoint of which some tensors become float8."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Mapping[str, int],
        becomes: Mapping[str, tuple[int, int, torch.dtype]],
        scheme: Fp8,
        memory: Memory,
    ) -> None:
        """With which tensor goes where as it is, and which to what weight and scales, from which dtype."""
        super().__init__(checkpoint, names)
        self.becomes, self.scheme, self._memory = dict(becomes), scheme, memory
        self.errors: dict[str, TensorError] = {}
        """Of those that have been read, by their names in the checkpoint."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """As of a checkpoint, with what becomes float8 and how."""
        becomes = ((name, weight, scale, str(dtype)) for name, (weight, scale, dtype) in self.becomes.items())
        return (*super().identity, self.scheme.scales, tuple(sorted(becomes)))

    def read(self, views: Mapping[int, torch.Tensor], watch: Watch) -> None:
        """As of a checkpoint.

        Raises:
            PenstockError: as ``Checkpoint.load_into`` and ``Checkpoint.stream``.
        """
        super().read(views, watch)
        wanted = [name for name, (*numbers, _) in self.becomes.items() if not views.keys().isdisjoint(numbers)]
        memory = self._memory
        try:
            self._convert(wanted, views, memory.device, watch)
        except InsufficientMemoryError:
            if not memory.is_gpu or any(view.device.type != "cpu" for view in views.values()):
                raise
            # A master does not need the device, only the time that it saves.
            self._convert(wanted, views, torch.device("cpu"), watch)

    def _convert(self, names: list[str], views: Mapping[int, torch.Tensor], device: torch.device, watch: Watch) -> None:
        if not names:
            return
        with self._memory.working():
            stream: Any = self.checkpoint.stream(names, device=device, progress=watch)
            with closing(stream):
                for name, tensor in stream:
                    self._round(name, tensor, views)
                    # Its memory may serve the next one.
                    del tensor

    def _round(self, name: str, tensor: torch.Tensor, views: Mapping[int, torch.Tensor]) -> None:
        weight, scale, dtype = self.becomes[name]
        stored, scales = views.get(weight), views.get(scale)
        # Where one of them is not wanted, it is made all the same.
        if stored is None:
            stored = torch.empty(tensor.shape, dtype=FLOAT8, device=tensor.device)
        if scales is None:
            shape = shape_of_scale(tensor.shape[0], self.scheme.scales)
            scales = torch.empty(shape, dtype=torch.float32, device=tensor.device)
        error = self.errors[name] = quantise(tensor.to(dtype), stored, scales)
        if error.not_finite:
            cause = f"{error.not_finite} of its numbers are not finite, and are NaN in FP8"
            logger.warning("%s: tensor %r: %s", self.checkpoint[name].location, name, cause)


def schemes_of(given: Any, components: Mapping[str, Any]) -> dict[str, Fp8]:
    """What ``quantize=`` means for each component.

    Raises:
        ConfigError: for a component that is not there, and what is no way to quantise.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return dict.fromkeys(components, scheme_of(given))
    for of in given:
        if of not in components:
            cause = f"quantize= names a component {of!r}, which is not one of {', '.join(map(repr, components))}"
            raise ConfigError(cause=cause)
    return {of: scheme_of(scheme) for of, scheme in given.items() if scheme is not None}


def check_converted(name: str, given: Any, schemes: Mapping[str, Fp8], made: Mapping[str, Bound]) -> None:
    """Refuses what was to be quantised where nothing could be: a component by name, or all of a model.

    Raises:
        ConfigError: then.
    """
    without = [of for of in schemes if not float8_layers(made[of].module)]
    if without and (isinstance(given, Mapping) or len(without) == len(made)):
        raise refused(f"component {without[0]!r} of {name!r}", made[without[0]].module, schemes[without[0]])


def float8_layers(module: torch.nn.Module) -> dict[str, Float8Linear]:
    """Those of a module that have float8 weights, by name."""
    return {of: layer for of, layer in module.named_modules() if isinstance(layer, Float8Linear)}


def make_float8(
    module: torch.nn.Module, scheme: Fp8, dtype_of: Callable[[torch.Tensor], torch.dtype], *, computes: bool
) -> dict[int, tuple[torch.dtype, Placed]]:
    """Gives a module without memory float8 weights, of which nothing is known yet.

    Returns:
        By the ``id`` of each old weight, its dtype, and what is in its place.
    """
    found = {}
    for _, group in tied(chosen(module, scheme, dtype_of)):
        weight = group[0].weight
        dtype, shape = dtype_of(weight), shape_of_scale(weight.shape[0], scheme.scales)
        found[id(weight)] = dtype, replace(group, shape, dtype, computes=computes)
    return found


def errors_of(source: Any) -> dict[str, TensorError]:
    """How far the tensors of a component's source are from the checkpoint's, as far as they were read."""
    source = source.of.source if isinstance(source, Derived) else source
    return dict(source.errors) if isinstance(source, Converted) else {}
