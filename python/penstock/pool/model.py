"""A model of a pool: what a name stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock.pool.adapters.choice import OfModel
from penstock.pool.bound import Bound
from penstock.pool.component import Component


@dataclass(eq=False)
class Model:
    """Modules by the names of their components. A module may be there under several names."""

    name: str
    bounds: dict[str, Bound]
    whole: Any = None
    """The pipeline or module that was adopted."""
    gone: bool = False
    adapters: OfModel = field(default_factory=OfModel)

    @property
    def modules(self) -> list[Bound]:
        """Each once, in their order."""
        return list(dict.fromkeys(self.bounds.values()))

    @property
    def components(self) -> list[Component]:
        """Each once, in the order of the modules: those that they are bound to now."""
        return list(dict.fromkeys(bound.component for bound in self.bounds.values()))

    def current(self) -> list[Bound]:
        """As ``modules``.

        Raises:
            ConfigError: where the model was unloaded.
        """
        if self.gone:
            raise ConfigError(cause=f"model {self.name!r} was unloaded meanwhile")
        return self.modules


def modules_of(model: Any) -> dict[str, torch.nn.Module]:
    """The modules of a module, or of a pipeline with components.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(model, torch.nn.Module):
        return {"model": model}
    components = getattr(model, "components", None)
    if isinstance(components, Mapping):
        found = {name: part for name, part in components.items() if isinstance(part, torch.nn.Module)}
        if found:
            return found
    cause = f"a {type(model).__name__} is neither a torch.nn.Module nor a pipeline with components that are"
    raise ConfigError(cause=cause, remedy="Adopt its modules one by one")
