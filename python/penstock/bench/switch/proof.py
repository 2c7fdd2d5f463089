"""The proof of a measurement's cache state, taken in the process that measures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import states


@contextlib.contextmanager
def proved(task: dict[str, Any], files: list[Path]) -> Iterator[dict[str, Any]]:
    """Brings the files to the task's state. What it yields has the proof once the block has ended.

    Raises:
        StateError: the state cannot be made.
    """
    share = states.set_cache(files, task["state"])
    nbytes = sum(file.stat().st_size for file in files)
    # A host takes free pages back within seconds: without this, the first way to need memory would pay for it.
    states.settle_memory(states.enough_memory(nbytes))
    read = states.device_bytes()
    found: dict[str, Any] = {"cache": {"before": round(share, 4)}}
    yield found
    if task.get("counted"):
        found["cache"]["device"] = round((states.device_bytes() - read) / nbytes, 4)
