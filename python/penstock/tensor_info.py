"""What a checkpoint says of one tensor. Indexing it reads the part: ``ckpt["w"][:1024]``.

Knows the checkpoint that it is of by one method, ``get_tensor``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock import _native
    from penstock.checkpoint import Checkpoint
    from penstock.selection import Selection


class TensorInfo:
    """A tensor of a checkpoint, as its header describes it. Nothing of it is read before it is indexed.

    Attributes:
        name: its name.
        dtype: its dtype, as the header spells it: ``"BF16"``.
        shape: its shape.
        nbytes: its bytes.
        location: the path or URL of the file that holds it.
        byte_range: (its first byte in the file, the one after its last).
    """

    __slots__ = ("_checkpoint", "_native")

    def __init__(self, native: _native.TensorInfo, checkpoint: Checkpoint) -> None:
        self._native = native
        self._checkpoint = checkpoint

    @property
    def name(self) -> str:
        return self._native.name

    @property
    def dtype(self) -> str:
        return self._native.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._native.shape

    @property
    def nbytes(self) -> int:
        return self._native.nbytes

    @property
    def location(self) -> str:
        return self._native.location

    @property
    def byte_range(self) -> tuple[int, int]:
        return self._native.byte_range

    def __len__(self) -> int:
        """Length of the first dimension.

        Raises:
            TypeError: for a tensor without dimensions.
        """
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        # Python would otherwise index 0, 1, …: a read for each row.
        raise TypeError("a TensorInfo is not iterated over: read the tensor with info[...], then iterate over that")

    __reversed__ = None

    def __getitem__(self, selection: Selection) -> Any:
        """Reads the selected part as a torch tensor on the CPU: integers, slices with positive steps, an ellipsis.

        ``info[...]`` reads the whole tensor. For another device, dtype or framework: ``checkpoint.get_tensor``.

        Raises:
            SelectionError: for what lies outside of the tensor, or is not understood.
            MissingDependencyError: torch is not installed.
            PenstockError: see ``Checkpoint.load``.
        """
        # Alone, `None` is not the whole tensor here: in a tuple it is refused like everything that is not understood.
        return self._checkpoint.get_tensor(self.name, (None,) if selection is None else selection)

    def __repr__(self) -> str:
        return repr(self._native)
