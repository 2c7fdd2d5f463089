"""Memory by strides: which bytes elements span, and whether two of them share one.

Pure arithmetic; knows neither tensors nor files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_TRIES = 10_000
"""After so many steps, two that lie scattered count as overlapping."""


class Strided(NamedTuple):
    """Elements of a memory, at least one. All in bytes."""

    begin: int
    """Where the first element begins."""
    sizes: Sequence[int]
    """How many elements there are along each dimension: not bytes."""
    strides: Sequence[int]
    element: int

    def span(self) -> tuple[int, int]:
        """The first byte, and the one after the last."""
        moves = [(size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True)]
        below, above = sum(min(move, 0) for move in moves), sum(max(move, 0) for move in moves)
        return self.begin + below, self.begin + above + self.element

    def walk(self) -> list[tuple[int, int]]:
        """Its bytes as (size, stride) of dimensions. Which way one is walked is no matter."""
        dimensions = zip(self.sizes, self.strides, strict=True)
        return [(size, abs(stride)) for size, stride in dimensions if size > 1 and stride] + [(self.element, 1)]


def overlaps_itself(sizes: Sequence[int], strides: Sequence[int], element: int = 1) -> bool:
    """Whether two elements may share memory. True where that is not clear."""
    reach = element
    for stride, size in sorted((abs(stride), size) for size, stride in zip(sizes, strides, strict=True) if size > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def are_disjoint(one: Strided, other: Strided) -> bool:
    """Whether the two share no byte. False where that would take long to find out."""
    (first, end), (other_first, other_end) = one.span(), other.span()
    if end <= other_first or other_end <= first:
        return True
    # A byte of both is a solution of first + i·strides = other first + j·other strides, in as many steps each way as
    # the sizes allow. Steps of the same size are one unknown.
    steps: dict[int, tuple[int, int]] = {}
    for sign, strided in ((1, one), (-1, other)):
        for size, stride in strided.walk():
            least, most = steps.get(stride, (0, 0))
            steps[stride] = (least, most + size - 1) if sign > 0 else (least - size + 1, most)
    unknowns = [(stride, *steps[stride]) for stride in sorted(steps, reverse=True)]
    bounds = [(0, 0)]
    for stride, least, most in reversed(unknowns):
        bounds.insert(0, (bounds[0][0] + stride * least, bounds[0][1] + stride * most))
    tries = iter(range(_TRIES))

    def solvable(at: int, rest: int) -> bool:
        if at == len(unknowns):
            return rest == 0
        stride, least, most = unknowns[at]
        low, high = bounds[at + 1]
        return any(
            next(tries, None) is None or solvable(at + 1, rest - stride * count)
            for count in range(max(least, -((high - rest) // stride)), min(most, (rest - low) // stride) + 1)
        )

    return not solvable(0, other_first - first)
