"""numpy: arrays over host memory, through the array interface, which keeps the memory's owner alive.

numpy itself has no BF16 and no FP8; the package ``ml_dtypes`` brings them (it is what JAX uses).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock._native import HostArray
from penstock.arguments import no_dtype, no_floating_dtype
from penstock.errors import MissingDependencyError, PenstockError, SelectionError
from penstock.frameworks.base import (
    DTYPES,
    Destination,
    HostOnly,
    Piece,
    destination_refused,
    dtypes_to_cast,
    of_other_dtype,
    of_other_library,
)
from penstock.tensor_info import TensorInfo

_ML_DTYPES = frozenset(name for name in DTYPES if name.startswith(("BF16", "F8")))
"""Those that numpy itself does not have."""
_FLOATS = frozenset(["F16", "F32", "F64", *_ML_DTYPES])


def dtype_of(name: str) -> np.dtype[Any]:
    """The numpy dtype for safetensors' ``name``.

    Raises:
        MissingDependencyError: for BF16 and FP8 where ml_dtypes is not installed.
        SelectionError: for dtypes that take less than a byte.
    """
    if name in DTYPES and name not in _ML_DTYPES:
        return np.dtype(DTYPES[name])
    if name not in DTYPES:
        cause = f"numpy has no dtype for {name}"
        raise SelectionError(f"{cause}. Load the tensor with framework='dlpack' for its bytes", cause=cause)
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"numpy has no dtype for {name}; the package ml_dtypes brings one. Install it (pip install ml_dtypes), or "
            "load with framework='pt'",
            cause=str(error),
            remedy="pip install ml_dtypes",
        ) from error
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, DTYPES[name]))
    return dtype


class _Memory:
    """Bytes for ``numpy.asarray``, which keeps this object, and so the memory, as the array's base."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, array: HostArray) -> None:
        self.owner = array
        self.__array_interface__ = {
            "data": (array.address, False),
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class Numpy(HostOnly):
    """See ``Framework``."""

    name = "numpy"

    def __init__(self) -> None:
        self._unresizable: list[weakref.ref[Any]] = []

    def adopt(self, array: HostArray) -> np.ndarray[Any, Any]:
        dtype = dtype_of(array.dtype)
        try:
            if array.nbytes == 0:
                return np.empty(array.shape, dtype)
            return np.asarray(_Memory(array)).view(dtype).reshape(array.shape)
        except ValueError as error:
            cause = f"numpy {np.__version__} has no arrays of {len(array.shape)} dimensions: {error}"
            remedy = "Load the tensor with framework='pt' or 'dlpack'"
            raise SelectionError(cause=cause, remedy=remedy) from error

    def empties(
        self, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], device: str
    ) -> tuple[list[Any], list[int]]:
        del device
        made = [np.empty(shape, dtype_of(dtype)) for dtype, shape in zip(dtypes, shapes, strict=True)]
        return made, [array.ctypes.data for array in made]

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def pieces(self, name: str, tensor: Any) -> list[Piece]:
        if not isinstance(tensor, np.ndarray):
            raise of_other_library(name, tensor, "numpy array")
        owner: Any = tensor
        while isinstance(owner, np.ndarray):
            # numpy resizes no array that has a weak reference, not even with refcheck=False.
            self._unresizable.append(weakref.ref(owner))
            owner = owner.base
        return [Piece((), tensor)]

    def destination(self, name: str, tensor: Any) -> Destination:
        if not isinstance(tensor, np.ndarray):
            raise of_other_library(name, tensor, "numpy array")
        if not tensor.flags.writeable:
            remedy = "Give memory that may be written to: a copy (array.copy()), or np.empty_like(array)"
            raise destination_refused(name, "the destination is read-only", remedy)
        dtype = dtype_name(tensor.dtype)
        if dtype is None:
            raise of_other_dtype(name, tensor.dtype)
        strides = None if tensor.flags.c_contiguous else tensor.strides
        return Destination(tensor.ctypes.data, tensor.nbytes, dtype, tensor.shape, "cpu", strides)

    def holds(self, memory: Any, address: int) -> bool:
        # `pieces` keeps numpy from resizing what a piece is of.
        return bool(memory.ctypes.data == address)

    def cannot_convert(self, dtype: str, memory: Any) -> str | None:
        try:
            self.put(np.empty(1, memory.dtype), np.zeros(1, dtype_of(dtype)))
        except (PenstockError, TypeError, ValueError) as error:
            return str(error)
        return None

    def put(self, memory: Any, value: Any) -> None:
        with np.errstate(all="ignore"):
            np.copyto(memory, value, casting="unsafe")

    def written(self, tensors: Sequence[Any]) -> None:
        pass

    def check_cast(self, tensors: Iterable[TensorInfo], dtype: Any) -> None:
        wanted = self.floating_dtype(dtype)
        for name in _FLOATS.intersection(dtypes_to_cast(tensors)):
            refused = self.cannot_convert(name, np.empty(1, wanted))
            if refused is not None:
                raise SelectionError(f"dtype={dtype!r}: {name} cannot be converted to it: {refused}", cause=refused)

    def floating_dtype(self, dtype: Any) -> np.dtype[Any]:
        named = dtype if isinstance(dtype, str) else ""
        # numpy knows the names of ml_dtypes, "bfloat16" among them, once that is imported.
        name = next((ours for ours in _ML_DTYPES if named == DTYPES[ours]), named)
        try:
            wanted = dtype_of(name) if name in DTYPES else np.dtype(dtype)
        except (TypeError, ValueError) as error:
            raise no_dtype(dtype, "numpy") from error
        if wanted.kind != "c" and dtype_name(wanted) not in _FLOATS:
            raise no_floating_dtype(dtype)
        return wanted

    def cast(self, tensor: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
        wanted = self.floating_dtype(dtype)
        if dtype_name(tensor.dtype) not in _FLOATS:
            return tensor
        with np.errstate(all="ignore"):
            return tensor.astype(wanted, copy=False)

    def index(self, tensor: np.ndarray[Any, Any], index: tuple[int | slice, ...]) -> Any:
        return np.array(tensor[index])


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """Safetensors' name for a numpy dtype of native byte order, or None."""
    return _NAMES.get(dtype.name) if dtype.isnative else None


_NAMES = {called: name for name, called in DTYPES.items()}
