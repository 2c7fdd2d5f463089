"""One adapter of a model: its name, what is known of its content, what of it is in host memory and on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.pool.layout import Layout

if TYPE_CHECKING:
    import torch

    from penstock.arguments import AnyPath
    from penstock.pool.adapters.fitting import Part
    from penstock.pool.bound import Bound
    from penstock.pool.device_slab import PlainSlab
    from penstock.pool.model import Model


class Branch(NamedTuple):
    """The two matrices of a layer on the device."""

    down: torch.Tensor
    up: torch.Tensor
    part: Part


class Adapter:
    """Registered, it is a name and a location. The rest comes with its first use."""

    def __init__(
        self,
        model: Model,
        name: str,
        location: AnyPath,
        weight: float,
        *,
        component: str | None = None,
        strict: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.name, self.location, self.weight = model, name, location, weight
        self.component, self.strict, self.storage_options = component, strict, storage_options
        self.version: Any = None
        """Of its files, when they were read first."""
        self.touches: dict[Bound, dict[torch.nn.Module, int]] = {}
        """The layers that it is for, and the numbers of their weights, once it was read."""
        self.nbytes = 0
        self.read_seconds = 0.0
        self.layout: Layout | None = None
        self.parts: list[Part] = []
        """While ``host`` is there, which has their matrices."""
        self.host: torch.Tensor | None = None
        self.slab: PlainSlab | None = None
        self.there: dict[torch.nn.Module, Branch] = {}
        """By layer, while it is on the device."""
        self.is_busy = False
        """Whether a thread reads it, or copies it."""
        self.gone = False

    def __repr__(self) -> str:
        return f"adapter {self.name!r} of {self.model.name!r}"

    @property
    def is_known(self) -> bool:
        """Whether it was read, and found to fit."""
        return bool(self.touches)

    def drop_host(self) -> None:
        """Lets its bytes in host memory go, and what is known of them only."""
        self.host, self.layout, self.parts = None, None, []

    def matrices(self, part: Part, slab: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two matrices of a part in a slab of its bytes, while these are in host memory too."""
        if self.layout is None:
            raise AssertionError(f"{self} is not in host memory")
        down, up = self.layout.places[2 * part.index : 2 * part.index + 2]
        return down.of(slab), up.of(slab)
