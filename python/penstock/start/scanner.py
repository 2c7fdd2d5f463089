"""What becomes resident in the page cache while a start goes on, by step and in the order in which it is seen.

Looked at from a thread of its own: once for each step that ends, and about once a second in between, for at most a
tenth of the time. So a file belongs to the step in which it was first seen, and order within a second is not known.
What was resident before cannot be seen to be read.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from penstock.start.residency import Ranges, resident, total, united, without
from penstock.start.steps import STEPS

_EVERY = 1.0
_SHARE = 10


@dataclass(frozen=True)
class Read:
    """What of one file was seen to become resident.

    Attributes:
        step: during which step.
        path: the file.
        of: ``packages``, ``system``, ``model`` or ``caches``.
        ranges: bytes that were not resident before.
    """

    step: str
    path: str
    of: str
    ranges: Ranges


class Scanner:
    """Looks at files from the moment it is made.

    Args:
        files: paths, and what each is of.

    Attributes:
        found: what became resident so far, in order. Complete after ``end``.
        before: bytes that were resident at first, and bytes of all files.
        hidden: files whose residency the kernel does not tell.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files
        self._known: dict[str, Ranges] = {}
        self._sizes: dict[str, int] = {}
        self.found: list[Read] = []
        self.hidden = 0
        for path in files:
            ranges = resident(path)
            if ranges is None:
                self.hidden += 1
                continue
            with suppress(OSError):
                self._sizes[path] = os.stat(path).st_size
                self._known[path] = ranges
        self.before = sum(map(total, self._known.values())), sum(self._sizes.values())
        self._events: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="penstock-residency", daemon=True)

    def start(self) -> None:
        """Begins to look. The step is the first."""
        self._thread.start()

    def step_ended(self, step: str) -> None:
        """What is first seen after the next look is of the step behind this one."""
        self._events.put(step)

    def end(self) -> None:
        """Looks once more, and no more."""
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        number, pause = 0, _EVERY
        while True:
            try:
                ended = self._events.get(timeout=pause)
            except queue.Empty:
                ended = STEPS[number - 1] if number else ""
            begun = time.monotonic()
            self._look(STEPS[number])
            if ended is None:
                return
            if ended:
                number = min(max(STEPS.index(ended) + 1, number), len(STEPS) - 1)
            pause = max(_EVERY, (time.monotonic() - begun) * _SHARE)

    def _look(self, step: str) -> None:
        for path, known in self._known.items():
            if total(known) >= self._sizes[path]:
                continue
            now = resident(path)
            if now is not None and (new := without(now, known)):
                self.found.append(Read(step, path, self._files[path], new))
                self._known[path] = united(known, now)
