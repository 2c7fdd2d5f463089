"""torch: tensors adopt host memory through DLPack; device memory comes from torch's own allocator."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from penstock._native import HostArray
from penstock.arguments import no_dtype, no_floating_dtype
from penstock.errors import DeviceError, InsufficientMemoryError, SelectionError
from penstock.frameworks import base
from penstock.frameworks.base import (
    Destination,
    Piece,
    destination_refused,
    dtypes_to_cast,
    of_other_dtype,
    of_other_library,
)
from penstock.frameworks.sharded import is_dtensor, local_pieces
from penstock.tensor_info import TensorInfo

_NO_MEMORY = "Use penstock.load_model, or module.to_empty(device=…) first"

_NAMES = {**base.DTYPES, "F4": "float4_e2m1fn_x2"}
"""safetensors' dtypes and torch's; a torch that is too old lacks some, and F6 has no torch dtype at all."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in _NAMES.items() if hasattr(torch, torch_name)
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_DLPACK = frozenset(["BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "BF16", "F32", "F64", "C64"])
"""Dtypes that go through DLPack by name; the others go as bytes and are viewed."""


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype for safetensors' ``name``.

    Raises:
        SelectionError: where this torch has none.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        cause = f"torch {torch.__version__} has no dtype for {name}"
        raise SelectionError(f"{cause}. Load the tensor with framework='dlpack' for its bytes", cause=cause)
    return dtype


def torch_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape torch gives a tensor whose header says ``shape``: two F4 elements are one of torch's.

    Raises:
        SelectionError: for F4 elements that do not come in pairs along the last dimension.
    """
    if dtype != "F4":
        return tuple(shape)
    if not shape or shape[-1] % 2:
        cause = f"torch holds F4 in pairs along the last dimension, which shape {list(shape)} does not have"
        raise SelectionError(cause=cause)
    return (*shape[:-1], shape[-1] // 2)


def has_version(tensor: torch.Tensor) -> bool:
    """Whether torch counts what is written to a tensor. If not, it can be written to under inference mode only: it was
    made under that, or has shared its memory with a tensor that was (``is_inference()`` says no of some of these).
    """
    try:
        tensor._version  # noqa: B018 - raises where there is none
    except RuntimeError:
        return False
    return True


_PINNED_ALIGNMENT = 64
"""Bytes: of a cache line, and of the widest vectors."""


def pinned_tensors(infos: Iterable[TensorInfo], dtype: Any) -> dict[str, torch.Tensor]:
    """Uninitialised tensors in one allocation of pinned memory, floating-point ones of another dtype if one is given.

    Raises:
        DeviceError: without a GPU.
        InsufficientMemoryError: where the memory cannot be had, or cannot be pinned.
    """
    device = torch.device(Torch().device("cuda"))
    wanted = None if dtype is None else Torch().floating_dtype(dtype)
    like, nbytes, places = [], 0, []
    for info in infos:
        becomes = dtype_of(info.dtype)
        if wanted is not None and becomes.is_floating_point:
            becomes = wanted
        like.append((info.name, becomes, torch_shape(info.dtype, info.shape)))
        places.append(nbytes)
        size = torch.empty(like[-1][2], dtype=becomes, device="meta").nbytes
        nbytes += -(-size // _PINNED_ALIGNMENT) * _PINNED_ALIGNMENT
    array, refused = HostArray.pinned(nbytes, device.index)
    if refused is not None:
        cause = f"{nbytes} bytes of host memory could not be pinned: {refused}"
        raise InsufficientMemoryError(cause=cause, remedy="Load without pin_memory")
    with torch.inference_mode(mode=False):
        slab: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
        made = {}
        for (name, becomes, shape), start in zip(like, places, strict=True):
            size = torch.empty(shape, dtype=becomes, device="meta").nbytes
            made[name] = slab[start : start + size].view(becomes).view(shape)
    return made


class Torch:
    """See ``Framework``."""

    name = "torch"

    def device(self, device: Any) -> str:
        try:
            parsed = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
            if isinstance(device, bool):
                raise TypeError("a number of a GPU is no truth value")  # noqa: TRY301 - as torch's own complaints
        except (RuntimeError, TypeError) as error:
            cause = f"device={device!r} is not a device of torch"
            raise DeviceError(cause=cause, remedy="Give 'cpu', 'cuda' or 'cuda:N'") from error
        if parsed.type == "cpu":
            return "cpu"
        if parsed.type != "cuda":
            cause = f"device={device!r}: Penstock loads to 'cpu' and 'cuda:N'"
            raise DeviceError(cause=cause, remedy="Load to 'cpu' and move the tensors")
        if not torch.cuda.is_available():
            built = "is built without CUDA" if torch.version.cuda is None else "finds no usable GPU"
            remedy = "Load to device='cpu', or check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
            raise DeviceError(cause=f"device={device!r}: torch {torch.__version__} {built}", remedy=remedy)
        index = torch.cuda.current_device() if parsed.index is None else parsed.index
        count = torch.cuda.device_count()
        if index >= count:
            cause = f"device={device!r}: there are {count} GPUs, numbered from 0"
            raise DeviceError(cause=cause, remedy="Check CUDA_VISIBLE_DEVICES")
        return f"cuda:{index}"

    # Tensors may be made for a consumer other than the one that asks. So none belongs to inference mode: such a tensor
    # could not be trained outside of it, while others can be used inside.

    def adopt(self, array: HostArray) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False):
                return self.adopt(array)
        dtype = dtype_of(array.dtype)
        shape = torch_shape(array.dtype, array.shape)
        if array.nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        if array.dtype in _DLPACK:
            return torch.utils.dlpack.from_dlpack(array.dlpack())
        return torch.utils.dlpack.from_dlpack(array.dlpack(raw=True)).view(dtype).view(shape)

    def empties(
        self, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], device: str
    ) -> tuple[list[torch.Tensor], list[int]]:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False):
                return self.empties(dtypes, shapes, device)
        # `empty_like` takes half of what `new_empty` takes, and that 0.6 of `torch.empty` with its keywords.
        make = {d: torch.empty(0, dtype=dtype_of(d), device=device).new_empty for d in set(dtypes)}
        if "F4" in make:
            shapes = [torch_shape(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
        kinds: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        tensors, empty_like = [], torch.empty_like
        for kind in zip(dtypes, shapes, strict=True):
            like = kinds.get(kind)
            if like is None:
                kinds[kind] = tensor = make[kind[0]](kind[1])
            else:
                tensor = empty_like(like)
            tensors.append(tensor)
        return tensors, list(map(torch.Tensor.data_ptr, tensors))

    def has_in_reserve(self, nbytes: int, device: str) -> bool:
        try:
            return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) >= nbytes
        except RuntimeError:
            # An allocator that was plugged in need not know.
            return False

    def shape(self, tensor: Any) -> tuple[int, ...]:
        shape = tuple(tensor.shape)
        return (*shape[:-1], shape[-1] * 2) if shape and DTYPE_NAMES.get(tensor.dtype) == "F4" else shape

    def pieces(self, name: str, tensor: Any) -> list[Piece]:
        if not isinstance(tensor, torch.Tensor):
            raise of_other_library(name, tensor, "torch tensor")
        if type(tensor) in _PLAIN or not is_dtensor(tensor):
            _check_plain(name, tensor)
            # An alias: `tensor.data = other` in another thread takes the tensor's memory away, not this one's.
            return [Piece((), tensor.detach())]
        local, pieces = local_pieces(name, tensor)
        _check_plain(name, local)
        scale = 2 if DTYPE_NAMES.get(tensor.dtype) == "F4" else 1
        found = []
        for ranges, memory in pieces:
            if scale > 1:
                # Two elements of the header's are one of torch's, along the last dimension.
                ranges = (*ranges[:-1], (ranges[-1][0] * scale, ranges[-1][1] * scale))  # noqa: PLW2901
            found.append(Piece(ranges, memory.detach()))
        return found

    def destination(self, name: str, tensor: Any) -> Destination:
        if not isinstance(tensor, torch.Tensor):
            raise of_other_library(name, tensor, "torch tensor")
        _check_plain(name, tensor)
        device = tensor.device
        if device.type == "meta":
            cause = "the destination is on the meta device and has no memory"
            raise destination_refused(name, cause, _NO_MEMORY)
        if tensor.layout != torch.strided:
            cause = f"the destination is not contiguous and has no strides ({tensor.layout})"
            raise destination_refused(name, cause, "Load the tensor, and convert it: to_sparse(), or copy_")
        dtype = DTYPE_NAMES.get(tensor.dtype)
        if dtype is None:
            raise of_other_dtype(name, tensor.dtype)
        size = tensor.element_size()
        nbytes = tensor.numel() * size
        strides = None
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            strides = tuple(stride * size for stride in tensor.stride())
        try:
            address = tensor.data_ptr()
        except RuntimeError as error:
            cause = f"the destination has no memory ({str(error).splitlines()[0]})"
            raise destination_refused(name, cause, _NO_MEMORY) from error
        if nbytes and not address:
            cause = f"the destination, a {type(tensor).__name__}, has no memory: its storage is empty"
            raise destination_refused(name, cause, _NO_MEMORY)
        where = "cpu" if device.type == "cpu" else self.device(device)
        return Destination(address, nbytes, dtype, self.shape(tensor), where, strides)

    def holds(self, memory: Any, address: int) -> bool:
        # Resizing a storage gives it other memory.
        return bool(memory.data_ptr() == address)

    def cannot_convert(self, dtype: str, memory: Any) -> str | None:
        source = DTYPES.get(dtype)
        if source is None:
            return f"torch {torch.__version__} has no dtype for {dtype}"
        return copy_refused(source, memory.dtype, memory.device.type)

    def put(self, memory: Any, value: Any) -> None:
        with torch.no_grad() if has_version(memory) else torch.inference_mode():
            memory.copy_(value)

    def written(self, tensors: Sequence[Any]) -> None:
        versioned = [tensor for tensor in tensors if has_version(tensor)]
        try:
            torch.autograd.graph.increment_version(versioned)
        except (AttributeError, TypeError):
            # An older torch takes one tensor.
            for tensor in versioned:
                torch.autograd.graph.increment_version(tensor)

    def consumer_stream(self, device: str) -> int:
        return 0 if device == "cpu" else int(torch.cuda.current_stream(torch.device(device)).cuda_stream)

    def floating_dtype(self, dtype: Any) -> torch.dtype:
        wanted = dtype_of(dtype) if isinstance(dtype, str) and dtype in _NAMES else dtype
        if isinstance(wanted, str):
            wanted = getattr(torch, wanted, None)
        if not isinstance(wanted, torch.dtype):
            raise no_dtype(dtype, "torch")
        if not (wanted.is_floating_point or wanted.is_complex):
            raise no_floating_dtype(dtype)
        return wanted

    def check_cast(self, tensors: Iterable[TensorInfo], dtype: Any) -> None:
        wanted = self.floating_dtype(dtype)
        for name in dtypes_to_cast(tensors):
            source = DTYPES.get(name)
            if source is None or not source.is_floating_point or source == wanted:
                continue
            refused = copy_refused(source, wanted, "cpu")
            if refused is not None:
                raise SelectionError(f"dtype={dtype!r}: {name} cannot be converted to it: {refused}", cause=refused)

    def cast(self, tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False):
                return self.cast(tensor, dtype)
        wanted = self.floating_dtype(dtype)
        if not tensor.is_floating_point():
            return tensor
        try:
            return tensor.to(wanted)
        except NotImplementedError as error:
            cause = f"torch {torch.__version__} does not convert {tensor.dtype} to {wanted}"
            remedy = "Load without dtype"
            raise SelectionError(cause=cause, remedy=remedy) from error

    def index(self, tensor: torch.Tensor, index: tuple[int | slice, ...]) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False):
                return self.index(tensor, index)
        return tensor[index].clone()


_PLAIN = frozenset([torch.Tensor, torch.nn.Parameter])


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuses subclasses that answer for torch's operations themselves: their elements are not simply in memory."""
    kind = type(tensor)
    if tensor.is_nested:
        raise destination_refused(
            name, "the destination is a nested tensor", "Load its parts into the tensors that it is made of"
        )
    if kind in _PLAIN or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return
    cause = f"the destination is a {kind.__module__}.{kind.__qualname__}, a tensor without memory of its own"
    raise destination_refused(name, cause, "Load first and make it from the loaded tensor, or use load_state_dict")


_OUT_OF_MEMORY: type[BaseException] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
_FAILED: tuple[type[BaseException], ...] = (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
"""What a device fails with, in torch 2.8 and later."""


@functools.cache
def copy_refused(source: torch.dtype, destination: torch.dtype, device: str) -> str | None:
    """What torch says to copying elements of one dtype to another, or None.

    Raises:
        InsufficientMemoryError, DeviceError: the device could not be asked.
    """
    try:
        torch.empty(1, dtype=destination, device=device).copy_(torch.empty(1, dtype=source, device=device))
    except _OUT_OF_MEMORY as error:
        # It says nothing of the dtypes, and need not be so next time: what is raised is not kept.
        cause = f"there is no memory on {device} to convert with: {str(error).splitlines()[0]}"
        remedy = "Free memory of the device, or load fewer tensors at once"
        raise InsufficientMemoryError(cause=cause, remedy=remedy) from error
    except _FAILED as error:
        cause = f"{device} failed: {str(error).splitlines()[0]}"
        raise DeviceError(cause=cause) from error
    except (RuntimeError, TypeError) as error:
        # NotImplementedError is a RuntimeError.
        return f"torch cannot do it: {str(error).splitlines()[0]}"
    return None
