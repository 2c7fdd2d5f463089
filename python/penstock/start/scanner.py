"""What becomes resident in the page cache while a start goes on, by step and in the order in which it is seen.

Looked at from a thread of its own: when a step ends, and about once a second in between, for at most a tenth of the
time. So a file belongs to the step in which it was first seen, and order within a second is not known.
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

_EVERY = 1.0
_SHARE = 10


@dataclass(frozen=True)
class Read:
    """What of one file was seen to become resident.

    Attributes:
        when: the monotonic time by which it was.
        path: the file.
        of: ``packages``, ``system``, ``model`` or ``caches``.
        ranges: bytes that were not resident before.
    """

    when: float
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
        self._events: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="penstock-residency", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def step_ended(self, step: str, when: float) -> None:
        """A step has ended, which may be said several times: what is resident is looked at."""
        self._events.put((step, when))

    def end(self, when: float) -> None:
        """Looks once more, and no more. What is found then was resident by that time."""
        self._events.put(("", when))
        self._thread.join()

    def _run(self) -> None:
        seen: set[str] = set()
        due = time.monotonic() + _EVERY
        while True:
            try:
                step, when = self._events.get(timeout=max(due - time.monotonic(), 0.0))
            except queue.Empty:
                step, when = None, time.monotonic()
            if step in seen and time.monotonic() < due:
                continue  # one of many imports
            begun = time.monotonic()
            self._look(when)
            if step == "":
                return
            if step is not None:
                seen.add(step)
            now = time.monotonic()
            due = now + max(_EVERY, (now - begun) * _SHARE)

    def _look(self, when: float) -> None:
        for path, known in self._known.items():
            if total(known) >= self._sizes[path]:
                continue
            now = resident(path)
            if now is not None and (new := without(now, known)):
                self.found.append(Read(when, path, self._files[path], new))
                self._known[path] = united(known, now)
