"""Calls whose result is worked out of one weight, when that is read: arithmetic, another order, parts put together.

Such a call is kept, with its constants as they are now (``sources.DeferredOp``). A lazy tensor stands for the result,
with the shape, dtype and strides that torch says it has for tensors on the meta device. What is not like that is left
to others: these functions return NotImplemented.

Recorded is what loading code does with whole weights: decays (``-exp(a.float())``), norms and scales (``1 + w``), heads
in another order (``view``, ``transpose``, ``reshape``), fused matrices (``cat``, ``stack``), some of the experts
(``w[[4, 5]]``), heads and scales that are repeated. All else is done with eager tensors.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from typing import Any

import torch

from penstock.recording.lazy import LazyTensor, first_is_lazy, has_lazy, is_alias, unwatched
from penstock.recording.sources import DeferredOp, Placeholder, Value, is_contiguous, mapped
from penstock.recording.waiting import flush_overlapping


def worked_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What depends on one weight alone, and on constants: kept, and made when that is read."""
    operands = _Operands()
    operands.add((args, kwargs))
    of, constants = operands.lazy, operands.constants
    if not of or not operands.stay or sum(map(torch.Tensor.numel, constants)) > _CONSTANT:
        return NotImplemented
    if any(lazy.lazy_value.stored() != of[0].lazy_value.stored() for lazy in of) or not _is_plain(func, args, kwargs):
        return NotImplemented
    for constant in constants:
        if type(constant) not in _REGULAR or (constant.requires_grad and torch.is_grad_enabled()):
            return NotImplemented
    # They may change before they are used.
    flush_overlapping(constants)
    with unwatched():
        own = {id(constant): constant.detach().clone() for constant in constants}
        holes = iter(range(len(of)))
        holed = _holed(args, own, holes), _holed(kwargs, own, holes)
        return _result(DeferredOp(func, *holed, tuple(lazy.lazy_value for lazy in of), of[0].lazy_storage.device), of)


def _is_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether tensors on the meta device say all of a call: torch takes it, and its result has this dtype.

    Of whole numbers torch refuses some arithmetic by value, and turns others to its default dtype.
    """
    if kwargs.keys() - {"dim", "copy"}:
        return False
    if func in _ARITHMETIC:
        return len(args) <= 2 and all(  # noqa: PLR2004
            value.dtype in _FLOATS if isinstance(value, torch.Tensor) else type(value) in {int, float} for value in args
        )
    if func in _JOINS:
        joined = args[0] if args else ()
        return isinstance(joined, (list, tuple)) and len({getattr(value, "dtype", None) for value in joined}) == 1
    return True


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
        # Tensors are copied.
        self.stay = self.stay and (value is None or isinstance(value, (torch.Tensor, *_STAYS)))
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
            self.add(item)


def _holed(value: Any, own: dict[int, torch.Tensor], holes: Iterator[int]) -> Any:
    """Arguments with holes in the places of lazy tensors, in the same order, and copies of the others."""
    if isinstance(value, LazyTensor):
        return Placeholder(next(holes))
    return own[id(value)] if id(value) in own else mapped(lambda item: _holed(item, own, holes), value)


def _result(call: DeferredOp, of: list[LazyTensor]) -> Any:
    """A lazy tensor for the result of a call; NotImplemented for one whose elements have gaps, or are an operand's."""
    metas = [value.as_meta() for value in call.of]
    try:
        meta = call.of_values(metas)
    except Exception:  # noqa: BLE001 - its shape depends on its values, or torch refuses it: a materialised one tells
        return NotImplemented
    if type(meta) is not torch.Tensor or not meta.is_meta or any(is_alias(meta, operand) for operand in metas):
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
    if not is_turned:
        return result
    return result.viewed(value.permute([order.index(dimension) for dimension in range(meta.dim())]))


def chosen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows by a list of numbers: of the experts that a rank has, no others are read."""
    lazy, index = args
    if not first_is_lazy(args) or not isinstance(index, (list, torch.Tensor)) or has_lazy(index):
        return NotImplemented
    flush_overlapping(index)
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
"""What arguments may be, besides tensors: what cannot change before it is used, as NumPy's arrays can, and containers,
which are copied."""

_T: Any = torch.Tensor
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""What these functions exist for on every device: what torch refuses it has to refuse at once."""
_ARITHMETIC = [
    _T.neg, _T.__neg__, _T.exp, _T.log, _T.abs, _T.sqrt, _T.reciprocal, _T.add, _T.__add__, _T.__radd__, _T.sub,
    _T.__sub__, _T.__rsub__, _T.mul, _T.__mul__, _T.__rmul__, _T.div, _T.__truediv__, _T.divide, _T.true_divide,
    torch.neg, torch.exp, torch.log, torch.abs, torch.sqrt, torch.reciprocal, torch.add, torch.sub, torch.mul,
    torch.div, torch.divide, torch.true_divide,
]  # fmt: skip
_JOINS = [torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack]
COMPUTES = [
    *_ARITHMETIC, *_JOINS, torch.repeat_interleave, torch.reshape, torch.flatten, torch.clone, _T.contiguous, _T.clone,
    _T.reshape, _T.flatten, _T.repeat, _T.repeat_interleave,
]  # fmt: skip
