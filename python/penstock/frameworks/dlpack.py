"""Everything that takes DLPack: JAX by name, any other library through the protocol."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock._native import HostArray
from penstock.arguments import no_dtype, no_floating_dtype
from penstock.errors import SelectionError
from penstock.frameworks.base import HostOnly, dtypes_to_cast
from penstock.tensor_info import TensorInfo


class DLPack(HostOnly):
    """See ``Framework``. Tensors are ``HostArray``: they have ``__dlpack__``, an address, a dtype and a shape."""

    name = "dlpack"

    def adopt(self, array: HostArray) -> Any:
        return array

    def check_cast(self, tensors: Iterable[TensorInfo], dtype: Any) -> None:
        self.floating_dtype(dtype)
        dtypes_to_cast(tensors)

    def floating_dtype(self, dtype: Any) -> Any:
        raise SelectionError(f"dtype={dtype!r}: framework {self.name!r} does not convert; do so in your library")

    def cast(self, tensor: Any, dtype: Any) -> Any:
        return self.floating_dtype(dtype)

    def index(self, tensor: Any, index: tuple[int | slice, ...]) -> Any:
        raise SelectionError(f"framework {self.name!r} reads ranges only, no integer indices and no steps: {index!r}")


class Jax(DLPack):
    """JAX on the CPU. JAX's arrays are immutable; where its alignment rules allow, they share the memory."""

    name = "jax"

    def __init__(self) -> None:
        import jax

        self._jax = jax

    def adopt(self, array: HostArray) -> Any:
        from penstock.frameworks.numpy import Numpy

        # Through numpy where DLPack has no word for the dtype (FP8); ml_dtypes comes with JAX.
        try:
            return self._jax.dlpack.from_dlpack(array)
        except (BufferError, TypeError, ValueError, RuntimeError):
            return self._jax.numpy.asarray(Numpy().adopt(array))

    def floating_dtype(self, dtype: Any) -> Any:
        try:
            wanted = self._jax.numpy.dtype(dtype)
        except TypeError as error:
            raise no_dtype(dtype, "jax") from error
        if not self._jax.numpy.issubdtype(wanted, self._jax.numpy.inexact):
            raise no_floating_dtype(dtype)
        return wanted

    def cast(self, tensor: Any, dtype: Any) -> Any:
        wanted = self.floating_dtype(dtype)
        floating = self._jax.numpy.issubdtype(tensor.dtype, self._jax.numpy.floating)
        return tensor.astype(wanted) if floating else tensor

    def index(self, tensor: Any, index: tuple[int | slice, ...]) -> Any:
        return tensor[index]
