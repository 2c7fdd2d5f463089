"""Who is told of loads: each is told when one begins and how it ended.

A driver of loads (``penstock.loading``) tells, ``penstock.metrics`` listens; neither knows the other. Where nobody
listens, a load costs one look at an empty tuple. What a listener raises is logged: it fails no load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from penstock._native import LoadStats

logger = logging.getLogger(__name__)

Outcome = Literal["complete", "failed", "cancelled"]


class Ended(NamedTuple):
    """A load that has ended."""

    outcome: Outcome
    device: str
    """``"cpu"`` or ``"cuda:N"``."""
    stats: LoadStats
    """Of a load that did not complete, what its readers had not handed in is missing."""


class Listener(Protocol):
    """Told of every load of the process, in the thread that drives it."""

    def begun(self, device: str) -> None:
        """A load to this device begins."""

    def ended(self, load: Ended) -> None:
        """It has ended."""


_listeners: tuple[Listener, ...] = ()


def listen(listener: Listener) -> Callable[[], None]:
    """Tells it of all loads that begin from now on. Returns what ends that."""
    global _listeners  # noqa: PLW0603 - the process's
    _listeners = (*_listeners, listener)

    def stop() -> None:
        global _listeners  # noqa: PLW0603
        _listeners = tuple(other for other in _listeners if other is not listener)

    return stop


def begin(device: str) -> Callable[[Outcome, Callable[[], LoadStats]], None] | None:
    """Tells of a load that begins. Returns what tells of its end, to those who heard of its beginning; or None."""
    told = _listeners
    if not told:
        return None
    for listener in told:
        _tell(lambda to=listener: to.begun(device))  # type: ignore[misc]

    def end(outcome: Outcome, stats: Callable[[], LoadStats]) -> None:
        ended = Ended(outcome, device, stats())
        for listener in told:
            _tell(lambda to=listener: to.ended(ended))  # type: ignore[misc]

    return end


def _tell(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        logger.exception("what listens to loads failed")
