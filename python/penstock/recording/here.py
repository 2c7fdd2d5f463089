"""Whether a recorder sees what this thread does, and how many of torch's modes on its stacks are Penstock's.

Knows neither what recorders do nor what the modes see.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.recording.recorder import Recorder


class Watch:
    """A recorder for as long as it records, and nothing after that."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder: Recorder | None = recorder


class _Here(threading.local):
    def __init__(self) -> None:
        self.watch: Watch | None = None
        """The last that was begun in this thread."""
        self.modes = 0
        """How many modes that see operators are on torch's stack for it, and for those before it."""

    def lasting(self) -> Watch | None:
        """The watch, while its recorder records."""
        return None if self.watch is None or self.watch.recorder is None else self.watch


here = _Here()


def is_watched(recorder: Recorder) -> bool:
    """Whether what this thread does is seen by a recorder."""
    watch = here.watch
    return watch is not None and watch.recorder is recorder


def others_watch() -> bool:
    """Whether this thread has modes of others, which see operators and may change what they do."""
    return bool(torch._C._len_torch_dispatch_stack() > here.modes)  # type: ignore[attr-defined, unused-ignore]
