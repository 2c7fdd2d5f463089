"""LoRA beside a layer: a forward hook adds the low-rank product of the layer's input to its output.

A hook is what leaves a module as it is: its parameters, names, ``state_dict`` and class, which the pool and checkpoints
know. It works for every layer with a ``forward`` of one tensor. Hooks are put once on each layer that an
adapter is for; which adapters they add, with which weights, is one tuple for the whole module, so that a change is one
assignment. Outside of leases they do nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from penstock.errors import AdapterError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from penstock.pool.adapters.adapter import Adapter
    from penstock.pool.bound import Bound


class Branches:
    """The hooks of one module of a model."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._handles: dict[torch.nn.Module, RemovableHandle] = {}
        self.active: tuple[tuple[Adapter, float], ...] = ()
        """What is added, in this order."""
        self._hooked: set[Adapter] = set()
        """Adapters whose layers all have a hook."""

    def hook(self, adapter: Adapter) -> None:
        """Puts hooks on an adapter's layers that have none yet."""
        if adapter in self._hooked:
            return
        self._hooked.add(adapter)
        for layer in adapter.touches.get(self._bound, ()):
            if layer not in self._handles:
                self._handles[layer] = layer.register_forward_hook(self._add, with_kwargs=True)

    def forget(self, adapter: Adapter) -> None:
        """Drops what is known of an adapter. Hooks stay, for others."""
        self._hooked.discard(adapter)

    def remove(self) -> None:
        """Takes all hooks away."""
        self.active = ()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    def _add(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self.active or not self._bound.leases:
            return output
        x = args[0] if args else next(iter(kwargs.values()))
        result = output
        for adapter, weight in self.active:
            if not adapter.there:
                cause = f"{adapter} has left the device: changing adapters failed within the lease"
                raise AdapterError(cause=cause, remedy="Set the adapters again")
            branch = adapter.there.get(layer)
            if branch is not None:
                # As peft: in the adapter's precision.
                x = x.to(branch.down.dtype)
                result = result + _product(layer, x, branch.down, branch.up) * branch.part.factor(weight)
        return result if result is output else result.to(output.dtype)


def _product(layer: torch.nn.Module, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if isinstance(layer, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)):
        # With the layer's stride, padding and dilation.
        inner = layer._conv_forward(x, down, None)
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[down.dim() - 3]
        return convolve(inner, up)
    return functional.linear(functional.linear(x, down), up)
