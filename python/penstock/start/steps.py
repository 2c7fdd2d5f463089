"""The six steps of a start, and what the lines of an engine's log say about them.

A step ends where the engine says so. What an engine says is in ``TABLES``, by engine and by the version that a table is
good from. A step whose end was not seen has no time of its own: its time is in the next step that was.
Pure: lines and times come from the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

IMPORT, ENGINE, WEIGHTS, COMPILE, CAPTURE, FIRST = STEPS = (
    "import",
    "engine start",
    "weights",
    "compile",
    "capture and warm-up",
    "first answer",
)
"""In the order in which they happen."""


@dataclass(frozen=True)
class Marker:
    """A line that ends a step.

    Attributes:
        step: which step.
        pattern: what the line holds.
        last: whether the last such line counts (of several ranks, the slowest) or the first.
    """

    step: str
    pattern: re.Pattern[str]
    last: bool = True


def _marker(step: str, pattern: str, *, last: bool = True) -> Marker:
    return Marker(step, re.compile(pattern), last)


_VLLM = (
    _marker(IMPORT, r"vLLM (API )?server version|non-default args:|Initializing a V1 LLM engine", last=False),
    _marker(ENGINE, r"Starting to load model ", last=False),
    _marker(WEIGHTS, r"Loading weights took |Model loading took "),
    _marker(
        COMPILE, r"torch\.compile (takes|took) |Directly load (AOT compilation|the compiled graph)|Warming up done\."
    ),  # the last is the one of CPUs
    _marker(CAPTURE, r"init engine \(profile, create kv cache, warmup model\) took "),
    _marker(FIRST, r"Application startup complete", last=False),
)
_SGLANG = (
    _marker(IMPORT, r"\bserver_args=", last=False),
    _marker(ENGINE, r"Load weight begin", last=False),
    _marker(WEIGHTS, r"Load weight end"),
    _marker(COMPILE, r"Compil(e|ing) .*(took|end|finished)"),
    _marker(CAPTURE, r"Capture .*\bend\b"),
    _marker(FIRST, r"The server is fired up and ready to roll", last=False),
)
_PROGRAM = (
    _marker(IMPORT, r"^penstock-start imported "),
    _marker(ENGINE, r"^penstock-start weights-begin ", last=False),
    _marker(WEIGHTS, r"^penstock-start weights-end "),
)

TABLES: dict[str, tuple[tuple[tuple[int, int], tuple[Marker, ...]], ...]] = {
    "vllm": (((0, 0), _VLLM),),
    "sglang": (((0, 0), _SGLANG),),
    "python": (((0, 0), _PROGRAM),),
}
"""By engine: from which version on (major, minor), and the markers. Newest last. ``python`` is any other program: its
lines are those of ``hooks``."""


def markers(engine: str, version: str | None) -> tuple[Marker, ...]:
    """The markers of an engine's version; of its newest where the version is not known."""
    tables = TABLES[engine]
    numbers = tuple(map(int, re.findall(r"\d+", version or "")[:2]))
    fitting = [of for since, of in tables if not numbers or since <= numbers]
    return (fitting or [tables[0][1]])[-1]


@dataclass(frozen=True)
class Step:
    """One step of a start.

    Attributes:
        name: which one.
        begun: seconds since the process was started.
        ended: likewise; None where its end was not seen.
    """

    name: str
    begun: float
    ended: float | None

    @property
    def seconds(self) -> float | None:
        """How long it took; None where that is not known."""
        return None if self.ended is None else self.ended - self.begun


class Timeline:
    """What was seen of a start so far.

    Args:
        begun: the time at which the process was started; later times are of the same clock.
        of: the markers.
        ready: a line that means that the program answers, in place of the engine's.
    """

    def __init__(self, begun: float, of: Iterable[Marker], ready: re.Pattern[str] | None = None) -> None:
        self._begun = begun
        self._markers = [marker for marker in of if ready is None or marker.step != FIRST]
        if ready is not None:
            self._markers.append(Marker(FIRST, ready, last=False))
        self._ends: dict[str, float] = {}

    @property
    def is_ready(self) -> bool:
        """Whether the first answer was seen."""
        return FIRST in self._ends

    def feed(self, line: str, when: float) -> str | None:
        """The step that this line ends, if it ends one."""
        for marker in self._markers:
            if not marker.pattern.search(line) or not (marker.last or marker.step not in self._ends):
                continue
            # A step that is over does not begin again: a program may import, or load, while it serves.
            if any(step in self._ends for step in STEPS[STEPS.index(marker.step) + 1 :]):
                continue
            self._ends[marker.step] = when
            return marker.step
        return None

    def end(self, step: str, when: float) -> None:
        """A step ended by what is no line: readiness, or the end of the program."""
        self._ends.setdefault(step, when)

    def steps(self) -> list[Step]:
        """All steps, each beginning where the one before it ended."""
        found, at = [], self._begun
        for name in STEPS:
            end = self._ends.get(name)
            found.append(Step(name, at - self._begun, None if end is None else end - self._begun))
            at = at if end is None else end
        return found
