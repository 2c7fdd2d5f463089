"""The interface to a tensor library, and the way to find one by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from penstock._native import HostArray
from penstock.errors import ConfigError, DeviceError, MissingDependencyError


class Destination(NamedTuple):
    """Memory that a tensor is to be read into, as its framework describes it."""

    address: int
    nbytes: int
    dtype: str
    """As safetensors spells it: ``"BF16"``."""
    shape: tuple[int, ...]
    device: str
    """``"cpu"`` or ``"cuda:N"``."""


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

    def destination(self, name: str, tensor: Any) -> Destination:
        """The memory of an existing tensor.

        Raises:
            DestinationError: for what is no tensor of this framework, not contiguous, or not writable.
        """

    def consumer_stream(self, device: str) -> int:
        """The handle of the stream that the calling thread's work on ``device`` goes to; 0 on the host."""

    def floating_dtype(self, dtype: Any) -> Any:
        """The library's dtype of that name, if it is one that floating-point numbers can be converted to.

        Raises:
            SelectionError: for what is no dtype of the library, and for integers.
        """

    def cast(self, tensor: Any, dtype: Any) -> Any:
        """``tensor`` as ``dtype`` if it holds floating-point numbers, else as it is."""

    def index(self, tensor: Any, index: tuple[int | slice, ...]) -> Any:
        """``tensor[index]`` as a tensor of its own memory."""


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
        raise MissingDependencyError(
            f"framework={name!r} needs the package {error.name!r}, which is not installed. Install it, or use another "
            "framework ('pt', 'np', 'dlpack')",
            cause=str(error),
            remedy=f"pip install {error.name}",
        ) from error


class HostOnly:
    """What frameworks have in common whose tensors Penstock only makes in host memory."""

    name: str

    def device(self, device: Any) -> str:
        if str(device) != "cpu":
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
