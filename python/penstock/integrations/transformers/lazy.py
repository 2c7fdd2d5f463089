"""Values of a ``state_dict`` that are read when a library uses them.

A ``LazyTensor`` answers what can be answered from the header (shape, dtype) and reads its bytes, through the ``Supply``
that it belongs to, when it is indexed or moved. It has what transformers asks of safetensors' slices (version 5) and of
tensors (version 4), and no more: what else is asked of it is an ``AttributeError``, not a silently loaded tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from penstock.integrations.transformers.supply import Supply
    from penstock.integrations.transformers.views import Views
    from penstock.selection import Selection
    from penstock.tensor_info import TensorInfo


class LazyTensor:
    """A tensor of a checkpoint that is not read yet."""

    __slots__ = ("_info", "_supply")

    def __init__(self, supply: Supply | Views, info: TensorInfo) -> None:
        self._supply = supply
        self._info = info

    def __getitem__(self, selection: Selection) -> torch.Tensor:
        """The selected part: read now to memory of its own, or of a ``Views`` a view of the mapped file."""
        if _is_everything(selection):
            whole: torch.Tensor = self._supply.take(self._info.name)
            return whole
        part: torch.Tensor = self._supply.part(self._info.name, selection)
        return part

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The whole tensor, read now, as ``torch.Tensor.to`` converts it."""
        return self[...].to(*args, **kwargs)

    def get_shape(self) -> list[int]:
        """The shape, as safetensors' slices tell it."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """The dtype as the header spells it: ``"BF16"``."""
        return self._info.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape that the tensor will have."""
        import torch

        from penstock.frameworks.torch import torch_shape

        return torch.Size(torch_shape(self._info.dtype, self._info.shape))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the tensor will have."""
        from penstock.frameworks.torch import dtype_of

        return dtype_of(self._info.dtype)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._info.shape)

    def dim(self) -> int:
        """The number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        """Whether the dtype is one of floating-point numbers."""
        return self.dtype.is_floating_point

    def __repr__(self) -> str:
        return f"<LazyTensor {self._info.name}: {self._info.dtype} {list(self._info.shape)}>"


def _is_everything(selection: Selection) -> bool:
    items = selection if isinstance(selection, tuple) else (selection,)
    return all(item is Ellipsis or item == slice(None) for item in items)
