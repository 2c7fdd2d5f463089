"""What becomes of each call of torch with lazy tensors: what is a view of them, what is worked out, what is recorded.

Handlers return NotImplemented for what they do not know: it is then done with real tensors. It fills ``lazy.HANDLERS``.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

import torch

from penstock.recording.lazy import HANDLERS, Handler, LazyTensor, device_of, name_of
from penstock.recording.sources import Computed, Hole, is_contiguous, mapped


def _first_is_lazy(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], LazyTensor)


def _has_lazy(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_lazy(item) for item in value)
    return isinstance(value, LazyTensor)


def _described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Shape, dtype and the like: the wrapper knows."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views are torch's own, of the meta tensor."""
    if not _first_is_lazy(args) or _has_lazy(args[1:]) or any(map(_has_lazy, kwargs.values())):
        return NotImplemented
    lazy: LazyTensor = args[0]
    if lazy._real is not None:
        return func(lazy._real, *args[1:], **kwargs)
    if func is torch.Tensor.__getitem__ and not _is_basic(args[1]):
        return NotImplemented
    reinterprets = func is torch.Tensor.view and any(isinstance(a, torch.dtype) for a in (*args[1:], *kwargs.values()))
    if reinterprets and lazy._casts:
        return NotImplemented
    views = func(lazy._meta, *args[1:], **kwargs)
    made = []
    for view in views if isinstance(views, (list, tuple)) else [views]:
        same = isinstance(view, torch.Tensor) and torch._C._is_alias_of(view, lazy._meta)  # type: ignore[attr-defined, unused-ignore]
        if not same or view.element_size() != lazy._meta.element_size():
            return NotImplemented
        made.append(lazy.derived(view))
    return type(views)(made) if isinstance(views, (list, tuple)) else made[0]


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
    """What gives the same values in the same memory."""
    del func, kwargs
    lazy = args[0]
    return NotImplemented if not _first_is_lazy(args) else lazy.derived() if lazy._real is None else lazy._real.detach()


def _packed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``contiguous``, ``clone`` of what is in row-major order: as it is, since nobody can write to it."""
    if not _first_is_lazy(args) or len(args) > 1 or kwargs:
        return NotImplemented
    lazy: LazyTensor = args[0]
    if lazy._real is not None:
        return func(lazy._real)
    if not lazy._meta.is_contiguous():
        return NotImplemented
    return lazy.derived() if func is torch.Tensor.contiguous else _own(lazy.derived(root=lazy._root))


def _iterated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func, kwargs
    return iter(args[0].unbind(0)) if args[0].dim() else NotImplemented


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What depends on one weight alone, and on constants: kept, and made when that is read."""
    of: list[LazyTensor] = []
    constants: list[torch.Tensor] = []

    def kept(value: Any) -> Any:
        if isinstance(value, LazyTensor):
            of.append(value)
            return Hole(len(of) - 1)
        if isinstance(value, torch.Tensor):
            constants.append(value)
        return mapped(kept, value)

    kept((args, kwargs))
    if not of or "out" in kwargs or sum(constant.numel() for constant in constants) > _CONSTANT:
        return NotImplemented
    first = of[0]
    first._recorder.check_thread(name_of(func))
    if any(lazy._real is not None or lazy.stored() != first.stored() for lazy in of):
        return NotImplemented
    # They may change before they are used.
    first._recorder.settle(constants)
    own = {id(constant): constant.detach().clone() for constant in constants}

    def held(value: Any) -> Any:
        return own[id(value)] if id(value) in own else mapped(held, value)

    of.clear()
    call = Computed(func, kept(held(args)), kept(held(kwargs)), tuple(of))
    return _result(call, first)


def _result(call: Computed, first: LazyTensor) -> Any:
    """A lazy tensor for the result of a call; NotImplemented for one whose elements have gaps between them."""
    try:
        meta = call.of_values([_meta_of(lazy) for lazy in call.of])
    except Exception:  # noqa: BLE001 - its shape depends on its values, or torch refuses it: a real tensor tells which
        return NotImplemented
    if type(meta) is not torch.Tensor or not meta.is_meta:
        return NotImplemented
    # Of a transposed tensor's elements, most functions keep the order.
    strides = meta.stride()
    order = tuple(sorted(range(meta.dim()), key=lambda dimension: -strides[dimension]))
    in_order = meta.permute(order)
    if not is_contiguous(in_order):
        return NotImplemented
    is_turned = order != tuple(range(meta.dim()))
    value = torch.empty(in_order.shape, dtype=meta.dtype, device="meta")
    result = _own(first.derived(value, root=call._replace(order=order if is_turned else None), casts=()))
    return result.permute([order.index(dimension) for dimension in range(meta.dim())]) if is_turned else result


def _chosen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows by a list of numbers: of the experts that a rank has, no others are read."""
    lazy, index = args
    if not _first_is_lazy(args) or not isinstance(index, (list, torch.Tensor)) or lazy._real is not None:
        return NotImplemented
    numbers = index.tolist() if isinstance(index, torch.Tensor) and index.dtype == torch.int64 else index
    if not isinstance(numbers, list) or not numbers or not all(type(number) is int for number in numbers):
        return NotImplemented
    first, last = min(numbers), max(numbers)
    if not lazy.dim() or first < 0 or last >= lazy.shape[0]:
        return NotImplemented
    return _computed(func, (lazy.narrow(0, first, last - first + 1), [number - first for number in numbers]), kwargs)


def _own(lazy: LazyTensor) -> LazyTensor:
    """A copy, whose values nobody else sees change."""
    lazy._is_own = True
    return lazy


def _meta_of(lazy: LazyTensor) -> torch.Tensor:
    return lazy._meta.to(lazy._casts[-1]) if lazy._casts else lazy._meta


def _made_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``zeros_like``, ``new_zeros`` and the like want to know what it is like, not what it holds."""
    if not _first_is_lazy(args) or _has_lazy(args[1:]) or any(map(_has_lazy, kwargs.values())):
        return NotImplemented
    return func(_meta_of(args[0]), *args[1:], **{"device": device_of(args[0]), **kwargs})


def _converted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``to``, ``float``, ``cpu`` and the like: another dtype, another place."""
    if not _first_is_lazy(args) or _has_lazy(args[1:]):
        return NotImplemented
    lazy: LazyTensor = args[0]
    if lazy._real is not None:
        return func(lazy._real, *args[1:], **kwargs)
    target = _target(func, args[1:], kwargs)
    if target is None:
        return NotImplemented
    device, dtype = target
    if device is not None and device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    now = lazy._casts[-1] if lazy._casts else lazy._meta.dtype
    if dtype is None or dtype == now:
        return lazy.derived(device=device)
    if lazy._meta.to(dtype).stride() == lazy._meta.stride():
        return _own(lazy.derived(root=lazy._root, casts=(*lazy._casts, dtype), device=device))
    # What had gaps between its elements has none when it is converted.
    packed = _computed(torch.Tensor.to, (lazy, dtype), {})
    return packed if packed is NotImplemented or device is None else packed.derived(device=device)


def _target(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None] | None:
    """The device and dtype that a conversion names, or None where it is another."""
    if func in _CASTS:
        return None if args or kwargs else (None, _CASTS[func])
    if func is torch.Tensor.cpu:
        return torch.device("cpu"), None
    if func is torch.Tensor.type:
        # By the name of a class it is another device's too.
        return (None, args[0]) if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype) else None
    kept = {key: value for key, value in kwargs.items() if key not in {"copy", "non_blocking"}}
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kept)  # type: ignore[attr-defined, unused-ignore]
    except (TypeError, RuntimeError):
        return None
    if memory_format is not None or (device is not None and device.type == "meta"):
        return None
    return device, dtype


def _overwritten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``zero_``, ``fill_`` of what its holder alone has: none of it is read."""
    if not _first_is_lazy(args) or _has_lazy(args[1:]) or not args[0]._is_own or args[0]._real is not None:
        return NotImplemented
    lazy: LazyTensor = args[0]
    lazy._recorder.check_thread(name_of(func))
    lazy._recorder.settle((args[1:], kwargs))
    with torch.inference_mode(mode=False):
        lazy._real = torch.empty_like(_meta_of(lazy), device=device_of(lazy))
    return func(lazy._real, *args[1:], **kwargs)


def _copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``copy_`` of a lazy tensor into memory that exists."""
    del kwargs
    if len(args) < 2 or isinstance(args[0], LazyTensor) or not isinstance(args[1], LazyTensor):  # noqa: PLR2004
        return NotImplemented
    del func
    return args[0] if args[1]._recorder.record(args[0], args[1]) else NotImplemented


def _assigned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``memory[index] = lazy``."""
    del func, kwargs
    memory, index, lazy = args
    if isinstance(memory, LazyTensor) or not isinstance(lazy, LazyTensor) or not _is_basic(index):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        place = memory.detach()[index]
    # Assignment lets go of leading dimensions of size one, which copying does not.
    shape = lazy._meta.shape
    while len(shape) > place.dim() and shape[0] == 1:
        lazy = lazy[0]
        shape = shape[1:]
    return None if lazy._recorder.record(place, lazy) else NotImplemented


_CONSTANT = 1 << 20
"""As many elements of ordinary tensors (an order, a padding) are kept for what is worked out with them."""

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
            "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_leaf",
            "grad", "grad_fn", "is_sparse", "is_quantized", "itemsize", "nbytes", "is_nested", "is_mkldnn", "is_xpu",
        )
    ),
    _T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.element_size, _T.stride, _T.storage_offset,
    _T.is_contiguous, _T.is_floating_point, _T.is_complex, _T.is_signed, _T.get_device, _T.__len__,
    torch.is_floating_point, torch.is_complex, torch.numel,
]  # fmt: skip
_VIEWS = [
    _T.narrow, _T.__getitem__, _T.chunk, _T.split, _T.split_with_sizes, _T.tensor_split, _T.unbind, _T.select,
    _T.view, _T.reshape, _T.t, _T.transpose, _T.swapaxes, _T.swapdims, _T.permute, _T.movedim, _T.moveaxis,
    _T.unsqueeze, _T.squeeze, _T.flatten, _T.unflatten, _T.expand, _T.expand_as, _T.view_as, _T.reshape_as,
    _T.T.__get__, _T.mT.__get__, _T.diagonal, _T.unfold, _T.hsplit, _T.vsplit,
    torch.narrow, torch.chunk, torch.split, torch.tensor_split, torch.unbind, torch.select, torch.reshape, torch.t,
    torch.transpose, torch.permute, torch.movedim, torch.unsqueeze, torch.squeeze, torch.flatten, torch.unflatten,
    torch.swapaxes, torch.swapdims, torch.moveaxis, torch.split_with_sizes, torch.hsplit, torch.vsplit, torch.diagonal,
]  # fmt: skip
_LIKE = [
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like,
    _T.new_zeros, _T.new_ones, _T.new_empty, _T.new_full,
]  # fmt: skip
_COMPUTES = [
    # Of other elements.
    _T.neg, _T.__neg__, _T.exp, _T.log, _T.abs, _T.sqrt, _T.rsqrt, _T.reciprocal, _T.square, _T.sigmoid, _T.clamp,
    _T.add, _T.__add__, _T.__radd__, _T.sub, _T.__sub__, _T.__rsub__, _T.mul, _T.__mul__, _T.__rmul__,
    _T.div, _T.__truediv__, _T.pow, _T.__pow__, _T.bitwise_and, _T.__and__, _T.bitwise_or, _T.__or__,
    _T.bitwise_xor, _T.__xor__, _T.bitwise_not, _T.__invert__, _T.__lshift__, _T.__rshift__,
    torch.neg, torch.exp, torch.log, torch.abs, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.square,
    torch.sigmoid, torch.clamp, torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.where,
    torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor, torch.bitwise_not,
    torch.bitwise_left_shift, torch.bitwise_right_shift,
    # In another order.
    torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack, torch.flip, torch.roll,
    torch.repeat_interleave, torch.index_select, torch.tile, torch.nn.functional.pad, torch.reshape, torch.flatten,
    torch.clone, _T.contiguous, _T.clone, _T.reshape, _T.flatten, _T.view, _T.__getitem__, _T.repeat, _T.tile,
    _T.repeat_interleave, _T.flip, _T.roll, _T.index_select,
]  # fmt: skip
_FIRST: dict[Any, Handler] = {
    **dict.fromkeys(_DESCRIBES, _described),
    **dict.fromkeys(_VIEWS, _viewed),
    **dict.fromkeys([_T.detach, _T.data.__get__, torch.detach], _same),
    **dict.fromkeys([_T.contiguous, _T.clone, torch.clone], _packed),
    **dict.fromkeys([*_CASTS, _T.to, _T.cpu, _T.type], _converted),
    **dict.fromkeys(_LIKE, _made_like),
    _T.__iter__: _iterated,
    _T.copy_: _copied,
    _T.__setitem__: _assigned,
    **dict.fromkeys([_T.zero_, _T.fill_], _overwritten),
}
for _handlers in (_FIRST, {_T.__getitem__: _chosen}, dict.fromkeys(_COMPUTES, _computed)):
    for _func, _handler in _handlers.items():
        HANDLERS.setdefault(_func, []).append(_handler)

HARMLESS = frozenset([*_DESCRIBES, *_VIEWS, _T.detach, _T.data.__get__, torch.detach])
"""Functions that read no element of a tensor."""
