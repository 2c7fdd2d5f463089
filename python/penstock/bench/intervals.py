"""The median of samples and its 95 % interval, by ranks: no assumption about how times are distributed.

The interval of ranks k to n+1-k holds the median unless fewer than k samples lie on one side of it, which a binomial
distribution tells. Below six samples there is none: even the least and the most may lie on one side more often than
one time in twenty.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

MISSED = 0.05
"""How often an interval may miss the median."""
BAR = 0.05
"""The half width of an interval, as a share of the median, at which more rounds would tell little."""


class Interval(NamedTuple):
    """A median and the bounds of its interval."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """The farther bound's distance, as a share of the median."""
        return max(self.high - self.median, self.median - self.low) / self.median if self.median else math.inf

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


def of_median(values: Sequence[float]) -> Interval | None:
    """The interval of the median of what these are samples of; None where there are too few."""
    ordered, count = sorted(values), len(values)
    rank, missed = 0, 0.0
    while rank < count // 2 and 2 * (missed := missed + math.comb(count, rank) / 2**count) <= MISSED:
        rank += 1
    return Interval(statistics.median(ordered), ordered[rank - 1], ordered[-rank]) if rank else None


def is_narrow(values: Sequence[float], bar: float) -> bool:
    """Whether the median is known within ``bar``, a share of it, either way."""
    found = of_median(values)
    return found is not None and found.half_width <= bar
