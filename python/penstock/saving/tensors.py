"""What there is to save: the tensors of a module or a mapping, and the memory that holds each as it is written.

Memory is written as it lies wherever that is right. A tensor that is not contiguous, is conjugated lazily or lies on a
device that the core does not read is copied first, a file's worth at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.arguments import described
from penstock.errors import ConfigError
from penstock.saving.layout import Entry

if TYPE_CHECKING:
    import torch


class Held(NamedTuple):
    """Memory that can be written as it is, and what keeps it."""

    address: int
    nbytes: int
    device: int | None
    """The ordinal of a GPU, or None for host memory."""
    owner: Any


class Collected(NamedTuple):
    """What there is to save."""

    entries: list[Entry]
    ties: dict[str, str]
    """From names that were left out to the name of the same tensor that is saved."""
    libraries: set[str]
    """``"pt"``, ``"np"``."""
    gpus: set[int]


def collect(given: Any, *, tied: bool | None = None) -> Collected:
    """The tensors of a module or a mapping.

    Args:
        tied: whether a tensor that several names have is saved once. By default it is of a module, as
            ``safetensors.torch.save_model`` does, and not of a mapping.

    Raises:
        ConfigError: for what is neither, and for tensors that no file of safetensors can hold.
    """
    if isinstance(given, Mapping):
        state: Mapping[Any, Any] = given
    elif hasattr(given, "state_dict") and hasattr(given, "named_parameters"):
        state, tied = given.state_dict(), True if tied is None else tied
    else:
        cause = f"what is saved is a torch.nn.Module or a mapping from names to tensors, not {described(given)}"
        raise ConfigError(cause=cause, remedy="Write penstock.save({name: tensor}, location)")
    collected = Collected([], {}, set(), set())
    kept: dict[Any, str] = {}
    # The first of several names, sorted, is the one that is saved, as in safetensors.
    names = sorted(state) if tied and all(isinstance(name, str) for name in state) else list(state)
    found = {}
    for name in names:
        entry, same = _entry(name, state[name], collected)
        if tied and same is not None and kept.setdefault(same, name) != name:
            collected.ties[name] = kept[same]
        else:
            found[name] = entry
    collected.entries.extend(found[name] for name in state if name in found)
    return collected


def memory_of(entries: Iterable[Entry]) -> list[Held]:
    """The memory of each, to be written as it is. Copies that were queued on a GPU are done when this returns."""
    held = [_torch_memory(entry) if is_torch(entry.tensor) else _numpy_memory(entry) for entry in entries]
    copied = {memory.device for memory, fresh in held if fresh and memory.device is not None}
    if copied:
        import torch

        for device in copied:
            torch.cuda.current_stream(device).synchronize()
    return [memory for memory, _ in held]


def is_torch(tensor: Any) -> bool:
    """Whether it is a tensor of torch. Imports nothing."""
    return any(kind.__module__ == "torch" and kind.__name__ == "Tensor" for kind in type(tensor).__mro__)


def _entry(name: Any, tensor: Any, into: Collected) -> tuple[Entry, Any]:
    """The tensor as an entry, and what is the same of all that are tied to it, if any can be."""
    if not isinstance(name, str):
        raise ConfigError(cause=f"names of tensors are str, not {described(name)}")
    if name == "__metadata__":
        raise ConfigError(tensor=name, cause="safetensors keeps this name for itself", remedy="Rename the tensor")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(tensor=name, cause="the name is no Unicode: it holds a lone surrogate") from None
    if is_torch(tensor):
        into.libraries.add("pt")
        return _torch_entry(name, tensor, into)
    if type(tensor).__module__.split(".")[0] == "numpy" and hasattr(tensor, "__array_interface__"):
        into.libraries.add("np")
        return _numpy_entry(name, tensor), None
    cause = f"it is {described(tensor)}, and safetensors holds tensors only"
    raise ConfigError(tensor=name, cause=cause, remedy="Give tensors of torch or arrays of numpy; leave it out")


def _torch_entry(name: str, tensor: torch.Tensor, into: Collected) -> tuple[Entry, Any]:
    from penstock.frameworks.torch import DTYPE_NAMES, Torch

    refused = _refusal(tensor)
    if refused is not None:
        cause, remedy = refused
        raise ConfigError(tensor=name, cause=cause, remedy=remedy)
    nbytes = tensor.numel() * tensor.element_size()
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        cause = f"it has no memory ({str(error).splitlines()[0]})"
        raise ConfigError(tensor=name, cause=cause, remedy="Load or initialise it first") from error
    if nbytes and not address:
        cause = "it has no memory: its storage is empty"
        raise ConfigError(tensor=name, cause=cause, remedy="Gather or load it first")
    if tensor.device.type == "cuda":
        into.gpus.add(tensor.device.index)
    same = (str(tensor.device), address, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj())
    entry = Entry(name, DTYPE_NAMES[tensor.dtype], Torch().shape(tensor), nbytes, tensor)
    return entry, same if nbytes else None


def _refusal(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Why no file of safetensors can hold the tensor, and what to do."""
    import torch

    from penstock.frameworks.sharded import is_dtensor
    from penstock.frameworks.torch import DTYPE_NAMES

    if is_dtensor(tensor):
        return "it is a DTensor, of which each rank holds a part", "Save tensor.full_tensor() on one rank"
    if tensor.device.type == "meta":
        return "it is on the meta device and has no memory", "Load or initialise it first"
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}, and safetensors holds dense tensors", "Save to_dense() of it"
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        cause = f"it is a {kind.__module__}.{kind.__qualname__}, a tensor without memory of its own"
        return cause, "Save the tensors that it is made of, or what dequantize() gives"
    if tensor.dtype not in DTYPE_NAMES:
        remedy = "Convert it to one of safetensors', such as float32"
        if tensor.is_complex():
            remedy = "Save torch.view_as_real() of it, or convert it to complex64"
        return f"its dtype {tensor.dtype} is none of safetensors'", remedy
    return None


def _torch_memory(entry: Entry) -> tuple[Held, bool]:
    import torch

    with torch.no_grad():
        given = entry.tensor.detach()
        tensor = given.resolve_conj().resolve_neg().contiguous()
        if tensor.device.type not in {"cpu", "cuda"}:
            tensor = tensor.cpu()
    device = tensor.device.index if tensor.device.type == "cuda" else None
    address = tensor.data_ptr()
    return Held(address, entry.nbytes, device, tensor), address != given.data_ptr()


def _numpy_entry(name: str, array: Any) -> Entry:
    from penstock.frameworks.numpy import dtype_name

    native = array.dtype.newbyteorder("=")
    dtype = dtype_name(native)
    if dtype is None:
        cause = f"its dtype {array.dtype} is none of safetensors'"
        raise ConfigError(tensor=name, cause=cause, remedy="Convert it to one of safetensors', such as float32")
    return Entry(name, dtype, tuple(array.shape), array.nbytes, array)


def _numpy_memory(entry: Entry) -> tuple[Held, bool]:
    import numpy as np

    array = np.asarray(entry.tensor)
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    return Held(array.ctypes.data, entry.nbytes, None, array), False
