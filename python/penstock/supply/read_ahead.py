"""Bringing a mapped file into the page cache a little before it is touched.

Libraries take views of a mapped file one by one and touch them later, from one thread, which is the slowest way to read
a file: each missing page stops the thread. ``ReadAhead`` gets the name of the tensor that is wanted next. It
makes sure that many threads have read its bytes into memory, and that reading goes on behind it: the stretch of the
file that holds the tensor at once, the next stretch on the side. A tensor that is asked for alone costs its own bytes.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.supply.own_process import OwnProcess
from penstock.supply.streamed import groups_of

if TYPE_CHECKING:
    from penstock.checkpoint import Checkpoint

STRETCH_BYTES = 128 << 20
"""What is read at once: long enough for all threads, short enough to be used before memory runs short."""


class ReadAhead(OwnProcess):
    """The stretches of one checkpoint's files. May be asked by several threads at once.

    Args:
        checkpoint: local files.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._stretches = groups_of(checkpoint, checkpoint.offset_keys(), STRETCH_BYTES)
        self._of = {name: number for number, names in enumerate(self._stretches) for name in names}
        self._brought: set[int] = set()
        self._asked = 0
        self._closed = False

    def want(self, name: str) -> None:
        """Returns when the tensor's bytes are in memory (as far as the kernel keeps them there).

        Raises:
            StorageError: naming a tensor that cannot be read.
            LocationChangedError: a file is no longer the one that was opened.
        """
        number = self._of[name]
        with self._locked():
            self._asked += 1
            if self._asked == 1 and len(self._stretches) > 1:
                self._bring([name])
                return
            if number not in self._brought:
                self._wait()
            if number not in self._brought:
                self._bring(self._stretches[number])
                self._brought.add(number)
            self._begin(number + 1)

    def everything(self) -> None:
        """All tensors, as long as none of them is needed before."""
        with self._locked():
            self._wait()
            self._bring(self._checkpoint.offset_keys())
            self._brought.update(range(len(self._stretches)))

    def close(self) -> None:
        """Waits for the stretch that is being read."""
        with self._locked():
            self._closed = True
            self._wait()

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._next: threading.Thread | None = None

    def _begin(self, number: int) -> None:
        busy = self._next is not None and self._next.is_alive()
        if number < len(self._stretches) and number not in self._brought and not busy and not self._closed:
            ahead = threading.Thread(target=self._quietly, args=(number,), name="penstock-ahead", daemon=True)
            # Without a thread nothing is read ahead, and nothing is wrong.
            with suppress(RuntimeError):
                ahead.start()
                self._next = ahead

    def _wait(self) -> None:
        if self._next is not None:
            self._next.join()
            self._next = None

    def _quietly(self, number: int) -> None:
        # Whoever wants what cannot be read gets the error.
        try:
            self._bring(self._stretches[number])
        except PenstockError:
            return
        self._brought.add(number)

    def _bring(self, names: list[str]) -> None:
        self._checkpoint.prefault(names)
