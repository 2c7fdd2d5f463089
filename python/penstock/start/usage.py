"""What a process and all that descend from it have used: CPU seconds and bytes read from block devices.

From ``/proc``, so a process that is gone counts with whoever waited for it. One that was left to init is lost.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """CPU seconds (user and system), bytes that came from block devices, and the processes that are there."""

    cpu_seconds: float = 0.0
    disk_bytes: int = 0
    processes: int = 0


def descendants(pid: int) -> list[int]:
    """A process and those below it, as far as they are there."""
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := _fields(int(name))):
            below.setdefault(int(fields[1]), []).append(int(name))
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        left += below.get(found[-1], [])
    return found


def of(pid: int) -> Usage:
    """What a process and those below it have used since they began."""
    ticks = nbytes = count = 0
    for each in descendants(pid):
        fields = _fields(each)
        if not fields:
            continue
        count += 1
        ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of children that were waited for
        with suppress(OSError, ValueError), open(f"/proc/{each}/io", encoding="ascii") as file:
            nbytes += next((int(line.split()[1]) for line in file if line.startswith("read_bytes")), 0)
    return Usage(ticks / _TICKS, nbytes, count)


def _fields(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` behind the name, which may hold spaces and brackets: state, parent, ..."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
