"""The recording of this process, for whom others use memory that it still has to fill: that is read first.

There is one at a time. After a fork a child of the thread that records goes on with it, any other begins anew.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.recording.recorder import Recorder

_lock = threading.Lock()
_recorder: Recorder | None = None
_thread = 0
"""The thread that has entered it."""


def begin(recorder: Recorder) -> bool:
    """Makes it the one that records. False where another does."""
    global _recorder, _thread
    with _lock:
        if _recorder is not None:
            return False
        _recorder, _thread = recorder, threading.get_ident()
        return True


def end(recorder: Recorder) -> None:
    """It records no more."""
    global _recorder  # noqa: PLW0603
    with _lock:
        if _recorder is recorder:
            _recorder = None


def flush_overlapping(value: Any) -> None:
    """Has what is recorded be read if a tensor in ``value`` shares memory with what is still to be filled."""
    recorder = _recorder
    if recorder is not None:
        recorder.flush_overlapping(value)


def before(func: Any, args: Any, kwargs: Any) -> None:
    """Called before a function of torch that is given materialised tensors in the places of lazy ones."""
    recorder = _recorder
    if recorder is not None:
        recorder.before(func, args, kwargs)


def _in_child() -> None:
    global _lock, _recorder  # noqa: PLW0603
    _lock = threading.Lock()
    if _recorder is not None:
        _recorder.after_fork()
        if _thread != threading.get_ident():
            _recorder = None


os.register_at_fork(after_in_child=_in_child)
