"""Views as numbers: what of a stored tensor a view needs.

A view is what torch makes of ``narrow``, ``transpose``, ``view`` and the like: sizes and strides over the elements of a
memory, and where the first one lies. Pure arithmetic; knows neither tensors nor files.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class View(NamedTuple):
    """Elements of a memory, by strides. All in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def numel(self) -> int:
        return prod(self.sizes)

    def last(self) -> int:
        """The greatest element of a view that is not empty."""
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    def is_packed(self) -> bool:
        """Whether it is its memory from the first element on, in row-major order."""
        packed = packed_strides(self.sizes)
        dimensions = zip(self.sizes, self.strides, packed, strict=True)
        return self.offset == 0 and all(size == 1 or has == wants for size, has, wants in dimensions)


class Reading(NamedTuple):
    """What to read of a stored tensor for a view of it."""

    ranges: list[tuple[int, int]]
    """The box, ``(start, end)`` for every dimension of the stored tensor."""
    view: View
    """The view, of the box's elements packed in row-major order."""


def packed_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, stride = [], 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def reading(shape: Sequence[int], view: View) -> Reading:
    """The smallest box of a contiguous tensor of ``shape`` that is found to hold ``view``.

    It is exact for boxes, however their dimensions were split, swapped or left out; for other views (several rows and a
    part of the next, say) it is the rows that they touch.
    """
    if view.numel() == 0:
        return Reading([(0, 0) for _ in shape], View(view.sizes, packed_strides(view.sizes), 0))
    strides = packed_strides(shape)
    start = _coordinates(view.offset, shape, strides)
    extent = [0] * len(shape)
    steps: list[tuple[int, int] | None] = []
    for size, stride in zip(view.sizes, view.strides, strict=True):
        if size == 1 or stride == 0:
            steps.append(None)
            continue
        dimension = next(d for d in range(len(shape)) if shape[d] > 1 and strides[d] <= stride)
        if stride % strides[dimension]:
            return _rows(shape, strides, view)
        step = stride // strides[dimension]
        extent[dimension] += (size - 1) * step
        steps.append((dimension, step))
    if any(first + more >= size for first, more, size in zip(start, extent, shape, strict=True)):
        return _rows(shape, strides, view)
    packed = packed_strides([more + 1 for more in extent])
    # The stride of a single element is no matter, but to view elements as larger ones torch wants 1 for the last
    # dimension, and multiples of the larger size for all others.
    last = len(steps) - 1
    moved = tuple(
        int(size == 1 and at == last) if step is None else step[1] * packed[step[0]]
        for at, (size, step) in enumerate(zip(view.sizes, steps, strict=True))
    )
    ranges = [(first, first + more + 1) for first, more in zip(start, extent, strict=True)]
    return Reading(ranges, View(view.sizes, moved, 0))


def _rows(shape: Sequence[int], strides: Sequence[int], view: View) -> Reading:
    """All from the row of the first element to that of the last, in the outermost dimension where these differ."""
    first = _coordinates(view.offset, shape, strides)
    last = _coordinates(view.last(), shape, strides)
    differ = next(d for d in range(len(shape)) if first[d] != last[d])
    ranges = [(at, at + 1) for at in first[:differ]]
    ranges.append((first[differ], last[differ] + 1))
    ranges += [(0, size) for size in shape[differ + 1 :]]
    begin = sum(at * stride for at, stride in zip(first[: differ + 1], strides, strict=False))
    return Reading(ranges, View(view.sizes, view.strides, view.offset - begin))


def _coordinates(element: int, shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    return [element // stride % max(size, 1) for size, stride in zip(shape, strides, strict=True)]
