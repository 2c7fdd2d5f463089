"""Calls whose result is worked out of one weight, when that is read: arithmetic, another order, parts put together.

Such a call is kept, with its constants as they are now (``sources.DeferredOp``). A lazy tensor stands for the result,
with the shape, dtype and strides that torch says it has for tensors on the meta device. What is not like that is left
to others: these functions return NotImplemented.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator
from typing import Any

import torch

from penstock.recording.lazy import LazyTensor, first_is_lazy, has_lazy, is_alias, unwatched
from penstock.recording.sources import DeferredOp, Placeholder, Value, is_contiguous, mapped


def worked_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What depends on one weight alone, and on constants: kept, and made when that is read."""
    operands = _Operands()
    operands.add((args, kwargs))
    of, constants = operands.lazy, operands.constants
    if not of or not operands.stay or "out" in kwargs or sum(map(torch.Tensor.numel, constants)) > _CONSTANT:
        return NotImplemented
    first, allowed = of[0], _DTYPES.get(func)
    if any(lazy.lazy_value.stored() != first.lazy_value.stored() for lazy in of) or (
        allowed is not None and any(lazy.lazy_value.dtype not in allowed for lazy in of)
    ):
        return NotImplemented
    for constant in constants:
        if type(constant) not in _REGULAR or (constant.requires_grad and torch.is_grad_enabled()):
            return NotImplemented
    # They may change before they are used.
    first.lazy_recorder.flush_overlapping(constants)
    with unwatched():
        own = {id(constant): constant.detach().clone() for constant in constants}
        holes = iter(range(len(of)))
        holed = _holed(args, own, holes), _holed(kwargs, own, holes)
        call = DeferredOp(func, *holed, tuple(lazy.lazy_value for lazy in of))
        result = _result(call, of) if _is_allowed(func, args, kwargs) else NotImplemented
    if result is NotImplemented or not _is_of_default_dtype(func, result.dtype, [*of, *constants]):
        return result
    if func not in _ARITHMETIC or result.dtype != torch.get_default_dtype():
        return NotImplemented
    # As torch does first: then the result depends on its operands alone.
    return worked_out(func, _in(result.dtype, args), _in(result.dtype, kwargs))


def _is_allowed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch takes arguments of which tensors on the meta device do not say. False where that is not plain."""
    check = _CHECKS.get(func)
    return check is None or check(func, args, kwargs)


def _is_arithmetic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whole numbers are not divided by zero, not every dtype has a complex one, no bool is subtracted or a factor."""
    if "rounding_mode" in kwargs or any(isinstance(value, complex) for value in args):
        return False
    return func not in _SUMS or not ("alpha" in kwargs or len(args) > 2 or any(map(_is_bool, args)))  # noqa: PLR2004


def _is_repeating(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Any size is taken for the right one."""
    del func
    return len(args) <= _REPEATS_ARGS and "output_size" not in kwargs


def _is_padding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """With constants."""
    del func
    return len(args) == 2 and not kwargs.keys() - {"value"}  # noqa: PLR2004


def _is_joining(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """What is rare is converted to nothing else."""
    del func, kwargs
    joined = args[0] if args else ()
    if not isinstance(joined, (list, tuple)):
        return False
    dtypes = {value.dtype for value in joined if isinstance(value, torch.Tensor)}
    return len(dtypes) == 1 or dtypes <= _COMMON


def _is_selecting(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """From the end they are not counted here, and materialised ones raise IndexError for what is not there."""
    del func
    tensor, dim, index = (*args, None, None)[:3]
    if kwargs or not isinstance(tensor, LazyTensor) or not isinstance(dim, int):
        return False
    return -tensor.dim() <= dim < tensor.dim() and _are_below(index, tensor.shape[dim], least=0)


def _is_indexing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Indices are of elements that there are."""
    del func, kwargs
    if not isinstance(args[0], LazyTensor):
        return True
    items = args[1] if isinstance(args[1], tuple) else (args[1],)
    sizes = tuple(args[0].shape)
    gap = next((at for at, item in enumerate(items) if item is Ellipsis), len(items))
    before, after = items[:gap], items[gap + 1 :]
    return _each_is_below(before, sizes) and _each_is_below(after[::-1], sizes[::-1])


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool)


def _each_is_below(items: tuple[Any, ...], sizes: tuple[int, ...]) -> bool:
    left = iter(sizes)
    for item in items:
        if isinstance(item, (slice, int)) and not isinstance(item, bool):
            next(left, None)
        elif item is not None and not _are_below(item, next(left, 0)):
            return False
    return True


def _are_below(index: Any, size: int, least: int | None = None) -> bool:
    """Whether whole numbers are all of a dimension of so many elements; false for what is something else."""
    least = -size if least is None else least
    if isinstance(index, list):
        return all(type(number) is int and least <= number < size for number in index)
    if type(index) not in _REGULAR or index.dtype not in {torch.int32, torch.int64} or index.is_meta:
        return False
    return not index.numel() or bool(((index >= least) & (index < size)).all())


class _Operands:
    """Tensors among the arguments of a call, in their order. (Functions that call themselves would keep them.)"""

    def __init__(self) -> None:
        self.lazy: list[LazyTensor] = []
        self.constants: list[torch.Tensor] = []
        self.stay = True
        """Whether no argument can change before it is used."""

    def add(self, value: Any) -> None:
        if isinstance(value, LazyTensor):
            self.lazy.append(value)
            return
        if isinstance(value, torch.Tensor):
            self.constants.append(value)
        self.stay = self.stay and _stays(value)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
            self.add(item)


def _holed(value: Any, own: dict[int, torch.Tensor], holes: Iterator[int]) -> Any:
    """Arguments with holes in the places of lazy tensors, in the same order, and copies of the others."""
    if isinstance(value, LazyTensor):
        return Placeholder(next(holes))
    return own[id(value)] if id(value) in own else mapped(lambda item: _holed(item, own, holes), value)


def _is_of_default_dtype(func: Any, dtype: torch.dtype, operands: list[torch.Tensor]) -> bool:
    """Whether a result has torch's default dtype since none of the tensors that it is made of has one of its kind."""
    if not (dtype.is_floating_point or dtype.is_complex) or func in _NAMES_DTYPE:
        return False
    return not any(operand.dtype.is_floating_point or operand.dtype.is_complex for operand in operands)


def _in(dtype: torch.dtype, value: Any) -> Any:
    """Arguments with their tensors converted."""
    return value.to(dtype) if isinstance(value, torch.Tensor) else mapped(lambda item: _in(dtype, item), value)


def _stays(value: Any) -> bool:
    """Whether an argument is the same when it is used: NumPy's arrays may not be, for one."""
    if isinstance(value, torch.Tensor):
        return True  # copied
    if isinstance(value, slice):
        return all(bound is None or isinstance(bound, int) for bound in (value.start, value.stop, value.step))
    return value is None or value is Ellipsis or isinstance(value, _STAYS)


def _result(call: DeferredOp, of: list[LazyTensor]) -> Any:
    """A lazy tensor for the result of a call; NotImplemented for one whose elements have gaps between them."""
    metas = [value.as_meta() for value in call.of]
    try:
        meta = call.of_values(metas)
    except Exception:  # noqa: BLE001 - its shape depends on its values, or torch refuses it: a materialised one tells
        return NotImplemented
    if type(meta) is not torch.Tensor or not meta.is_meta:
        return NotImplemented
    is_part = any(is_alias(meta, operand) for operand in metas)
    if is_part and len(metas) > 1:
        return NotImplemented
    # Of a transposed tensor's elements, most functions keep the order.
    strides = meta.stride()
    order = tuple(sorted(range(meta.dim()), key=lambda dimension: -strides[dimension]))
    in_order = meta.permute(order)
    if not is_contiguous(in_order):
        return NotImplemented
    is_turned = order != tuple(range(meta.dim()))
    value = torch.empty(in_order.shape, dtype=meta.dtype, device="meta")
    result = of[0].copied(Value(call._replace(order=order if is_turned else None), value))
    if is_part:
        result.lazy_storage.parent = of[0].lazy_storage, of[0].lazy_value
        result.lazy_storage.part = lambda tensor: call.of_values([tensor]).permute(order)
    if not is_turned:
        return result
    return result.viewed(value.permute([order.index(dimension) for dimension in range(meta.dim())]))


def chosen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows by a list of numbers: of the experts that a rank has, no others are read."""
    lazy, index = args
    if not first_is_lazy(args) or not isinstance(index, (list, torch.Tensor)) or has_lazy(index):
        return NotImplemented
    lazy.lazy_recorder.flush_overlapping(index)
    numbers = index.tolist() if isinstance(index, torch.Tensor) and index.dtype == torch.int64 else index
    if not isinstance(numbers, list) or not numbers or not all(type(number) is int for number in numbers):
        return NotImplemented
    first, last = min(numbers), max(numbers)
    if not lazy.dim() or first < 0 or last >= lazy.shape[0]:
        return NotImplemented
    return worked_out(func, (lazy.narrow(0, first, last - first + 1), [number - first for number in numbers]), kwargs)


_REGULAR = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
_CONSTANT = 1 << 20
"""As many elements of regular tensors (an order, a padding) are kept for what is worked out with them."""
_STAYS = (numbers.Number, str, torch.dtype, torch.device, torch.layout, torch.memory_format, list, tuple, dict)
"""What arguments may be, besides tensors: nothing that can change before it is used, and containers that are copied."""

_T: Any = torch.Tensor
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_OF_NUMBERS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, *_INTEGERS} - {torch.bool})
_COMMON = _OF_NUMBERS | {torch.bool}
_SUMS = frozenset(
    [
        *(getattr(_T, name) for name in ("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__")),
        torch.add,
        torch.sub,
    ]
)
_PAD = torch.nn.functional.pad
_JOINS = frozenset([torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack])
_SHIFTS = [_T.__lshift__, _T.__rshift__, torch.bitwise_left_shift, torch.bitwise_right_shift]
_ARITHMETIC = [
    _T.neg, _T.__neg__, _T.exp, _T.log, _T.abs, _T.sqrt, _T.rsqrt, _T.reciprocal, _T.square, _T.sigmoid, _T.clamp,
    _T.add, _T.__add__, _T.__radd__, _T.sub, _T.__sub__, _T.__rsub__, _T.mul, _T.__mul__, _T.__rmul__, _T.div,
    _T.__truediv__, _T.pow, _T.__pow__, torch.neg, torch.exp, torch.log, torch.abs, torch.sqrt, torch.rsqrt,
    torch.reciprocal, torch.square, torch.sigmoid, torch.clamp, torch.add, torch.sub, torch.mul, torch.div,
    torch.pow,
]  # fmt: skip
_BITWISE = [
    _T.bitwise_and, _T.__and__, _T.bitwise_or, _T.__or__, _T.bitwise_xor, _T.__xor__, _T.bitwise_not, _T.__invert__,
    *_SHIFTS, torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor, torch.bitwise_not,
]  # fmt: skip
_SELECTS = frozenset({torch.index_select, _T.index_select})
_POWERS = [_T.pow, _T.__pow__, torch.pow]
_REPEATS = frozenset({torch.repeat_interleave, _T.repeat_interleave})
_REPEATS_ARGS = 3
"""The tensor, the repeats and the dimension."""
_NAMES_DTYPE = frozenset({_T.to, _T.view})
"""Functions whose arguments say which dtype the result has."""
_DTYPES = {
    **dict.fromkeys(_ARITHMETIC, _OF_NUMBERS),
    **dict.fromkeys(_BITWISE, _INTEGERS),
    **dict.fromkeys(_SHIFTS, _INTEGERS - {torch.bool}),
    **dict.fromkeys([torch.flip, _T.flip, _PAD], _COMMON),
    # Whole numbers have no negative powers.
    **dict.fromkeys(_POWERS, _OF_NUMBERS - _INTEGERS),
}
"""Dtypes that these functions exist for on every device; what torch refuses it has to refuse at once."""
_CHECKS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]] = {
    **dict.fromkeys(_ARITHMETIC, _is_arithmetic),
    **dict.fromkeys(_REPEATS, _is_repeating),
    **dict.fromkeys(_JOINS, _is_joining),
    **dict.fromkeys(_SELECTS, _is_selecting),
    _PAD: _is_padding,
    _T.__getitem__: _is_indexing,
}
COMPUTES = [
    # Of other elements.
    *_ARITHMETIC, *_BITWISE, torch.where,
    # In another order.
    torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack, torch.flip, torch.roll,
    torch.repeat_interleave, torch.index_select, torch.tile, _PAD, torch.reshape, torch.flatten,
    torch.clone, _T.contiguous, _T.clone, _T.reshape, _T.flatten, _T.view, _T.__getitem__, _T.repeat, _T.tile,
    _T.repeat_interleave, _T.flip, _T.roll, _T.index_select,
]  # fmt: skip
