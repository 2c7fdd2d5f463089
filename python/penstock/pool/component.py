"""A component: tensors of a module that travel together, their master, and their copy on the device.

A component has one master and one copy, however many models use it. Modules are *bound* to it: their parameters and
buffers are views of its slabs, and are rebound in place when it moves, so that optimisers, hooks and compiled code
go on with the objects that they know. Knows no budget and takes no lock: the pool calls it with its own held.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import DestinationError
from penstock.pool.layout import Layout, Place, layout_of

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint

_numbers = itertools.count(1)


def named_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a module, each once, in the order of its modules."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        found.setdefault(id(tensor), (name, tensor))
    return list(found.values())


class Component:
    """Tensors that travel together."""

    def __init__(self, name: str, layout: Layout, source: Source | None) -> None:
        self.name, self.layout, self.source = name, layout, source
        self.number = next(_numbers)
        self.host: torch.Tensor | None = None
        """The master, or None while it has to be fetched again."""
        self.device: torch.Tensor | None = None
        self.kept: dict[int, torch.Tensor] = {}
        """Tensors that no checkpoint holds, by number: buffers as construction left them, and changed ones."""
        self.bound: list[Bound] = []
        self.read_seconds: float | None = None
        """What fetching it took last."""
        self.points: list[Any] = []
        """Work on the device that may still use its copy."""

    def __repr__(self) -> str:
        return f"{self.name} ({self.number})"

    @property
    def nbytes(self) -> int:
        """Bytes of a slab of it."""
        return self.layout.nbytes

    def fill(self, slab: torch.Tensor) -> None:
        """Brings its tensors from storage to a slab, of host memory or of the device.

        Raises:
            PenstockError: what the checkpoint's load raises; the slab's content is undefined then.
        """
        self._read(dict(enumerate(self.layout.views(slab))))

    def restore(self, views: Mapping[int, torch.Tensor]) -> None:
        """Gives views the values of the tensors of these numbers, from the master or from storage."""
        if self.host is None:
            self._read(views)
            return
        for number, view in views.items():
            view.copy_(self.layout.places[number].of(self.host))

    def _read(self, views: Mapping[int, torch.Tensor]) -> None:
        if self.source is None:
            raise AssertionError(f"{self} comes from nowhere")
        self.source.read({number: view for number, view in views.items() if number not in self.kept})
        for number, view in views.items():
            if number in self.kept:
                view.copy_(self.kept[number])

    def master(self) -> torch.Tensor:
        """The master, which must be there."""
        if self.host is None:
            raise AssertionError(f"{self} has no master")
        return self.host

    def rebind(self) -> None:
        """Points every module at the copy on the device, at the master where there is none, or at no memory."""
        for bound in self.bound:
            self.rebind_one(bound)

    def rebind_one(self, bound: Bound) -> None:
        """As ``rebind``, of one module."""
        bound.to(self.layout, self.host if self.device is None else self.device)

    def is_equal(self, other: Component) -> bool:
        """Whether the other holds the same tensors: of the same versions of the same files, and the same buffers."""
        if self.source is None or other.source is None or self.layout != other.layout:
            return False
        if self.source.identity != other.source.identity or self.kept.keys() != other.kept.keys():
            return False
        return all(_same_bits(value, other.kept[number]) for number, value in self.kept.items())


class Bound:
    """The tensors of a module, in the order of its component's layout."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.tensors = [tensor for _, tensor in named_tensors(module)]
        numbers = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self._places: list[tuple[dict[str, Any], str, int]] = [
            (owned, name, numbers[id(tensor)])
            for part in module.modules()
            for owned in (part._parameters, part._buffers)
            for name, tensor in owned.items()
            if tensor is not None
        ]
        self._versions: list[int] = []

    def to(self, layout: Layout, slab: torch.Tensor | None) -> None:
        """Makes the tensors views of a slab; of none, tensors without memory, whose use torch refuses."""
        for number, (tensor, place) in enumerate(zip(self.tensors, layout.places, strict=True)):
            if slab is not None and not tensor.is_meta:
                tensor.data = place.of(slab)
            elif slab is not None or not tensor.is_meta:
                # torch lets no tensor change between having memory and having none: another takes its place.
                self.tensors[number] = _like(tensor, _without_memory(place) if slab is None else place.of(slab))
        for owned, name, number in self._places:
            owned[name] = self.tensors[number]
        self.seen()

    def written(self) -> list[int]:
        """Numbers of the tensors that were written to in place since they were bound, or seen."""
        return [number for number, tensor in enumerate(self.tensors) if _version(tensor) != self._versions[number]]

    def seen(self) -> None:
        """Takes what was written so far as known."""
        self._versions = [_version(tensor) for tensor in self.tensors]


def _without_memory(place: Place) -> torch.Tensor:
    return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="meta")


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A tensor of that memory, which is a parameter where ``tensor`` is one, with its attributes."""
    if not isinstance(tensor, torch.nn.Parameter):
        return memory
    made = torch.nn.Parameter(memory, requires_grad=tensor.requires_grad and memory.is_floating_point())
    if type(tensor) is not torch.nn.Parameter:
        made.__class__ = type(tensor)
    made.__dict__.update(tensor.__dict__)
    return made


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Source:
    """Where a component's tensors come from: a checkpoint, and which of its tensors goes where."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, int]) -> None:
        self.checkpoint, self.names = checkpoint, dict(names)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells its content without reading it: the versions of its files, and which tensor goes where."""
        return self.checkpoint.core.fingerprint(), tuple(sorted(self.names.items()))

    def read(self, views: Mapping[int, torch.Tensor]) -> None:
        """Reads the tensors of these numbers to these.

        Raises:
            PenstockError: as ``Checkpoint.load_into``.
        """
        into = {name: views[number] for name, number in self.names.items() if number in views}
        if into:
            self.checkpoint.load_into(into, names=list(into))


def adopted(name: str, module: torch.nn.Module) -> tuple[Component, Bound]:
    """A component of a module that is built, which keeps its memory until ``take_over``.

    Raises:
        DestinationError: for tensors without plain memory.
    """
    bound = Bound(module)
    named = named_tensors(module)
    for of, tensor in named:
        if tensor.is_meta:
            cause = "it is on the meta device, so there is nothing to adopt"
            raise DestinationError(tensor=of, cause=cause, remedy="Register the model with its checkpoint")
    return Component(name, layout_of(named), None), bound


def take_over(component: Component, bound: Bound, slab: torch.Tensor) -> None:
    """Moves a module's tensors to a slab, which becomes the master, one by one."""
    for number, place in enumerate(component.layout.places):
        tensor, view = bound.tensors[number], place.of(slab)
        view.copy_(tensor.detach())
        # Its old memory is free from here on, unless another tensor shares it.
        tensor.data = view
    component.host = slab
    component.bound.append(bound)
    bound.to(component.layout, slab)


def built(name: str, build: Callable[[], Any], checkpoint: Checkpoint, dtype: Any) -> tuple[Component, Bound]:
    """A component of a checkpoint, and the module that a function builds for it without memory.

    Raises:
        DestinationError: where the function builds no module, or one whose shapes differ from the checkpoint's.
        TensorNotFoundError: where names differ.
        Exception: what the function raises.
    """
    from penstock.model import no_init
    from penstock.state import IncompatibleKeys, report, report_misfits, state_of

    with no_init():
        module = build()
    if not isinstance(module, torch.nn.Module):
        cause = f"what was to build it returned a {type(module).__name__}"
        raise DestinationError(f"component {name!r}: {cause}", cause=cause, remedy="Return a torch.nn.Module")
    owner, tensors, aliases = state_of(module)
    stored = set(checkpoint.keys())
    missing = [one for one in tensors if stored.isdisjoint(aliases[one])]
    report(owner, IncompatibleKeys(missing, [one for one in stored if one not in tensors]))
    named = named_tensors(module)
    numbers = {id(tensor): number for number, (_, tensor) in enumerate(named)}
    misfits = []
    for one in stored:
        has, wants = tuple(tensors[one].shape), tuple(checkpoint[one].shape)
        if has != wants:
            cause = f"size mismatch: the checkpoint's shape is {list(wants)}, the model's {list(has)}"
            misfits.append(DestinationError(tensor=one, cause=cause, remedy="Build it with the checkpoint's sizes"))
    report_misfits(owner, misfits)
    source_names: dict[int, str] = {}
    for one in stored:
        source_names.setdefault(numbers[id(tensors[one])], one)
    kept = {
        number: tensor.detach().to("cpu", copy=True)
        for number, (_, tensor) in enumerate(named)
        if number not in source_names
    }
    templates = [
        (of, _typed(tensor, checkpoint, source_names.get(number), dtype)) for number, (of, tensor) in enumerate(named)
    ]
    source = Source(checkpoint, {stored_name: number for number, stored_name in source_names.items()})
    component = Component(name, layout_of(templates), source)
    component.kept = kept
    return component, Bound(module)


def _typed(tensor: torch.Tensor, checkpoint: Checkpoint, stored: str | None, dtype: Any) -> torch.Tensor:
    """A tensor without memory of the shape of a module's, and of the dtype that it will have."""
    if stored is None:
        return tensor.detach().to("meta") if tensor.device.type != "meta" else tensor
    from penstock.frameworks.torch import DTYPES

    becomes = DTYPES.get(checkpoint[stored].dtype, tensor.dtype)
    if dtype is not None and becomes.is_floating_point:
        becomes = dtype
    return torch.empty(tuple(tensor.shape), dtype=becomes, device="meta")
