"""The lock of a pool, whom it wakes, what is called after it, and when Ctrl-C comes.

Promises that within ``deferred``, and so with the lock held, no handler of SIGINT or SIGTERM raises in the main thread:
what was begun there is done, and KeyboardInterrupt comes at the end. It comes at once where a thread waits for changes,
or ``let_in`` says so. A handler is put in the place of the program's own for so long, and that is called later. Without
one in Python, and in other threads, nothing is done. Promises that what ``later`` is given is called without the lock:
handlers of logging are the program's, which may wait for other threads. Knows nothing of what the lock guards.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Whose handlers may raise: Ctrl-C, and what programs have end them."""


class _Interrupts:
    """Signals in the main thread, held back while ``depth`` is above 0. Only that thread touches it."""

    def __init__(self) -> None:
        self.depth = 0
        self._handlers: dict[int, _Handler] = {}
        """The program's own, while ``_note`` is in their place."""
        self._came: dict[int, FrameType | None] = {}

    def hold_back(self) -> None:
        """From here on."""
        if not self.depth:
            self._take_over()
        self.depth += 1

    def release(self) -> None:
        """Ends ``hold_back``. If it was the outermost, what came is told now, which may raise."""
        self.depth = max(self.depth - 1, 0)
        if not self.depth:
            self._give_back()

    def let_in(self) -> int:
        """Ends all ``hold_back`` for a while. Returns how many, for ``shut_out``. If it raises, they go on."""
        depth = self.depth
        if depth:
            try:
                self._give_back()
            except BaseException:
                self._take_over()
                raise
            self.depth = 0
        return depth

    def shut_out(self, depth: int) -> None:
        """Takes ``let_in`` back."""
        if depth:
            self._take_over()
            self.depth = depth

    def begin_anew(self) -> None:
        """In a forked child: its main thread is the one that forked, which holds nothing back."""
        self.depth, self._came = 0, {}
        self._give_back()

    def _take_over(self) -> None:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) and handler != self._note:
                self._handlers[number] = handler
                try:
                    signal.signal(number, self._note)
                except ValueError:
                    # The main thread of another interpreter.
                    del self._handlers[number]

    def _give_back(self) -> None:
        try:
            while self._handlers:
                number, handler = self._handlers.popitem()
                signal.signal(number, handler)
            while self._came:
                number, frame = self._came.popitem()
                told = signal.getsignal(number)
                if callable(told):
                    told(number, frame)
        finally:
            if self._handlers or self._came:
                # One of them raised. The others are the program's all the same.
                self._give_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came[number] = frame


_interrupts = _Interrupts()
os.register_at_fork(after_in_child=_interrupts.begin_anew)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def deferred() -> Iterator[None]:
    """Holds KeyboardInterrupt back to its end."""
    if not _is_main():
        yield
        return
    _interrupts.hold_back()
    try:
        yield
    finally:
        _interrupts.release()


@contextmanager
def let_in() -> Iterator[None]:
    """Lets KeyboardInterrupt come at once, within ``deferred``: for what takes long, and can be given up."""
    depth = _interrupts.let_in() if _is_main() else 0
    try:
        yield
    finally:
        _interrupts.shut_out(depth)


class Lock:
    """A lock that a thread may take several times, and a condition that others wait for."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        """How often the thread that has it has taken it."""
        self._waiting: list[threading.Lock] = []
        self._later: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        if _is_main():
            _interrupts.hold_back()
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        later = [] if self._depth else self._take_later()
        self._lock.release()
        try:
            _call(later)
        finally:
            if _is_main():
                _interrupts.release()

    def later(self, call: Callable[..., object], *arguments: Any, **named: Any) -> None:
        """Has a function called by this thread as soon as it has given the lock up. With the lock held."""
        self._later.append(functools.partial(call, *arguments, **named))

    def _take_later(self) -> list[Callable[[], object]]:
        taken, self._later = self._later, []
        return taken

    def wait(self) -> None:
        """Gives the lock up, however often it was taken, until ``notify_all``. KeyboardInterrupt may come meanwhile."""
        depth, mine = self._depth, threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        self._depth, later = 0, self._take_later()
        for _ in range(depth):
            self._lock.release()
        try:
            _call(later)
            with let_in():
                mine.acquire()
        finally:
            for _ in range(depth):
                self._lock.acquire()
            self._depth = depth
            if mine in self._waiting:
                self._waiting.remove(mine)

    def notify_if_free(self) -> None:
        """As ``notify_all``, without the lock held and without waiting for it: for finalizers."""
        if self._lock.acquire(blocking=False):
            try:
                self.notify_all()
            finally:
                self._lock.release()

    def notify_all(self) -> None:
        """Wakes all who wait, with the lock held."""
        for one in self._waiting:
            one.release()
        self._waiting.clear()


def _call(functions: list[Callable[[], object]]) -> None:
    """Calls all of them. What they raise breaks nothing: it is shown as ``logging`` shows what its handlers raise."""
    for function in functions:
        try:
            function()
        except Exception:  # noqa: BLE001, PERF203 - it is the program's
            if logging.raiseExceptions:
                traceback.print_exc()
