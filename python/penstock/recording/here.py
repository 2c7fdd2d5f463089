"""Which recorders see what this thread does, and which of torch's modes on its stacks are theirs.

Knows neither what recorders do nor what the modes see.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from penstock.recording.recorder import Recorder


class Watch:
    """A recorder for as long as it records, and nothing after that."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder: Recorder | None = recorder


class Modes(Protocol):
    """The modes that one watch has in this thread."""

    def is_on(self) -> bool:
        """Whether the one that sees operators is on torch's stack."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.watches: list[Watch] = []
        self.modes: list[Modes] = []

    def lasting(self) -> tuple[Watch, ...]:
        """The watches whose recorders record."""
        return tuple(watch for watch in self.watches if watch.recorder is not None)


here = _Here()


def is_watched(recorder: Recorder) -> bool:
    """Whether what this thread does is seen by a recorder."""
    for watch in here.watches:  # noqa: SIM110 - asked at every call of torch
        if watch.recorder is recorder:
            return True
    return False


def others_watch() -> bool:
    """Whether this thread has modes of others, which see operators and may change what they do."""
    stack = torch._C._len_torch_dispatch_stack()  # type: ignore[attr-defined, unused-ignore]
    return bool(stack and stack > sum(modes.is_on() for modes in here.modes))
