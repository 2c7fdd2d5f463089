"""The interface to a tensor library, and the way to find one by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

from penstock._native import HostArray
from penstock.errors import ConfigError, DestinationError, DeviceError, MissingDependencyError, SelectionError
from penstock.tensor_info import TensorInfo

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""From safetensors' dtypes to what libraries call them."""


class Destination(NamedTuple):
    """Memory that a tensor is to be read into, as its framework describes it.

    Two destinations that are equal are tied: the same memory, seen in the same way.
    """

    address: int
    """Of the first element. Never 0 where there are elements."""
    nbytes: int
    """Bytes of the elements."""
    dtype: str
    """As safetensors spells it: ``"BF16"``."""
    shape: tuple[int, ...]
    device: str
    """``"cpu"`` or ``"cuda:N"``."""
    strides: tuple[int, ...] | None = None
    """In bytes, where bytes cannot be read there as they are: the memory is not contiguous. None where they can."""


class Piece(NamedTuple):
    """A box of a checkpoint's tensor, and the memory of this process that holds it."""

    ranges: tuple[tuple[int, int], ...]
    """``(start, end)`` for each of the first dimensions; the others are taken whole. Empty for the whole tensor."""
    memory: Any
    """A tensor of the box's shape. It keeps the memory, whatever becomes of the tensor that the caller gave."""


class Framework(Protocol):
    """What loading needs of a tensor library."""

    name: str

    def device(self, device: Any) -> str:
        """``device`` as ``"cpu"`` or ``"cuda:N"``.

        Raises:
            DeviceError: for a device that this framework cannot have tensors on.
        """

    def adopt(self, array: HostArray) -> Any:
        """A tensor over the host memory of ``array``, without a copy."""

    def empties(
        self, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], device: str
    ) -> tuple[list[Any], list[int]]:
        """Uninitialised contiguous tensors of the safetensors dtypes ``dtypes`` on a device, and their addresses."""

    def has_in_reserve(self, nbytes: int, device: str) -> bool:
        """Whether tensors of so many bytes can be made without asking the driver for memory, as far as is known."""

    def consumer_stream(self, device: str) -> int:
        """The handle of the stream that the calling thread's work on ``device`` goes to; 0 on the host."""

    def floating_dtype(self, dtype: Any) -> Any:
        """The library's dtype of that name, if it is one that floating-point numbers can be converted to.

        Raises:
            SelectionError: for what is no dtype of the library, and for integers.
        """

    def check_cast(self, tensors: Iterable[TensorInfo], dtype: Any) -> None:
        """Refuses a dtype that is none, and one to which these tensors cannot be converted, before anything is read.

        Raises:
            SelectionError: where ``cast`` to ``dtype`` would fail for one of the tensors.
        """

    def cast(self, tensor: Any, dtype: Any) -> Any:
        """``tensor`` as ``dtype`` if it holds floating-point numbers, else as it is."""

    def index(self, tensor: Any, index: tuple[int | slice, ...]) -> Any:
        """``tensor[index]`` as a tensor of its own memory."""


class WritableFramework(Framework, Protocol):
    """What ``load_into`` needs besides: torch's and numpy's tensors are written to."""

    def shape(self, tensor: Any) -> tuple[int, ...]:
        """The shape of an existing tensor as a header gives it; of a sharded tensor that of the whole."""

    def pieces(self, name: str, tensor: Any) -> list[Piece]:
        """What this process holds of an existing tensor: all of it, or its local shard.

        Raises:
            DestinationError: for what is no tensor of this framework, or has no memory of its own to be written to.
        """

    def destination(self, name: str, tensor: Any) -> Destination:
        """The memory of an existing tensor of this process.

        Raises:
            DestinationError: for what is no tensor of this framework, has no memory, or is not writable.
        """

    def holds(self, memory: Any, address: int) -> bool:
        """Whether the memory of a piece is still where it was."""

    def cannot_convert(self, dtype: str, memory: Any) -> str | None:
        """Why the library cannot copy elements of ``dtype`` to ``memory``, or None where it can."""

    def put(self, memory: Any, value: Any) -> None:
        """Copies ``value`` to ``memory`` of the same shape, converting its elements."""

    def written(self, tensors: Sequence[Any]) -> None:
        """Says that these tensors, as the caller gave them, were written to. For automatic differentiation."""


_ALIASES = {
    "pt": "torch",
    "torch": "torch",
    "pytorch": "torch",
    "np": "numpy",
    "numpy": "numpy",
    "jax": "jax",
    "flax": "jax",
    "dlpack": "dlpack",
}


def destination_refused(name: str, cause: str, remedy: str | None = None) -> DestinationError:
    """The error of a destination that bytes of a tensor cannot be read into."""
    return DestinationError(tensor=name, cause=cause, remedy=remedy)


def of_other_library(name: str, tensor: object, wanted: str) -> DestinationError:
    """The error of a destination that is no ``wanted``."""
    remedy = "Give torch tensors only, or numpy arrays only; torch.from_numpy shares an array's memory"
    return destination_refused(name, f"the destination is a {type(tensor).__name__}, not a {wanted}", remedy)


def of_other_dtype(name: str, dtype: object) -> DestinationError:
    """The error of a destination of a dtype that no file of safetensors has."""
    remedy = "Give memory of a dtype that it has, such as float32, and convert what comes"
    return destination_refused(name, f"the destination's dtype {dtype} is none of safetensors'", remedy)


def dtypes_to_cast(tensors: Iterable[TensorInfo]) -> set[str]:
    """The dtypes of tensors that are to be converted.

    Raises:
        SelectionError: for a tensor that no framework converts.
    """
    found = {info.dtype: info for info in tensors}
    packed = found.get("F4")
    if packed is not None:
        cause = "F4 cannot be converted: its numbers are packed, and mean nothing without their scales"
        remedy = "Load it without dtype; filter= leaves tensors out"
        raise SelectionError(location=packed.location, tensor=packed.name, cause=cause, remedy=remedy)
    return set(found)


def framework(name: str) -> Framework:
    """The framework called ``name``: ``"pt"``, ``"np"``, ``"jax"`` or ``"dlpack"``, or one of their long names.

    Raises:
        ConfigError: for a name that is not known.
        MissingDependencyError: where the library is not installed.
    """
    known = _ALIASES.get(name)
    if known is None:
        raise ConfigError(
            f"framework={name!r} is not one of {', '.join(sorted(_ALIASES))}",
            remedy="Use 'dlpack' for any library that takes DLPack",
        )
    try:
        if known == "torch":
            from penstock.frameworks.torch import Torch

            return Torch()
        if known == "numpy":
            from penstock.frameworks.numpy import Numpy

            return Numpy()
        from penstock.frameworks.dlpack import DLPack, Jax

        return Jax() if known == "jax" else DLPack()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in {"torch", "numpy", "jax"}:
            raise
        others = "framework=" + " or ".join(repr(short) for short in ("pt", "np", "dlpack") if _ALIASES[short] != known)
        raise MissingDependencyError(
            f"framework={name!r} needs the package {error.name!r}, which is not installed. Install it, or give "
            f"{others}",
            cause=str(error),
            remedy=f"pip install {error.name}",
        ) from error


def writable_framework(name: Literal["pt", "np"]) -> WritableFramework:
    """The framework of that name, whose tensors can be written to."""
    return cast("WritableFramework", framework(name))


class HostOnly:
    """What frameworks have in common whose tensors Penstock only makes in host memory."""

    name: str

    def device(self, device: Any) -> str:
        if str(device) != "cpu":
            if importlib.util.find_spec("torch") is None:
                raise MissingDependencyError(
                    cause=f"device={str(device)!r} needs the package 'torch', which is not installed",
                    remedy="pip install torch, or load to device='cpu'",
                )
            raise DeviceError(
                f"tensors of framework {self.name!r} can be loaded to device='cpu' only, not {str(device)!r}",
                remedy="Use framework='pt', or move the tensors afterwards",
            )
        return "cpu"

    def empties(
        self, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], device: str
    ) -> tuple[list[Any], list[int]]:
        del dtypes, shapes
        raise DeviceError(f"framework {self.name!r} has no tensors on {device}")

    def has_in_reserve(self, nbytes: int, device: str) -> bool:
        del nbytes, device
        return False

    def consumer_stream(self, device: str) -> int:
        del device
        return 0
