"""What becomes of each call of torch with lazy tensors: what is a view of them, what is worked out, what is recorded.

Handlers return NotImplemented for what they do not know: they are then done with materialised
tensors. ``register`` enters them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex

import torch

from penstock.frameworks.torch import copy_refused
from penstock.recording.computing import COMPUTES, chosen, worked_out
from penstock.recording.lazy import (
    DESCRIBES,
    HANDLERS,
    KEEPS,
    Handler,
    LazyTensor,
    empty_for,
    first_is_lazy,
    has_lazy,
    is_alias,
    unwatched,
)
from penstock.recording.waiting import flush_overlapping


def _described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Shape, dtype and the like: the wrapper knows."""
    if not first_is_lazy(args):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views are torch's own, of the meta tensor."""
    if not first_is_lazy(args) or has_lazy(args[1:]) or has_lazy(kwargs):
        return NotImplemented
    lazy: LazyTensor = args[0]
    if func is torch.Tensor.__getitem__ and not _is_basic(args[1]):
        return NotImplemented
    meta, casts = lazy.lazy_value.meta, lazy.lazy_value.casts
    if casts and func is torch.Tensor.view and any(isinstance(a, torch.dtype) for a in (*args[1:], *kwargs.values())):
        return NotImplemented
    if is_static(args[1:]) and is_static(kwargs):
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined, unused-ignore]
            views = func(meta, *args[1:], **kwargs)
    else:
        # Some are views by the values of a tensor (``tensor_split``).
        flush_overlapping((args[1:], kwargs))
        views = func(meta, *args[1:], **kwargs)
    made = []
    for view in views if isinstance(views, (list, tuple)) else [views]:
        if view is meta:
            # torch returns the tensor itself: ``flatten`` of one dimension.
            made.append(lazy)
            continue
        if not is_alias(view, meta) or view.element_size() != meta.element_size():
            return NotImplemented
        made.append(lazy.viewed(view))
    return type(views)(made) if isinstance(views, (list, tuple)) else made[0]


def is_static(value: Any) -> bool:
    """Whether arguments are numbers and the like, so that no tensor's values decide anything."""
    if isinstance(value, (list, tuple)):
        return all(map(is_static, value))
    if isinstance(value, dict):
        return all(map(is_static, value.values()))
    if isinstance(value, slice):
        return is_static((value.start, value.stop, value.step))
    return value is None or value is Ellipsis or isinstance(value, (int, str, torch.dtype))


def _is_basic(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(
        item is None
        or item is Ellipsis
        or isinstance(item, slice)
        or (isinstance(item, SupportsIndex) and not isinstance(item, (bool, torch.Tensor)))
        for item in items
    )


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What gives the same values in the same storage."""
    del func, kwargs
    return args[0].viewed(args[0].lazy_value.meta) if first_is_lazy(args) else NotImplemented


def _offset(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func, kwargs
    return args[0].lazy_storage.offset_of(args[0].lazy_value)


def _placed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where it is: torch's C++ code does not know."""
    if len(args) > 1 or kwargs or not first_is_lazy(args):
        return NotImplemented
    return _PLACED[func](args[0].lazy_storage.device)


def _packed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``contiguous``, ``clone`` of what is in row-major order: itself, and the same in another storage."""
    if not first_is_lazy(args) or len(args) > 1 or kwargs:
        return NotImplemented
    lazy: LazyTensor = args[0]
    if not lazy.lazy_value.meta.is_contiguous():
        return NotImplemented
    return lazy if func is torch.Tensor.contiguous else lazy.copied()


def _iterated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func, kwargs
    return iter(args[0].unbind(0)) if first_is_lazy(args) and args[0].dim() else NotImplemented


def _made_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``zeros_like``, ``new_zeros`` and the like want to know what it is like, not what it holds."""
    if not first_is_lazy(args) or has_lazy(args[1:]) or has_lazy(kwargs):
        return NotImplemented
    lazy: LazyTensor = args[0]
    like = lazy.lazy_value.as_meta()
    if not like.numel():
        # Of these, torch keeps other strides on the meta device than elsewhere.
        like = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=lazy.lazy_storage.device)
    return func(like, *args[1:], **{"device": lazy.lazy_storage.device, **kwargs})


def _converted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``to``, ``float``, ``cpu`` and the like: another dtype, another device."""
    if not first_is_lazy(args) or has_lazy(args[1:]) or has_lazy(kwargs):
        return NotImplemented
    lazy: LazyTensor = args[0]
    target = _target(func, args[1:], kwargs)
    if target is None:
        return NotImplemented
    device, dtype, copies = target
    if device is not None and device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    value = lazy.lazy_value
    dtype = value.dtype if dtype is None else dtype
    if not copies and dtype == value.dtype and device in {None, lazy.lazy_storage.device}:
        return lazy
    with unwatched():
        if dtype != value.dtype and copy_refused(value.dtype, dtype, "cpu") is not None:
            return NotImplemented
        strides = value.meta.to(dtype, copy=True).stride()
    if strides == value.meta.stride():
        casts = value.casts if dtype == value.dtype else (*value.casts, dtype)
        return lazy.copied(value._replace(casts=casts), device)
    # What had gaps between its elements has none when it is converted.
    packed = worked_out(torch.Tensor.to, (lazy, dtype), {"copy": True})
    return packed if packed is NotImplemented or device is None else packed.copied(device=device)


def _target(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None, bool] | None:
    """The device and dtype that a conversion names and whether it always copies, or None where it is another."""
    if func in _CASTS:
        return None if args or kwargs else (None, _CASTS[func], False)
    if func is torch.Tensor.cpu:
        return None if args or kwargs else (torch.device("cpu"), None, False)
    if func is torch.Tensor.type:
        # By the name of a class it is another device's too.
        return (None, args[0], False) if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype) else None
    flags = [value for value in args if isinstance(value, bool)]
    copies = bool(kwargs.get("copy")) or flags[1:] == [True]
    kept = {key: value for key, value in kwargs.items() if key not in {"copy", "non_blocking"}}
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kept)  # type: ignore[attr-defined, unused-ignore]
    except (TypeError, RuntimeError):
        return None
    if memory_format is not None or (device is not None and device.type == "meta"):
        return None
    return device, dtype, copies


def _overwritten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``zero_``, ``fill_`` of a whole storage: none of it is read."""
    if not first_is_lazy(args) or has_lazy(args[1:]) or has_lazy(kwargs):
        return NotImplemented
    lazy: LazyTensor = args[0]
    if not lazy.lazy_storage.is_all(lazy.lazy_value):
        return NotImplemented
    flush_overlapping((args[1:], kwargs))
    with unwatched():
        tensor = empty_for(lazy.lazy_storage)
    # Nobody else sees it before it holds what it shall, and nobody at all if this raises.
    func(lazy.lazy_storage.tensor_in(tensor, lazy.lazy_value), *args[1:], **kwargs)
    lazy.lazy_storage.materialised = tensor
    return lazy.materialised()


def _copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``copy_`` of a lazy tensor into memory that exists."""
    del kwargs
    if len(args) < 2 or isinstance(args[0], LazyTensor) or not isinstance(args[1], LazyTensor):  # noqa: PLR2004
        return NotImplemented
    del func
    return args[0] if args[1].lazy_recorder.record(args[0], args[1]) else NotImplemented


def _assigned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``memory[index] = lazy``."""
    del func, kwargs
    memory, index, lazy = args
    if isinstance(memory, LazyTensor) or not isinstance(lazy, LazyTensor) or not _is_basic(index):
        return NotImplemented
    if memory.requires_grad and torch.is_grad_enabled():
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        place = memory.detach()[index]
    # Assignment drops leading dimensions of size one, which copying does not.
    shape = lazy.lazy_value.meta.shape
    while len(shape) > place.dim() and shape[0] == 1:
        lazy = lazy[0]
        shape = shape[1:]
    return None if lazy.lazy_recorder.record(place, lazy) else NotImplemented


def _kept(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``parameter.data = lazy``: a regular (eager) tensor, which is filled with all else that is recorded."""
    if len(args) != 2 or kwargs or isinstance(args[0], LazyTensor):  # noqa: PLR2004
        return NotImplemented
    memory, lazy = args
    return func(memory, lazy.lazy_recorder.materialise_later(lazy))


_T: Any = torch.Tensor
_CASTS: dict[Any, torch.dtype] = {
    _T.float: torch.float32,
    _T.double: torch.float64,
    _T.half: torch.float16,
    _T.bfloat16: torch.bfloat16,
    _T.int: torch.int32,
    _T.long: torch.int64,
    _T.short: torch.int16,
    _T.char: torch.int8,
    _T.byte: torch.uint8,
    _T.bool: torch.bool,
}
_DESCRIBES = [
    *(
        getattr(_T, name).__get__
        for name in (
            "shape", "dtype", "ndim", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "is_sparse",
            "is_quantized", "itemsize", "nbytes", "is_nested", "is_mkldnn",
        )
    ),
    _T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.element_size, _T.stride,
    _T.is_contiguous, _T.is_floating_point, _T.is_complex, _T.is_signed, _T.__len__, _T.__hash__,
    torch.is_floating_point, torch.is_complex, torch.numel,
]  # fmt: skip
_PLACED: dict[Any, Callable[[torch.device], Any]] = {
    _T.device.__get__: lambda device: device,
    _T.is_cpu.__get__: lambda device: device.type == "cpu",
    _T.is_cuda.__get__: lambda device: device.type == "cuda",
    _T.is_xpu.__get__: lambda device: device.type == "xpu",
    _T.is_meta.__get__: lambda _: False,
    _T.get_device: lambda device: -1 if device.type == "cpu" else device.index,
}
_VIEWS = [
    _T.narrow, _T.chunk, _T.split, _T.split_with_sizes, _T.tensor_split, _T.unbind, _T.select,
    _T.view, _T.t, _T.transpose, _T.swapaxes, _T.swapdims, _T.permute, _T.movedim, _T.moveaxis,
    _T.unsqueeze, _T.squeeze, _T.unflatten, _T.expand, _T.expand_as, _T.view_as,
    _T.T.__get__, _T.mT.__get__, _T.diagonal, _T.unfold, _T.hsplit, _T.vsplit,
    torch.narrow, torch.chunk, torch.split, torch.tensor_split, torch.unbind, torch.select, torch.t,
    torch.transpose, torch.permute, torch.movedim, torch.unsqueeze, torch.squeeze, torch.unflatten,
    torch.swapaxes, torch.swapdims, torch.moveaxis, torch.split_with_sizes, torch.hsplit, torch.vsplit, torch.diagonal,
]  # fmt: skip
_MAY_COPY = [_T.__getitem__, _T.reshape, _T.flatten, _T.reshape_as, torch.reshape, torch.flatten]
_LIKE = [
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like,
    _T.new_zeros, _T.new_ones, _T.new_empty, _T.new_full,
]  # fmt: skip
_FIRST: dict[Any, Handler] = {
    **dict.fromkeys(_DESCRIBES, _described),
    **dict.fromkeys(_PLACED, _placed),
    _T.storage_offset: _offset,
    **dict.fromkeys([*_VIEWS, *_MAY_COPY], _viewed),
    **dict.fromkeys([_T.detach, _T.data.__get__, torch.detach], _same),
    **dict.fromkeys([_T.contiguous, _T.clone, torch.clone], _packed),
    **dict.fromkeys([*_CASTS, _T.to, _T.cpu, _T.type], _converted),
    **dict.fromkeys(_LIKE, _made_like),
    _T.__iter__: _iterated,
    _T.copy_: _copied,
    _T.__setitem__: _assigned,
    **dict.fromkeys([_T.zero_, _T.fill_], _overwritten),
    **dict.fromkeys([_T.data.__set__, _T.grad.__set__], _kept),
}
METADATA_ONLY = frozenset([*_DESCRIBES, *_PLACED, *_VIEWS, _T.storage_offset, _T.detach, _T.data.__get__, torch.detach])
"""Functions that read no element of a tensor: they describe it, or make a view of it whatever its strides are.

Of tensors in their further arguments some read elements (``tensor_split`` by a tensor of indices).
"""
MAY_COPY = frozenset([*_MAY_COPY, _T.contiguous, _T.to])
"""Functions that make a view or copy. If they copy, they call an operator that the dispatcher sees."""
EXPOSES = frozenset(
    [
        *(getattr(_T, name) for name in ("data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__")),
        _T.__cuda_array_interface__.__get__,  # type: ignore[attr-defined, unused-ignore]
    ]
)
"""Functions after which memory may be used without calling torch."""


def register() -> None:
    """Fills the tables of ``lazy``. Who makes lazy tensors calls this first."""
    for handlers in (_FIRST, {_T.__getitem__: chosen}, dict.fromkeys(COMPUTES, worked_out)):
        for func, handler in handlers.items():
            if handler not in HANDLERS.setdefault(func, []):
                HANDLERS[func].append(handler)
    DESCRIBES.update([*_DESCRIBES, *_PLACED, _T.storage_offset])
    KEEPS.update({_T.data.__set__: 0, _T.grad.__set__: 1, _T.__reduce_ex__: 0})
    KEEPS.update(
        dict.fromkeys(
            [
                _T.set_, _T.resize_, _T.resize_as_, _T.as_strided_, _T.t_, _T.transpose_, _T.swapaxes_, _T.swapdims_,
                _T.squeeze_, _T.unsqueeze_,
            ],
            0,
        )
    )  # fmt: skip
