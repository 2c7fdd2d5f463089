"""What a lazy tensor comes from: a tensor of a checkpoint, or a value that is worked out of one.

Loading code does more with a weight than to cut it: ``-torch.exp(a.float())``, ``torch.cat`` of its rows in another
order, ``reshape`` of what is transposed. Each makes a new tensor from views of one stored tensor. Such a call is kept
(``DeferredOp``) and made when the bytes are there, in the pass that reads them all: it costs no read of its own.
A ``Value`` says what a lazy tensor holds, and never changes: what is written to a weight later does not concern it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.recording.geometry import Reading, View, packed_strides, reading

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint


class TensorRef(NamedTuple):
    """A tensor of a checkpoint."""

    checkpoint: Checkpoint
    name: str
    shape: tuple[int, ...]


class Placeholder(NamedTuple):
    """Where in a call's arguments a lazy tensor stood."""

    number: int


class Value(NamedTuple):
    """What a lazy tensor holds: a view of ``root``, converted."""

    root: TensorRef | DeferredOp
    meta: torch.Tensor
    """The view, on the meta device: its storage stands for all of ``root``."""
    casts: tuple[torch.dtype, ...] = ()
    """Dtypes it is converted to, one after the other."""

    @property
    def dtype(self) -> torch.dtype:
        return self.casts[-1] if self.casts else self.meta.dtype

    def stored(self) -> TensorRef:
        """The tensor of the checkpoint that it comes from."""
        root = self.root
        return root if isinstance(root, TensorRef) else root.of[0].stored()

    def as_meta(self) -> torch.Tensor:
        """A tensor like it on the meta device: also its strides, by which torch decides between views and copies."""
        if not self.casts:
            return self.meta
        view = view_of(self.meta)
        memory = torch.empty(view.last() + 1 if view.numel() else 0, dtype=self.casts[-1], device="meta")
        return memory.as_strided(view.sizes, view.strides, view.offset if view.numel() else 0)

    def deferred_read(self) -> DeferredRead:
        """What to read for it."""
        if isinstance(self.root, DeferredOp):
            value = computed(self.root)
            return value._replace(make=lambda packed: self.of_computed(value.make(packed)))
        made = _of_stored(self.root, view_of(self.meta), self.meta.dtype)
        if not self.casts:
            return made
        return made._replace(make=lambda packed: converted(made.make(packed), self.casts), is_plain=False)

    def of_computed(self, value: torch.Tensor) -> torch.Tensor:
        """Its value, of the value of a root that is computed."""
        return converted(_strided(value.view(self.meta.dtype), view_of(self.meta)), self.casts)


def view_of(tensor: torch.Tensor) -> View:
    """Where a tensor's elements lie in its memory."""
    return View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


_T = torch.Tensor
_ROUNDED = frozenset(
    [
        torch.exp, _T.exp, torch.log, _T.log, torch.div, _T.div, _T.__truediv__, torch.divide, _T.divide,
        torch.true_divide, _T.true_divide,
    ]
)  # fmt: skip
"""Functions whose last bit differs from processor to processor: a GPU divides by a number by multiplying with one over
it. They are done where the lazy tensor says that it is; others where their result goes, with the same bits."""


class DeferredOp(NamedTuple):
    """What a function of torch makes of values that are all of one stored tensor: without gaps, and its own.

    A function whose result depends on torch's default dtype is none of them: that is the process's, and may be another
    when the value is worked out.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    of: tuple[Value, ...]
    device: torch.device
    """Where the lazy tensors said that they were."""
    order: tuple[int, ...] | None = None
    """The dimensions of the result in the order of its elements, where that is another."""

    def of_values(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result for these tensors in the holes."""
        device = values[0].device
        at = self.device if self.func in _ROUNDED and device.type != "meta" else device
        result: torch.Tensor = self.func(*_filled_in(self.args, values, at), **_filled_in(self.kwargs, values, at))
        return result.to(device)


def _filled_in(value: Any, values: Sequence[torch.Tensor], device: torch.device) -> Any:
    """Arguments with tensors in the holes, on a device."""
    if isinstance(value, Placeholder):
        return values[value.number].to(device)
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return mapped(lambda item: _filled_in(item, values, device), value)


class DeferredRead(NamedTuple):
    """What to read for a lazy tensor, and how to make it of what was read."""

    stored: TensorRef
    ranges: list[tuple[int, int]]
    make: Callable[[torch.Tensor], torch.Tensor]
    """From the box, packed, to the lazy tensor's value."""
    is_plain: bool
    """Whether the value is the box as it is, byte by byte."""


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Arguments of a call with what ``change`` makes of the items of lists, tuples and dicts; others as they are."""
    if isinstance(value, (list, tuple)):
        items = [change(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    return value


def converted(value: torch.Tensor, casts: Sequence[torch.dtype]) -> torch.Tensor:
    """The tensor in each of these dtypes, one after the other."""
    for dtype in casts:
        value = value.to(dtype)
    return value


def _of_stored(stored: TensorRef, view: View, bits: torch.dtype) -> DeferredRead:
    box: Reading = reading(stored.shape, view)

    def cut(packed: torch.Tensor) -> torch.Tensor:
        return _strided(packed.view(bits), box.view)

    plain = box.view.is_packed() and _count(box.ranges) == view.numel()
    return DeferredRead(stored, box.ranges, cut, plain)


def computed(root: DeferredOp) -> DeferredRead:
    """What to read for a computed value, and how to work it out."""
    reads = [value.deferred_read() for value in root.of]
    # One box that holds what each needs: they are parts of the same tensor.
    some = [read.ranges for read in reads if _count(read.ranges)] or [reads[0].ranges]
    box = [(min(first for first, _ in at), max(end for _, end in at)) for at in zip(*some, strict=True)]

    def part(packed: torch.Tensor, ranges: list[tuple[int, int]]) -> torch.Tensor:
        ends = zip(ranges, box, strict=True)
        inside = tuple(slice(max(first - begin, 0), max(end - begin, 0)) for (first, end), (begin, _) in ends)
        return packed[inside].contiguous()

    def compute(packed: torch.Tensor) -> torch.Tensor:
        packed = packed.view([end - first for first, end in box])
        values = [read.make(part(packed, read.ranges)) for read in reads]
        value = root.of_values(values)
        return (value if root.order is None else value.permute(root.order)).contiguous()

    return DeferredRead(reads[0].stored, box, compute, is_plain=False)


def is_contiguous(meta: torch.Tensor) -> bool:
    """Whether a tensor, which may be on the meta device, is its memory from the first element on."""
    view = view_of(meta)
    return view.numel() == 0 or (view.is_packed() and view.strides == packed_strides(view.sizes))


def _strided(packed: torch.Tensor, view: View) -> torch.Tensor:
    return packed.as_strided(view.sizes, view.strides, int(packed.storage_offset()) + view.offset)


def _count(ranges: list[tuple[int, int]]) -> int:
    return prod(end - first for first, end in ranges)
