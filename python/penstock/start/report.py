"""What was seen of a start, for programs. Arguments of the command are left out: they may hold secrets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.start.observe import Start
from penstock.start.residency import total
from penstock.start.scanner import Read
from penstock.start.steps import STEPS

SCHEMA = 1


def as_dict(start: Start) -> dict[str, Any]:
    """For JSON. Sizes are bytes, times seconds since the process was started; what is not known is None.

    ``became_resident`` has the bytes by step, and by file, that came to the page cache. What was there before cannot
    be seen to be read.
    """
    used = start.used_by_step()
    files = by_file(start.reads)
    steps = []
    for step in start.steps:
        here = files.get(step.name, {})
        use = used.get(step.name)
        steps.append(
            {
                "step": step.name,
                "begun": round(step.begun, 3),
                "ended": None if step.ended is None else round(step.ended, 3),
                "seconds": None if step.seconds is None else round(step.seconds, 3),
                "cpu_seconds": None if use is None else round(use.cpu_seconds, 2),
                "disk_bytes": None if use is None else use.disk_bytes,
                "became_resident": sum(here.values()),
                "files": [{"path": path, "bytes": nbytes} for path, nbytes in here.items()],
            }
        )
    return {
        "schema": SCHEMA,
        "engine": start.environment.engine,
        "version": start.environment.version,
        "libraries": dict(start.environment.libraries),
        "ready": start.ready,
        "status": start.status,
        "seconds": seconds(start),
        "resident_before": start.before[0],
        "candidate_bytes": start.before[1],
        "files_not_seen": start.hidden,
        "steps": steps,
    }


def seconds(start: Start) -> float | None:
    """From the start of the process to the first answer; None where there was none."""
    ended = next((step.ended for step in start.steps if step.name == STEPS[-1]), None)
    return None if ended is None else round(ended, 3)


def by_file(reads: Iterable[tuple[str, Read]]) -> dict[str, dict[str, int]]:
    """Bytes of each file by step, the largest first."""
    found: dict[str, dict[str, int]] = {}
    for step, read in reads:
        of = found.setdefault(step, {})
        of[read.path] = of.get(read.path, 0) + total(read.ranges)
    return {step: dict(sorted(of.items(), key=lambda item: -item[1])) for step, of in found.items()}
